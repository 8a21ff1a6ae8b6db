"""What the documentation says is there: names of files and code, numbers, pictures, messages, public names.

Anchors, and links inside the site, are checked by ``make docs``.
"""

import doctest
import functools
import http.server
import inspect
import json
import math
import pkgutil
import re
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

import lockstep
from lockstep.report import NoopTracker
from scripts import check_links, make_api_docs, make_config_docs, make_fault_docs
from tests import snippets
from tests.extras import NEEDS_CLIENTS
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
SOURCES = "\n".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))


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


def is_defined(code):
    """Whether the sources have ``function()``, or ``Class.member`` where the class is ours."""
    cls, _, member = code.partition(".")
    body = re.search(rf"^class {cls}\b.*?^(?=\S)", SOURCES, re.DOTALL | re.MULTILINE) if member else None
    if body and (base := re.match(r"class \w+\((KindsOfLayers)\b", body[0])) and is_defined(f"{base[1]}.{member}"):
        return True
    return f"def {cls[:-1]}" in SOURCES if not member else not body or bool(re.search(rf"\b{member}\b", body[0]))


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[NEEDS_CLIENTS] * (name(page) == "docs/api.md"), id=name(page)) for page in PAGES]
)
def test_files_and_names_of_code_exist(page):
    text, known = text_of(page), {*ELSEWHERE, *MADE}
    roots = (ROOT, PACKAGE, page.parent, ROOT / "benchmarks" / "results")
    wrong = [file for file in file_names(text) if not (file in known or any((root / file).exists() for root in roots))]
    wrong += [code for code in re.findall(r"`(\w+\(\)|[A-Z]\w+\.\w+)`", prose(text)) if not is_defined(code)]
    assert not wrong


@pytest.mark.parametrize("page", [pytest.param(page, id=name(page)) for page in snippets.PAGES])
def test_links_lead_to_files_of_the_repository(page):
    """Where no site is built too, as on GitHub: pages of `MADE` are in no commit."""
    links = re.findall(r"\]\((?!https?:|mailto:|#)([^)#\s]+)", prose(text_of(page)))
    assert not [link for link in links if not (page.parent / link).exists()]


class Answers(http.server.BaseHTTPRequestHandler):
    """A server that answers with the number in the path; ``/get405`` knows no HEAD; ``/to404`` leads to the first."""

    def do_HEAD(self, get=False):
        moved = self.path == "/to404"
        code = 302 if moved else 200 if get and self.path == "/get405" else int(self.path[-3:])
        self.send_response(code)
        self.send_header("Location" if moved else "Content-Length", "/404" if moved else "0")
        self.end_headers()

    def do_GET(self):
        self.do_HEAD(get=True)

    def log_message(self, *_):
        pass


def test_outside_links_that_are_dead_are_found(tmp_path, monkeypatch, capsys):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        found = check_links.faults(f"{url}/{path}" for path in ("200", "get405", "404", "410", "to404", "403", "503"))
        server.shutdown()
    assert {link.rpartition("/")[2]: dead for link, (dead, _) in found.items()} == {
        "404": True, "410": True, "to404": True, "403": False, "503": False,
    }  # fmt: skip
    (tmp_path / "one.md").write_text(
        f"[a](https://a.test/200#part), https://b.test/404. {url}/404 http://localhost/404"
    )
    monkeypatch.setattr(check_links, "fault", lambda link: ("404" in link, "404 Not Found" * ("404" in link)))
    assert check_links.main(tmp_path) == 1
    assert capsys.readouterr().out == "dead: https://b.test/404: 404 Not Found (one.md)\n2 links, 1 dead\n"
    monkeypatch.setattr(check_links, "fault", lambda link: (True, "Name or service not known"))
    assert check_links.main(tmp_path) == 2 and "This needs a network" in capsys.readouterr().out


def test_pages_that_the_code_names_exist():
    for source in {path for folder in FOLDERS - {"docs"} for path in (ROOT / folder).rglob("*.py")}:
        for path, heading in re.findall(r'(docs/[\w/-]+\.md)(?:, "([^"]+)")?', source.read_text(encoding="utf-8")):
            page = ROOT / path
            assert page in PAGES and (not heading or f"# {heading}\n" in text_of(page)), f"{name(source)}: {path}"


def test_the_numbers_of_the_first_page_are_those_of_benchmarks():
    rows = re.findall(r"^\| .* \| ([\d.]+) \| `(\w+)`, `([\w.-]+)` \|$", text_of(ROOT / "README.md"), re.MULTILINE)
    assert len(rows) > 3
    for number, key, file in rows:
        values, decimals = [], len(number.partition(".")[2])
        result = (ROOT / "benchmarks" / "results" / file).read_text(encoding="utf-8")
        json.loads(result, object_hook=lambda entry, key=key, values=values: values.append(entry.get(key, math.nan)))
        assert number in [f"{value:.{decimals}f}" for value in values], (key, file)


def missing(text):
    """Quoted texts that no string of the sources has in one piece; an ellipsis stands for any values."""
    quoted = [each.rstrip(".") for each in re.findall(r"`([^`]+)`", text)]
    patterns = {each: ".{0,60}".join(map(re.escape, each.strip("… ").split("…"))) for each in quoted}
    sources = "\n".join(snippets.texts_of_the_sources())
    return [each for each, pattern in patterns.items() if not re.search(pattern, sources)]


def test_messages_that_pages_quote_are_in_the_sources():
    ours = text_of(ROOT / "docs" / "troubleshooting.md").partition("## What Lockstep says")[2]
    rows = re.findall(r"^\| *(\S.*?) *\| *\S.*?\| *\S.*\|$", ours.strip().partition("\n\n")[0], re.MULTILINE)[2:]
    assert len(rows) > 7 and not missing("\n".join(rows))
    assert not missing("\n".join(re.findall(r"`lockstep: [^`\n]+`", text_of(ROOT / "docs" / "first-pod.md"))))


NAMES = make_api_docs.public_names()
SLOW = (
    "Engine SampleCallback audit models.check_reader models.load_hf models.save_hf "
    "testing.assert_nothing_left testing.run_processes training.Trainer"
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


@NEEDS_CLIENTS
def test_every_public_name_has_an_entry_and_what_users_are_told_is_public():
    errors = {name for name, value in vars(lockstep.errors).items() if inspect.isclass(value)}
    assert len(NAMES) == len(set(NAMES)) and errors <= {name.rpartition(".")[2] for name in NAMES}
    assert {f"lockstep.{name}" for name in lockstep.__all__} <= set(NAMES)
    texts = [text_of(page) for page in [*PAGES, *(ROOT / "examples").glob("*.py")] if page.parent.name != "adr"]
    told = {name for text in texts for name in re.findall(r"\blockstep(?:\.[a-z_]+)*\.[A-Za-z_]+\b", text)}
    imports = (found for text in texts for found in re.findall(r"from (lockstep[\w.]*) import (\([^)]*\)|.*)", text))
    told |= {f"{module}.{name}" for module, names in imports for name in re.findall(r"\w+", names)}
    public = {id(make_api_docs.find(name)) for name in NAMES}
    for name in told - {"lockstep.NAME", "lockstep.env"}:  # any name, and a file
        named = pkgutil.resolve_name(name)
        assert inspect.ismodule(named) or id(named) in public, name


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
