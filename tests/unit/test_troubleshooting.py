"""docs/troubleshooting.md: what it quotes of ours is in the sources, and what it says of others has a source."""

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
OURS = "## What Lockstep says"
LOOKED_FOR = (
    "program continuator has halted",
    "unexpected peer",
    "launch id",
    "CompileTimeScopedVmemOom",
    "Barrier timed out",
    "/dev/vfio",
    "8476",
    "REQUIRE_MULTIHOST",
)


def sections(text):
    """Heading and text of each part."""
    return re.findall(r"^### (.*)\n((?:(?!^##).*\n?)*)", text, re.MULTILINE)


@functools.cache
def texts_of_the_sources():
    """Every string of the package; what an f-string puts in is an ellipsis."""
    found = []
    for path in (ROOT / "src" / "lockstep").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"\{\w*\}", "…", node.value))
    return found


def rows(text):
    """Cells of each row of the first table: the text, its cause, the way out."""
    table = re.search(r"^\|---.*\n((?:\|.*\n)+)", text, re.MULTILINE)[1]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in table.splitlines()]


def missing(text, texts):
    """The quoted texts that no source has in one piece."""
    quoted = [text.rstrip(".") for text in re.findall(r"`([^`]+)`", text)]
    return [text for text in quoted if not any(pattern(text).search(each) for each in texts)]


def pattern(text):
    """A text with any values where it has an ellipsis; at its begin and end there may be none."""
    return re.compile(".{0,60}".join(re.escape(part) for part in text.strip("… ").split("…")))


def test_every_text_of_ours_is_in_the_sources():
    texts = texts_of_the_sources()
    ours = rows(PAGE.partition(OURS)[2])
    assert len(ours) > 15 and all(len(row) == 3 and all(row) for row in ours)
    wrong = {text: lost for text, *_ in ours if (lost := missing(text, texts))}
    assert not wrong


def test_a_text_that_is_not_in_the_sources_is_seen():
    texts = texts_of_the_sources()
    assert missing("`this job has … processors, but … requires …`", texts)
    assert not missing("`this job has … process(es), but … requires …`", texts)


@pytest.mark.parametrize("heading", [heading for heading, _ in sections(PAGE.partition(OURS)[0])])
def test_what_is_said_of_others_has_a_source(heading):
    text = dict(sections(PAGE.partition(OURS)[0]))[heading]
    linked = "https://" in text or "protocol.md#" in text
    assert linked and "*Cause.*" in text


@pytest.mark.parametrize("text", LOOKED_FOR)
def test_what_people_search_for_is_there(text):
    assert any(text in line for line in PAGE.splitlines())


def test_every_part_says_what_to_do():
    assert not [heading for heading, text in sections(PAGE) if "*Way out.*" not in text and "*Cause" not in text]
