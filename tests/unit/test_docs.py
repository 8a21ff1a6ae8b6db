"""What the documentation says is there: links, names of files and code, numbers, pictures, messages, public names."""

import ast
import doctest
import functools
import inspect
import re
import signal
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest

import lockstep
from docs.images import make_architecture
from lockstep.report import NoopTracker
from scripts import lint_docs, make_api_docs, make_config_docs, make_fault_docs
from tests import snippets
from tests.snippets import ROOT

PACKAGE = ROOT / "src" / "lockstep"
MADE = {"docs/api.md": make_api_docs, "docs/configuration.md": make_config_docs, "docs/faults.md": make_fault_docs}
"""Pages of the site that scripts write when it is built."""
PAGES = sorted([*snippets.PAGES, *map(ROOT.joinpath, MADE)])
PACKAGES = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
FOLDERS = {*"benchmarks config data docs examples infra scripts src tests".split(), *PACKAGES}
"""What begins with one of these and a slash is the name of a file or of a directory."""
ELSEWHERE = (
    "loop.py train.py conftest.py my-runs/simpo.yaml my-runs/levanter.yaml my-runs/grpo.yaml my-runs/my_rewards.py "
    "my-samples.yaml transformers/modeling_rope_utils.py"
).split()
"""Files that a page has its reader write, or that are another library's."""


def name(page):
    return page.relative_to(ROOT).as_posix()


@functools.cache
def text_of(page):
    """The text of a file, of a page that is made too."""
    made = MADE.get(name(page))
    return made.render() if made else page.read_text(encoding="utf-8")


def prose(text):
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def file_names(text):
    """Names of files and directories: in backticks, and in the commands of code blocks."""
    commands = [block.text for block in snippets.read_blocks("", text) if block.language == "sh"]
    for word in " ".join([*re.findall(r"`([^`\n]+)`", prose(text)), *commands]).split():
        is_name = re.fullmatch(r"[\w.-]+(/[\w.-]+)*/?", word) and not word.startswith("FILE.")
        is_ours = "/" in word and word.partition("/")[0] in FOLDERS
        if is_name and (is_ours or re.search(r"\.(py|md|yaml)$|^\d{4}-\d\d-\d\d-.*\.json$", word)):
            yield word


