"""What the documentation says is there: configuration reference, snippets, links, names of files and of code."""

import ast
import importlib.util
import re
import textwrap
from pathlib import Path

import pytest
import yaml

from lockstep.main.arguments import decode_config
from lockstep.main.train_lm import TrainLmConfig
from lockstep.main.train_simpo import TrainSimpoConfig

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "lockstep"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "infra").glob("*.md")])
PLANNED = "## Where there is room"
"""From here on a page may name files that do not exist yet."""


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def code_names(page):
    """What stands in single backticks."""
    text = re.sub(
        r"^```.*?^```", "", page.read_text(encoding="utf-8").split(PLANNED)[0], flags=re.DOTALL | re.MULTILINE
    )
    return re.findall(r"`([^`\n]+)`", text)


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


def test_the_configuration_reference_is_up_to_date():
    spec = importlib.util.spec_from_file_location("make_config_docs", ROOT / "scripts" / "make_config_docs.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert page == script.render(), "run .venv/bin/python scripts/make_config_docs.py"


def test_the_five_lines_of_the_readme_are_those_of_the_example():
    snippet, levanter = blocks(ROOT / "README.md", "python")
    assert levanter in (ROOT / "docs" / "levanter.md").read_text(encoding="utf-8").replace("(samples,", "(config,")
    assert len(snippet.splitlines()) == 5
    assert textwrap.indent(snippet, "    ") in (ROOT / "examples" / "own_loop.py").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("command", "cls"), [("train-lm", TrainLmConfig), ("train-simpo", TrainSimpoConfig)], ids=["lm", "simpo"]
)
def test_the_yaml_of_the_readme_is_read(command, cls):
    (snippet,) = [s for s in blocks(ROOT / "README.md", "yaml") if s.startswith(f"# lockstep {command}\n")]
    config = decode_config(cls, yaml.safe_load(snippet), "README.md")
    assert config.inference_eval.enabled


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!https?://)([^)#]*)(#[^)]*)?\)", text):
        path, anchor = target
        to = (page.parent / path).resolve() if path else page
        assert to.exists(), f"{page.name}: {path}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", to.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor[1:] in [re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings], anchor


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_files_and_names_of_code_exist(page):
    functions, classes = defined()
    wrong = []
    for name in code_names(page):
        if re.fullmatch(r"[\w./-]+\.(py|md|yaml)", name):
            found = any((root / name).exists() for root in (ROOT, PACKAGE, page.parent))
        elif call := re.fullmatch(r"(\w+)\(\)", name):
            found = call[1] in functions
        elif member := re.fullmatch(r"([A-Z]\w+)\.(\w+)", name):
            found = member[1] not in classes or member[2] in classes[member[1]]
        else:
            continue
        if not found:
            wrong.append(name)
    assert not wrong
