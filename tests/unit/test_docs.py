"""What the documentation says is there: configuration reference, snippets, links, names of files and of code."""

import ast
import functools
import importlib.util
import re
import textwrap
from pathlib import Path

import pytest

from tests.snippets import texts_of_the_sources

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "lockstep"
FOLDERS = ("docs", "infra", "benchmarks", "data")
MADE = {
    "docs/api.md": "scripts/make_api_docs.py",
    "docs/configuration.md": "scripts/make_config_docs.py",
    "docs/faults.md": "scripts/make_fault_docs.py",
}
"""Pages of the site that scripts write when it is built."""
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md")),
        *(ROOT / page for page in MADE),
    ]
)
ROOMS = {
    *("benchmarks", "config", "data", "docs", "examples", "infra", "scripts", "src", "tests"),
    *(path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"),
}
"""Directories: what begins with one of these and a slash is the name of a file or of a directory."""

ELSEWHERE = (
    "loop.py",
    "train.py",
    "conftest.py",
    "my-runs/simpo.yaml",
    "my-runs/levanter.yaml",
    "my-runs/grpo.yaml",
    "my-runs/my_rewards.py",
    "my-samples.yaml",
    "transformers/modeling_rope_utils.py",
)
"""Files that a page has its reader write, or that are another library's."""


def name(page):
    return page.relative_to(ROOT).as_posix()


@functools.cache
def text_of(page):
    """The text of a page, of one that is made too."""
    made = MADE.get(name(page))
    return script_at(made).render() if made else page.read_text(encoding="utf-8")


def fenced(text):
    """Language and content of each code block."""
    return re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def blocks(page, language):
    return [content for kind, content in fenced(text_of(page)) if kind == language]


def without_blocks(text):
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def code_names(page):
    """What stands in single backticks."""
    return re.findall(r"`([^`\n]+)`", without_blocks(text_of(page)))


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
    roots = (ROOT, PACKAGE, page.parent, ROOT / "benchmarks" / "results")
    return path in MADE or any((root / path).exists() for root in roots)


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


def test_the_five_lines_of_the_readme_are_those_of_the_example():
    snippet, levanter, tunix = blocks(ROOT / "README.md", "python")
    assert tunix in (ROOT / "docs" / "tunix.md").read_text(encoding="utf-8").replace("(samples,", "(config,")
    assert levanter in (ROOT / "docs" / "levanter.md").read_text(encoding="utf-8").replace("(samples,", "(config,")
    assert len(snippet.splitlines()) == 5
    assert textwrap.indent(snippet, "    ") in (ROOT / "examples" / "own_loop.py").read_text(encoding="utf-8")


def anchors(text):
    """What a heading can be linked by, as GitHub makes it."""
    headings = re.findall(r"^#+ (.*)$", without_blocks(text), re.MULTILINE)
    return [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_files_and_names_of_code_exist(page):
    text, (functions, classes) = text_of(page), defined()
    wrong = [path for path in file_names(text) if path not in ELSEWHERE and not exists(path, page)]
    for path, anchor in re.findall(r"\]\((?!https?://)([^)#\s]*)(#[^)]*)?\)", text):
        to = (page.parent / path).resolve() if path else page
        if to not in PAGES and not to.exists() or (anchor and anchor[1:] not in anchors(text_of(to))):
            wrong.append(path + anchor)
    for code in code_names(page):
        if call := re.fullmatch(r"(\w+)\(\)", code):
            wrong += [code] * (call[1] not in functions)
        elif member := re.fullmatch(r"([A-Z]\w+)\.(\w+)", code):
            wrong += [code] * (member[2] not in classes.get(member[1], {member[2]}))
    assert not wrong


def test_pages_that_the_code_names_exist():
    folders = ("src", "tests", "benchmarks", "scripts", "examples", "infra")
    for source in {path for folder in folders for path in (ROOT / folder).rglob("*.py")} - {Path(__file__)}:
        for path, heading in re.findall(r'(docs/[\w/-]+\.md)(?:, "([^"]+)")?', source.read_text(encoding="utf-8")):
            page = ROOT / path
            assert page in PAGES and (not heading or f"# {heading}\n" in text_of(page)), f"{name(source)}: {path}"


def test_the_numbers_of_the_first_page_are_those_of_their_source():
    page = ROOT / "docs" / "index.md"
    (table,) = [each for each in tables(page.read_text(encoding="utf-8")) if "| source |" in each]
    for _, numbers, source in re.findall(r"^\| (.*) \| (.*) \| (.*) \|$", table, re.MULTILINE)[1:]:
        (link,) = re.findall(r"\]\(([^)#]+)", source)
        text = (page.parent / link).read_text(encoding="utf-8")
        assert re.findall(r"[\d.]+", numbers)
        assert not [number for number in re.findall(r"[\d.,]*\d", numbers) if f"| {number} |" not in text]


def test_the_linter_sees_words_of_our_own_and_counts(tmp_path, capsys):
    lint = script_at("scripts/lint_docs.py")
    page = "Every host draws alike. Cast on the\nway. Of a table. `relay`, held-out.\n\n```\nas they lie\n```\n"
    found = [each.partition(" after")[0] for each in lint.unfit_words(page)]
    assert found == ["'alike'", "'on the way'", "a leading 'Of': '. Of a table. , held-out.'"]
    source = 'def f(run):\n    """Do it.\n\n    Args:\n        run: of the job.\n    """\n    # All draw alike.\n'
    assert len(lint.unfit_code(source + 'A = "alike"\n"""Of the job."""\n')) == 3
    assert len(lint.vague_summaries(source + 'A = 1\n"""What is free."""\nB = 2\n"""Free bytes."""\n')) == 1
    (tmp_path / "README.md").write_text("word " * (lint.LONGER["README.md"] + 1))
    assert lint.main(tmp_path) == 1 and "README.md: 1001 words; at most 1000" in capsys.readouterr().err


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


def missing(text):
    """Quoted texts that no string of the sources has in one piece; an ellipsis stands for any values."""
    quoted = [each.rstrip(".") for each in re.findall(r"`([^`]+)`", text)]
    patterns = {each: ".{0,60}".join(map(re.escape, each.strip("… ").split("…"))) for each in quoted}
    sources = "\n".join(texts_of_the_sources())
    return [each for each, pattern in patterns.items() if not re.search(pattern, sources)]


def test_messages_that_pages_quote_are_in_the_sources():
    ours = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8").partition("## What Lockstep says")[2]
    rows = [row.strip("|\n").split(" | ") for row in tables(ours)[0].splitlines()[2:]]
    assert len(rows) > 15 and all(len(row) == 3 and all(map(str.strip, row)) for row in rows)
    assert not [lost for text, *_ in rows for lost in missing(text)]
    pod = (ROOT / "docs" / "first-pod.md").read_text(encoding="utf-8")
    assert not missing(" ".join(re.findall(r"`lockstep: [^`\n]+`", pod)))
    assert missing("`this job has … processors, but … requires …`")