@functools.cache
def defined():
    """The classes of the sources, their members as ``Class.member``, and functions as ``name()``."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                found.add(f"{node.name}()")
            elif isinstance(node, ast.ClassDef):
                members = [getattr(each, "name", None) or getattr(each, "target", None) for each in node.body]
                found |= {node.name, *(f"{node.name}.{getattr(each, 'id', each)}" for each in members)}
    return found


def anchors(text):
    """What a heading can be linked by, as GitHub makes it."""
    headings = re.findall(r"^#+ (.*)$", prose(text), re.MULTILINE)
    return [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_files_and_names_of_code_exist(page):
    text, known = text_of(page), {*ELSEWHERE, *MADE}
    roots = (ROOT, PACKAGE, page.parent, ROOT / "benchmarks" / "results")
    wrong = [file for file in file_names(text) if not (file in known or any((root / file).exists() for root in roots))]
    for path, anchor in re.findall(r"\]\((?!https?://)([^)#\s]*)(#[^)]*)?\)", text):
        to = (page.parent / path).resolve() if path else page
        if (to not in PAGES and not to.exists()) or (anchor and anchor[1:] not in anchors(text_of(to))):
            wrong.append(path + anchor)
    for code, cls in re.findall(r"`(\w+\(\)|([A-Z]\w+)\.\w+)`", prose(text)):
        wrong += [code] * (code not in defined() and (not cls or cls in defined()))
    assert not wrong


def test_pages_that_the_code_names_exist():
    for source in {path for folder in FOLDERS - {"docs"} for path in (ROOT / folder).rglob("*.py")}:
        for path, heading in re.findall(r'(docs/[\w/-]+\.md)(?:, "([^"]+)")?', source.read_text(encoding="utf-8")):
            page = ROOT / path
            assert page in PAGES and (not heading or f"# {heading}\n" in text_of(page)), f"{name(source)}: {path}"


def test_the_programs_of_the_readme_are_those_of_their_pages():
    loop, levanter, tunix = [block.text for block in snippets.BLOCKS if block.name.startswith("README.md:python:")]
    for program, page in ((levanter, "docs/levanter.md"), (tunix, "docs/tunix.md")):
        assert program in text_of(ROOT / page).replace("(samples,", "(config,")
    assert len(loop.splitlines()) == 5
    assert textwrap.indent(loop, "    ") in text_of(ROOT / "examples" / "own_loop.py")


def test_the_numbers_of_the_first_page_are_those_of_their_source():
    page = ROOT / "docs" / "index.md"
    rows = re.findall(r"^\| .* \| ([^|]*) \| [^|]*\]\(([^)#]+)[^|]*\|$", text_of(page).partition("## Numbers")[2], re.M)
    assert len(rows) > 3
    for numbers, link in rows:
        found = re.findall(r"[\d.,]*\d", numbers)
        assert found and all(f"| {number} |" in text_of((page.parent / link).resolve()) for number in found)


def test_the_pictures_of_the_architecture_are_those_of_their_script_and_have_every_package():
    for picture, draw in make_architecture.PICTURES.items():
        saved = text_of(ROOT / "docs" / "images" / picture)
        assert saved == draw(), "run python docs/images/make_architecture.py"
    rows = re.findall(r"^\| `([\w/]+)`", text_of(ROOT / "docs" / "architecture.md"), re.MULTILINE)
    assert {row.rstrip("/") for row in rows} >= PACKAGES <= set(make_architecture.PACKAGES)


def test_the_linter_sees_words_of_our_own_and_counts(tmp_path, capsys):
    page = "Every host draws alike. Cast on the\nway. Of a table. `relay`, held-out.\n\n```\nas they lie\n```\n"
    found = [each.partition(" after")[0] for each in lint_docs.unfit_words(page)]
    assert found == ["'alike'", "'on the way'", "a leading 'Of': '. Of a table. , held-out.'"]
    source = 'def f(run):\n    """Do it.\n\n    Args:\n        run: of the job.\n    """\n    # All draw alike.\n'
    assert len(lint_docs.unfit_code(source + 'A = "alike"\n"""Of the job."""\n')) == 3
    assert len(lint_docs.vague_summaries(source + 'A = 1\n"""What is free."""\nB = 2\n"""Free bytes."""\n')) == 1
    (tmp_path / "README.md").write_text("word " * (lint_docs.LONGER["README.md"] + 1))
    assert lint_docs.main(tmp_path) == 1 and "README.md: 1001 words; at most 1000" in capsys.readouterr().err


def missing(text):
    """Quoted texts that no string of the sources has in one piece; an ellipsis stands for any values."""
    quoted = [each.rstrip(".") for each in re.findall(r"`([^`]+)`", text)]
    patterns = {each: ".{0,60}".join(map(re.escape, each.strip("… ").split("…"))) for each in quoted}
    sources = "\n".join(snippets.texts_of_the_sources())
    return [each for each, pattern in patterns.items() if not re.search(pattern, sources)]


def test_messages_that_pages_quote_are_in_the_sources():
    ours = text_of(ROOT / "docs" / "troubleshooting.md").partition("## What Lockstep says")[2]
    rows = re.findall(r"^\| *(\S.*?) *\| *\S.*?\| *\S.*\|$", ours.strip().partition("\n\n")[0], re.MULTILINE)[2:]
    assert len(rows) > 15 and not missing("\n".join(rows))
    assert not missing("\n".join(re.findall(r"`lockstep: [^`\n]+`", text_of(ROOT / "docs" / "first-pod.md"))))
    assert missing("`this job has … processors, but … requires …`")


NAMES = make_api_docs.public_names()
SLOW = (
    "Engine SampleCallback audit models.check_reader models.load_hf models.save_hf testing.run_processes "
    "training.Trainer"
).split()
"""Names of lockstep whose examples compile programs or start processes: `make slow` runs them."""

LOOK = """
import sys
before = set(sys.modules)
import lockstep
assert {name.partition(".")[0] for name in set(sys.modules) - before} - sys.stdlib_module_names == {"lockstep"}
import lockstep.hosts
assert "jax" in sys.modules
assert not {"haliax", "equinox", "flax", "optax", "transformers"} & set(sys.modules)
for name in lockstep.__all__:
    getattr(lockstep, name)
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized(), "a job of several processes cannot be made any more"
"""


def test_every_public_name_has_an_entry_and_what_users_are_told_is_public():
    errors = {name for name, value in vars(lockstep.errors).items() if inspect.isclass(value)}
    assert len(NAMES) == len(set(NAMES)) and errors <= {name.rpartition(".")[2] for name in NAMES}
    assert {f"lockstep.{name}" for name in lockstep.__all__} <= set(NAMES)
    texts = [text_of(page) for page in PAGES if page.parent.name != "adr"]
    texts += [path.read_text(encoding="utf-8") for path in (ROOT / "examples").glob("*.py")]
    told = {name for text in texts for name in re.findall(r"\blockstep(?:\.[a-z_]+)*\.[A-Za-z_]+\b", text)}
    imports = (found for text in texts for found in re.findall(r"from (lockstep[\w.]*) import (\([^)]*\)|.*)", text))
    told |= {f"{module}.{name}" for module, names in imports for name in re.findall(r"\w+", names)}
    public = {id(make_api_docs.find(name)) for name in NAMES}
    for name in told:
        try:
            found = make_api_docs.find(name)
        except (ImportError, AttributeError):
            continue  # a file, or an attribute of an object
        assert inspect.ismodule(found) or id(found) in public, name
    named = {package for page in snippets.PAGES for package in re.findall(r"\blockstep\.(\w+)\.\w", text_of(page))}
    for package in named & PACKAGES - {"tunix"}:  # whose names a page imports, as it has an extra
        assert lockstep.__getattr__(package) is sys.modules[f"lockstep.{package}"]


def test_the_names_that_a_type_checker_sees_are_those_that_are_found():
    seen = re.findall(r"^    from lockstep\.(\S+) import (\w+) as (\w+)", text_of(PACKAGE / "__init__.py"), re.M)
    assert {shown: module.removesuffix(f".{name}") for module, name, shown in seen} == lockstep._HOME
    for name in lockstep.__all__:
        assert getattr(lockstep, name).__module__.startswith(f"lockstep.{lockstep._HOME[name]}")
    assert lockstep.__all__ == sorted(lockstep._HOME) and set(lockstep.__all__) <= set(dir(lockstep))


def test_an_import_loads_nothing_that_is_not_used_and_starts_no_backend():
    done = subprocess.run([sys.executable, "-c", LOOK], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def setup():
    """What the page says that its examples come after, and the script of a Levanter user."""
    handler = signal.getsignal(signal.SIGTERM)
    names = {}
    exec(compile(make_api_docs.SETUP, "docs/api.md", "exec"), names)
    policy = SimpleNamespace(compute_dtype="float32")
    trainer = SimpleNamespace(tracker=NoopTracker(), mp=policy, add_hook=lambda hook, every=1: None)
    trainer.with_training_hooks = lambda hooks: None
    yield names | {"trainer": trainer, "state": SimpleNamespace(model=names["model"])}
    signal.signal(signal.SIGTERM, handler)  # run_main has set one


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n[9:] in SLOW)) for n in NAMES])
def test_the_example_runs(name, setup, monkeypatch):
    monkeypatch.setattr("lockstep.callback.reporter.print_table", lambda *_, **__: None)  # when its thread comes to it
    examples = make_api_docs.examples(name)
    runner, report = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS), []
    runner.run(doctest.DocTest(examples, dict(setup), name, None, None, None), out=report.append)
    assert runner.tries == len(examples) > 0 and not runner.failures, "".join(report) or "there is no example"
