"""What the documentation says is there: configuration reference, snippets, links, names of files and of code."""

import ast
import functools
import importlib.util
import re
import textwrap
from pathlib import Path

import pytest
import yaml

from lockstep.main.arguments import decode_config
from lockstep.main.train_lm import TrainLmConfig

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "lockstep"
FOLDERS = ("docs", "infra", "benchmarks", "data")
PAGES = sorted([*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))])
ROOMS = {
    *("benchmarks", "config", "data", "docs", "examples", "infra", "scripts", "src", "tests"),
    *(path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"),
}
"""Directories: what begins with one of these and a slash is the name of a file or of a directory."""

WRITTEN = ("docs/api.md", "docs/configuration.md", "docs/reliability.md")
"""Pages that scripts write from docstrings and test tables, wholly or in part; their words are looked after there."""

LONGEST = {
    "README.md": 1000,
    "docs/architecture.md": 1300,
    "docs/protocol.md": 1300,
    "docs/scheduler-and-memory.md": 1300,
    "docs/weights-and-layouts.md": 1300,
    "docs/errors-and-exits.md": 1300,
}
"""Words of a page at most, tables and code included, as ``wc -w`` counts."""

FORBIDDEN = {
    "alike": "the same, equally",
    "held": "kept, has, took",
    "as they lie": "in place",
    "as it lies": "in place",
    "where they lie": "in place",
    "on the way": "while it is moved",
    "on its way": "in flight",
    "no matter": "whatever, for any",
    "relay": "reshard",
    "re-lay": "reshard",
    "re-laid": "resharded",
    "re-laying": "resharding",
    "settle": "run on all, raise if any failed",
    "settled": "run on all, raise if any failed",
    "settling": "run on all, raise if any failed",
    "fork": "copy pages",
    "forks": "page copies",
    "spool": "prompt store",
    "say_goodbye": "announce_exit",
    "DecodeGrid": "DecodeMesh",
    "decode grid": "decode mesh",
    "ScheduleSizes": "Capacity",
    "StoredWeight": "LazyWeight",
    "resting": "idle",
    "fullest": "with least free memory",
    "refusal": "infeasibility",
    "refusals": "infeasibilities",
    "abandon": "abort",
    "abandons": "aborts",
    "abandoned": "aborted",
}
"""Words of our own, and what the field says."""


ELSEWHERE = ("loop.py", "train.py", "conftest.py", "my-runs/simpo.yaml", "transformers/modeling_rope_utils.py")
"""Files that a page has its reader write, or that are another library's."""


def name(page):
    return page.relative_to(ROOT).as_posix()


def fenced(text):
    """Language and content of each code block."""
    return re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def blocks(page, language):
    return [content for kind, content in fenced(page.read_text(encoding="utf-8")) if kind == language]


def without_blocks(text):
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def code_names(page):
    """What stands in single backticks."""
    return re.findall(r"`([^`\n]+)`", without_blocks(page.read_text(encoding="utf-8")))


def file_names(text):
    """Names of files and directories: in backticks, and in the commands of code blocks."""
    spans = re.findall(r"`([^`\n]+)`", without_blocks(text))
    commands = [word for kind, content in fenced(text) if kind in ("", "sh") for word in content.split()]
    found = []
    for span in [*(word for one in spans for word in one.split()), *commands]:
        if not re.fullmatch(r"[\w.-]+(/[\w.-]+)*/?", span) or span.startswith("FILE."):
            continue
        room, slash, _ = span.partition("/")
        dated = re.match(r"\d{4}-\d\d-\d\d-", span)
        if (slash and room in ROOMS) or span.endswith((".py", ".md", ".yaml")) or (dated and span.endswith(".json")):
            found.append(span)
    return found


def exists(path, page):
    return any((root / path).exists() for root in (ROOT, PACKAGE, page.parent, ROOT / "benchmarks" / "results"))


def unfit_words(text):
    """Forbidden words of a page's prose, code left out, and sentences that begin with "Of"."""
    prose = re.sub(r"`[^`\n]*`", "", without_blocks(text))
    words = "|".join(re.escape(word).replace(r"\ ", r"\s+") for word in FORBIDDEN)
    found = []
    # "held-out" data is the field's own word.
    for match in re.finditer(rf"(?<![\w-])({words})(?!\w|[- ]out)", prose, re.IGNORECASE):
        word = " ".join(match[0].split())
        better = FORBIDDEN.get(word, FORBIDDEN.get(word.lower()))
        found.append(f"{word!r} after {prose[max(0, match.start() - 40) : match.start()]!r}: say {better}")
    for match in re.finditer(r"(?:^|[.:!?|*-])\s*Of\b.{0,40}", prose, re.MULTILINE):
        found.append(f"a leading 'Of': {match[0].strip()!r}")
    return found


def prose_of_code(source):
    """Docstrings, those of fields too, and comments of a Python file, one a paragraph."""
    texts = [
        node.value.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    return "\n\n".join([*texts, *re.findall(r"(?:^|\s)# (.*)$", source, re.MULTILINE)])


def unfit_arguments(text):
    """Lines of ``Args:`` that say whose the value is and not what it is."""
    return re.findall(r"^ +\w+: [Oo]f .*", text, re.MULTILINE)


def unreleased(text):
    """Lines of the changelog that are about what is not released, heading and empty lines included."""
    (part,) = re.findall(r"^## \[Unreleased\].*?(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    return part.strip().splitlines()


def tables(text):
    return re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)


@functools.cache
def defined():
    """Functions of the sources, and classes with the names of their members."""
    functions, classes = set(), {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                functions.add(node.name)
            elif isinstance(node, ast.ClassDef):
                members = classes.setdefault(node.name, set())
                members |= {n.name for n in node.body if isinstance(n, ast.FunctionDef)}
                members |= {ast.unparse(n.target) for n in node.body if isinstance(n, ast.AnnAssign)}
    return functions, classes


def script_at(path):
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def test_the_configuration_reference_is_up_to_date():
    script = script_at("scripts/make_config_docs.py")
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert page == script.render(), "run .venv/bin/python scripts/make_config_docs.py"


def test_the_five_lines_of_the_readme_are_those_of_the_example():
    snippet, levanter, tunix = blocks(ROOT / "README.md", "python")
    assert tunix in (ROOT / "docs" / "tunix.md").read_text(encoding="utf-8").replace("(samples,", "(config,")
    assert levanter in (ROOT / "docs" / "levanter.md").read_text(encoding="utf-8").replace("(samples,", "(config,")
    assert len(snippet.splitlines()) == 5
    assert textwrap.indent(snippet, "    ") in (ROOT / "examples" / "own_loop.py").read_text(encoding="utf-8")


def test_the_yaml_of_the_readme_is_read():
    (snippet,) = [s for s in blocks(ROOT / "README.md", "yaml") if s.startswith("# lockstep train-lm\n")]
    config = decode_config(TrainLmConfig, yaml.safe_load(snippet), "README.md")
    assert config.inference_eval.enabled


def test_the_quickstart_says_how_often_the_demo_samples():
    demo = yaml.safe_load((ROOT / "config" / "demo.yaml").read_text(encoding="utf-8"))
    page = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    assert f"Every {demo['inference_eval']['eval_every']} steps both hosts answer" in page


def anchors(text):
    """What a heading can be linked by, as GitHub makes it."""
    headings = re.findall(r"^#+ (.*)$", without_blocks(text), re.MULTILINE)
    return [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    dead = []
    for path, anchor in re.findall(r"\]\((?!https?://)([^)#\s]*)(#[^)]*)?\)", page.read_text(encoding="utf-8")):
        to = (page.parent / path).resolve() if path else page
        if not to.exists() or (anchor and anchor[1:] not in anchors(to.read_text(encoding="utf-8"))):
            dead.append(path + anchor)
    assert not dead


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_files_that_a_page_names_exist(page):
    text = page.read_text(encoding="utf-8")
    assert not [path for path in file_names(text) if path not in ELSEWHERE and not exists(path, page)]


def test_pages_that_the_code_names_exist():
    wrong, number = [], 0
    for folder in ("src", "tests", "benchmarks", "scripts", "examples", "infra"):
        for source in set((ROOT / folder).rglob("*.py")) - {Path(__file__)}:
            for path, heading in re.findall(r'(docs/[\w/-]+\.md)(?:, "([^"]+)")?', source.read_text(encoding="utf-8")):
                number += 1
                page = ROOT / path
                if not page.exists() or (heading and f"# {heading}\n" not in page.read_text(encoding="utf-8")):
                    wrong.append(f"{name(source)}: {path} {heading}")
    assert not wrong
    assert number > 5, "the sources were not found"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_names_of_code_exist(page):
    functions, classes = defined()
    wrong = []
    for code in code_names(page):
        if call := re.fullmatch(r"(\w+)\(\)", code):
            found = call[1] in functions
        elif member := re.fullmatch(r"([A-Z]\w+)\.(\w+)", code):
            found = member[1] not in classes or member[2] in classes[member[1]]
        else:
            continue
        if not found:
            wrong.append(code)
    assert not wrong


@pytest.mark.parametrize("page", LONGEST)
def test_a_page_is_short(page):
    number, limit = len((ROOT / page).read_text(encoding="utf-8").split()), LONGEST[page]
    assert number <= limit, f"{page} has {number} words; at most {limit}: move something to a page of its own"


def test_the_table_of_a_plan_in_the_readme_is_short():
    (table,) = [block for block in blocks(ROOT / "README.md", "text") if "HBM per device" in block]
    assert len(table.splitlines()) <= 10


def test_the_numbers_of_the_first_page_are_those_of_their_source():
    page = ROOT / "docs" / "index.md"
    (table,) = [each for each in tables(page.read_text(encoding="utf-8")) if "| source |" in each]
    for _, numbers, source in re.findall(r"^\| (.*) \| (.*) \| (.*) \|$", table, re.MULTILINE)[1:]:
        (link,) = re.findall(r"\]\(([^)#]+)", source)
        text = (page.parent / link).read_text(encoding="utf-8")
        assert re.findall(r"[\d.]+", numbers)
        assert not [number for number in re.findall(r"[\d.,]*\d", numbers) if f"| {number} |" not in text]


def test_the_changelog_of_what_is_not_released_is_short():
    assert len(unreleased((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))) <= 20


@pytest.mark.parametrize("page", [page for page in PAGES if name(page) not in WRITTEN], ids=name)
def test_words_are_those_of_the_field(page):
    text = page.read_text(encoding="utf-8")
    if page.name == "0011-layout-and-words.md":  # the table of old and new words
        for table in tables(text):
            text = text.replace(table, "")
    assert not unfit_words(text)


@pytest.mark.parametrize("folder", ["src", "tests", "benchmarks", "examples", "scripts", "infra", "docs"])
def test_words_of_code_are_those_of_the_field(folder):
    sources = sorted(set((ROOT / folder).rglob("*.py")) - {Path(__file__)})
    assert sources
    texts = {name(source): prose_of_code(source.read_text(encoding="utf-8")) for source in sources}
    wrong = {source: [*unfit_words(text), *unfit_arguments(text)] for source, text in texts.items()}
    assert not {source: found for source, found in wrong.items() if found}


def test_words_of_code_are_seen():
    source = 'def f(run):\n    """Do it.\n\n    Args:\n        run: of the job.\n    """\n    # All draw alike.\n'
    text = prose_of_code(source + 'A = "alike"\n"""Of the job."""\n')
    assert len(unfit_words(text)) == 2 and unfit_arguments(text) == ["        run: of the job."]


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("Every host draws alike.", "alike"),
        ("What is held by a host.", "held"),
        ("Weights are read as they lie.", "as they lie"),
        ("It is cast on the\nway into the layout.", "on the way"),
        ("Of a condition one branch runs.", "leading 'Of'"),
        ("- **Model.** A block is taken. Of a checkpoint the shape.", "leading 'Of'"),
        ("| relay | moves |", "relay"),
        ("All prompts have settled.", "settled"),
    ],
)
def test_a_forbidden_word_is_seen(line, what):
    (found,) = unfit_words(f"A page.\n\n{line}\n")
    assert what in found


def test_words_that_are_fine_pass():
    text = "Held-out questions, `relay` in code, a list of tokens.\n\n```\nas they lie\n```\n"
    assert not unfit_words(text)


def test_file_names_are_found():
    text = "`main/plan/hlo.py --x`, `docs/no.md`, `inference_eval/samples`, `models/hf/`\n\n```\nrun infra/no.py\n```\n"
    assert file_names(text) == ["main/plan/hlo.py", "docs/no.md", "models/hf/", "infra/no.py"]


def test_the_pictures_of_the_architecture_are_those_of_their_script():
    script = script_at("docs/images/make_architecture.py")
    for picture, draw in script.PICTURES.items():
        saved = (ROOT / "docs" / "images" / picture).read_text(encoding="utf-8")
        assert saved == draw(), "run python docs/images/make_architecture.py"


def test_every_package_is_on_the_map_and_in_its_picture():
    packages = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert packages <= {code.rstrip("/") for code in re.findall(r"^\| `([\w/]+)`", text, re.MULTILINE)}
    picture = (ROOT / "docs" / "images" / "packages.svg").read_text(encoding="utf-8")
    assert packages <= set(re.findall(r">(\w+)</text>", picture))
