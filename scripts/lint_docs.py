"""Lengths of the documents, and words of our own in pages, in prose of the code and in names; ``make lint`` runs it.

It needs nothing but Python. ``make docs`` looks at links; names and snippets are tests: test_docs.py, test_snippets.py.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CODE = ("src", "tests", "benchmarks", "examples", "scripts", "infra", "docs")

WORDS = 20_000
"""Words of all documents that are written by hand at most, code included (`words`); decisions and the page of benchmark
results have limits of their own."""
WORDS_OF_A_PAGE, WORDS_OF_A_DECISION = 2200, 300
LONGER = {
    "README.md": 1000,
    "CONTRIBUTING.md": 500,
    "benchmarks/README.md": 2500,
    "docs/adr/0012-what-does-not-earn-its-place.md": 500,
}
"""Words of the pages that have another limit."""
WORDS_OF_THE_CHANGELOG, WORDS_OF_ITS_LINES = 1000, 25
"""Words of what is not released, and of each of its lines."""

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
PATTERN = "|".join(re.escape(word).replace(r"\ ", r"\s+") for word in FORBIDDEN)


PRONOUNS = frozenset(
    "both each found given here like many mine one other others ours said some theirs wanted what which who".split()
)
PRONOUNS_IN_SRC = 17
"""Words that are no names of things, and how often ``src`` may still bind one of them."""


def documents(root: Path) -> list[Path]:
    """The pages that are written by hand and count."""
    names = ("README.md", "CONTRIBUTING.md", "docs/*.md", "docs/adr/*.md", "benchmarks/README.md")
    return sorted(page for name in names for page in root.glob(name))


def words(text: str) -> int:
    """The number of words of a page, as ``wc -w`` counts them, without the bars and rules of tables."""
    return len(re.sub(r"^\|[-:| ]+\|$", "", text, flags=re.MULTILINE).replace("|", " ").split())


def unfit_words(text: str) -> list[str]:
    """Forbidden words of a page's prose, code left out, and sentences that begin with "Of"."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    prose = re.sub(r"`[^`\n]*`", "", prose)
    found = []
    # "held-out" data is the field's own word.
    for match in re.finditer(rf"(?<![\w-])({PATTERN})(?!\w|[- ]out)", prose, re.IGNORECASE):
        word = " ".join(match[0].split())
        better = FORBIDDEN.get(word, FORBIDDEN.get(word.lower()))
        found.append(f"{word!r} after {prose[max(0, match.start() - 40) : match.start()]!r}: say {better}")
    for match in re.finditer(r"(?:^|[.:!?|*-])\s*Of\b.{0,40}", prose, re.MULTILINE):
        found.append(f"a leading 'Of': {match[0].strip()!r}")
    return found


def unfit_code(source: str) -> list[str]:
    """The same in docstrings, those of fields too, and comments; and arguments that say only whose the value is."""
    texts = [
        node.value.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    text = "\n\n".join([*texts, *re.findall(r"(?:^|\s)# (.*)$", source, re.MULTILINE)])
    return [*unfit_words(text), *re.findall(r"^ +\w+: [Oo]f .*", text, re.MULTILINE)]


def vague_summaries(source: str) -> list[str]:
    """Docstrings, those of fields too, that begin with What, How, Where or Returns instead of naming the thing."""
    found = re.findall(r'^ *r?"""((?:What|How|Where|Returns) .{0,50})', source, re.MULTILINE)
    return [
        f"{text!r}: a summary names the thing ('Free bytes of ...', not 'What is free'), or says Return"
        for text in found
    ]


def pronouns(source: str) -> int:
    """The number of variables and arguments of a file that are named by a pronoun."""
    nodes = list(ast.walk(ast.parse(source)))
    stored = [node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    return sum(name in PRONOUNS for name in (*stored, *(node.arg for node in nodes if isinstance(node, ast.arg))))


def problems(root: Path) -> Iterator[str]:
    """Everything that is wrong below a directory, a line each."""
    total = 0
    for page in documents(root):
        name = page.relative_to(root).as_posix()
        number = words(page.read_text(encoding="utf-8"))
        total += number * (page.parent.name not in ("adr", "benchmarks"))
        limit = LONGER.get(name, WORDS_OF_A_DECISION if "/adr/" in name else WORDS_OF_A_PAGE)
        if number > limit:
            yield f"{name}: {number} words; at most {limit}: say things once, or in a table"
    if total > WORDS:
        yield f"all documents but decisions: {total} words; at most {WORDS}"
    folders = ("docs", "infra", "benchmarks", "data")
    for page in sorted([*root.glob("*.md"), *(page for folder in folders for page in (root / folder).rglob("*.md"))]):
        text = page.read_text(encoding="utf-8")
        if "<!-- table" in text:
            text = re.sub(r"<!-- table.*?<!-- end of table -->", "", text, flags=re.DOTALL)
        yield from (f"{page.relative_to(root)}: {found}" for found in unfit_words(text))
        if page.name == "CHANGELOG.md":
            part = text.partition("\n## [Unreleased]")[2].partition("\n## ")[0].strip()
            if (number := len(part.split())) > WORDS_OF_THE_CHANGELOG:
                yield f"{page.name}: {number} words of what is not released; at most {WORDS_OF_THE_CHANGELOG}"
            for line in part.splitlines():
                if len(line.removeprefix("- ").split()) > WORDS_OF_ITS_LINES:
                    yield f"{page.name}: {line[:60]!r} has more than {WORDS_OF_ITS_LINES} words"
    counts = {path: pronouns(path.read_text("utf-8")) for path in (root / "src").rglob("*.py")}
    if (count := sum(counts.values())) > PRONOUNS_IN_SRC:
        most = ", ".join(path.name for path in sorted(counts, key=lambda path: -counts[path])[:5])
        yield f"src: {count} names are pronouns, most in {most}; at most {PRONOUNS_IN_SRC}: name the thing"
    for source in (root / "src").rglob("*.py"):
        yield from (f"{source.relative_to(root)}: {each}" for each in vague_summaries(source.read_text("utf-8")))
    for source in sorted(path for folder in CODE for path in (root / folder).rglob("*.py")):
        if source.name not in ("lint_docs.py", "test_docs.py"):  # which have the words themselves
            yield from (
                f"{source.relative_to(root)}: {found}" for found in unfit_code(source.read_text(encoding="utf-8"))
            )


def main(root: Path = ROOT) -> int:
    """Print what is wrong; 1 where there is something."""
    found = list(problems(root))
    print("\n".join(found), end="\n" * bool(found), file=sys.stderr)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
