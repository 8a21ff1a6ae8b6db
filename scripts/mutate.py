"""Break random lines of the package, one at a time in a copy of the tree; name those that no test of the room notices.

Each broken copy is given the tests of `make test` for the line's room until one fails: first the file that mirrors the
module, then the other files whose tests reach the line, as a run before anything is broken has shown. Texts,
annotations, assertions, ``strict`` of zip and calls that only log are left alone. Some changes cannot be seen from
outside (a larger buffer, a second check of the same thing): the reader judges.
"""

import argparse
import ast
import collections
import contextlib
import importlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.isolation import COMPILED_FAST  # noqa: E402
from tests.unit.test_layout import COVERED, files_for  # noqa: E402

PACKAGE = "src/lockstep"
ROOMS = {
    "engine": ["tests/unit/engine"],
    "hosts": ["tests/unit/hosts", "tests/multiprocess/test_hosts.py"],
    "launch": ["tests/unit/launch"],
    "training": ["tests/unit/training"],
}
"""The tests of each room, cheap ones first."""


def tests_of(room: str) -> list[str]:
    """Return the tests of a room, or of a folder in one, such as ``training/data``."""
    return ROOMS[room] if room in ROOMS else [f"tests/unit/{room}"]


FLIPPED: dict[type[ast.AST], tuple[str, str]] = {
    **{ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.Eq: ("==", "!=")},
    **{ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"), ast.In: ("in", "not in")},
    **{ast.NotIn: ("not in", "in"), ast.And: ("and", "or"), ast.Or: ("or", "and"), ast.Add: ("+", "-")},
    **{ast.Sub: ("-", "+"), ast.Mult: ("*", "+"), ast.FloorDiv: ("//", "*"), ast.Div: ("/", "*"), ast.Mod: ("%", "+")},
}
SWAPPED = {"min": "max", "max": "min", "any": "all", "all": "any", "minimum": "maximum", "maximum": "minimum"}
REACHED, IMPORTED = "tmp/reached.json", "import"
ONLY_SAYS = {"print", "debug", "info", "warning", "error", "exception"}


class Mutant(NamedTuple):
    """A change of one file: the bytes from ``start`` to ``stop`` become ``text``."""

    path: str
    line: int
    start: int
    stop: int
    text: str


def mutants(path: str, source: bytes) -> Iterator[Mutant]:
    """Yield every change that can be made to a file; a few leave something that is not Python (`broken`)."""
    starts = [0]
    for length in map(len, source.splitlines(keepends=True)):
        starts.append(starts[-1] + length)

    def span(node: Any) -> tuple[int, int]:
        return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset

    for start, stop, text in _changes(ast.parse(source), source, span):
        yield Mutant(path, source[:start].count(b"\n") + 1, start, stop, text)


def _changes(node: ast.AST, source: bytes, span: Callable[[Any], tuple[int, int]]) -> Iterator[tuple[int, int, str]]:
    def flipped(operands: list[ast.expr], operators: list[ast.AST]) -> Iterator[tuple[int, int, str]]:
        for left, operator, right in zip(operands, operators, operands[1:], strict=False):
            old, new = FLIPPED.get(type(operator), ("", ""))
            start, stop = span(left)[1], span(right)[0]
            if old and (at := source.find(old.encode(), start, stop)) >= 0:
                yield at, at + len(old), new

    def negated(test: ast.expr) -> tuple[int, int, str]:
        return *span(test), f"(not ({source[slice(*span(test))].decode()}))"

    match node:
        case ast.Assert() | ast.JoinedStr() | ast.Expr(value=ast.Constant()) | ast.keyword(arg="strict"):
            return
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name))):
            if name in ONLY_SAYS:
                return
            yield *span(node), "pass"
        case ast.Raise():
            yield *span(node), "pass"
            return  # the rest is text for the user
        case ast.AugAssign():
            yield *span(node), "pass"
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            yield *span(value), "None"
        case ast.Break() | ast.Continue():
            yield *span(node), "continue" if isinstance(node, ast.Break) else "break"
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            if ast.unparse(test) == "TYPE_CHECKING":
                return
            yield negated(test)
        case ast.comprehension(ifs=tests):
            yield from map(negated, tests)
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield *span(node), f"({ast.unparse(operand)})"
        case ast.Compare():
            yield from flipped([node.left, *node.comparators], [*node.ops])
        case ast.BoolOp():
            yield from flipped(node.values[:2], [node.op])
        case ast.BinOp():
            yield from flipped([node.left, node.right], [node.op])
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in SWAPPED:
            stop = span(node.func)[1]
            yield stop - len(name), stop, SWAPPED[name]
        case ast.Constant(value=bool() as value):
            yield *span(node), str(not value)
        case ast.Constant(value=int() | float() as value):
            yield *span(node), repr(value + 1)
    for field, child in ast.iter_fields(node):
        if field not in ("annotation", "returns", "decorator_list", "type_params"):
            for each in child if isinstance(child, list) else [child]:
                if isinstance(each, ast.AST):
                    yield from _changes(each, source, span)


def broken(source: bytes, change: Mutant) -> bytes | None:
    """Return a file with a change; None where that is not Python."""
    changed = source[: change.start] + change.text.encode() + source[change.stop :]
    with contextlib.suppress(SyntaxError):
        ast.parse(changed)
        return changed
    return None


def chosen(tree: Path, lines: range, seed: int, rooms: list[str], places: list[str]) -> list[Mutant]:
    """Return one change on each random line whose place in the order is in ``lines``, or every change of each of
    ``places``, as ``path:line``.
    """
    by_line = collections.defaultdict(list)
    for room in rooms:
        for path in sorted((tree / PACKAGE / room).rglob("*.py")):
            for mutant in mutants(path.relative_to(tree).as_posix(), path.read_bytes()):
                by_line[f"{mutant.path}:{mutant.line}"].append(mutant)
    pick = random.Random(seed)
    order = pick.sample(sorted(by_line), len(by_line))
    changes = (change for place in places for change in by_line[place])
    if not places:
        changes = (pick.choice(by_line[line]) for line in order)
    good = (change for change in changes if broken((tree / change.path).read_bytes(), change) is not None)
    return list(good if places else itertools.islice(good, lines.start, lines.stop))


def own_test(path: str) -> str:
    """Return the file of the tests of a module; nothing for the face of a package."""
    module = Path(path).relative_to(PACKAGE)
    files = [file.relative_to(ROOT).as_posix() for file in files_for(module) if file.is_file()]
    return COVERED.get(module.as_posix(), files[0] if files else "")


class Reached:
    """A plugin of pytest that notes which files of tests reach which lines of the package."""

    def __init__(self) -> None:
        self._package, self._at = f"{Path.cwd() / PACKAGE}/", IMPORTED
        self._files: dict[str, set[str]] = collections.defaultdict(set)
        tool, lines = sys.monitoring.COVERAGE_ID, sys.monitoring.events.LINE
        sys.monitoring.use_tool_id(tool, "mutate")
        sys.monitoring.register_callback(tool, lines, self._reach)
        sys.monitoring.set_events(tool, lines)

    def _reach(self, code: types.CodeType, line: int) -> object:
        if code.co_filename.startswith(self._package):
            self._files[f"{PACKAGE}/{code.co_filename.removeprefix(self._package)}:{line}"].add(self._at)
        return sys.monitoring.DISABLE

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Let each file of tests reach every line anew, also of what JAX has traced."""
        file = item.nodeid.partition("::")[0]
        if file != self._at:
            self._at = file
            sys.modules["jax"].clear_caches()
            sys.monitoring.restart_events()

    def pytest_sessionfinish(self) -> None:
        """Write what was reached."""
        Path(REACHED).write_text(
            json.dumps({line: sorted(files) for line, files in self._files.items()}), encoding="utf-8"
        )


def others_of(tree: Path, change: Mutant, reached: Mapping[str, Sequence[str]], rooms: Sequence[str]) -> list[str]:
    """Return the tests of a room that may notice a change beside the module's own: those that reach its statement and
    those in processes of their own; all where the statement runs as the module is imported.
    """
    room = next(tests_of(room) for room in rooms if change.path.startswith(f"{PACKAGE}/{room}/"))
    nodes = ast.walk(ast.parse((tree / change.path).read_bytes()))
    around = [each for each in nodes if isinstance(each, ast.stmt) and each.lineno <= change.line <= each.end_lineno]
    inner = min(around, key=lambda each: each.end_lineno - each.lineno)
    lines = range(inner.lineno, inner.end_lineno + 1)
    found = {file for line in lines for file in reached.get(f"{change.path}:{line}", ())}
    if IMPORTED in found:
        return room
    elsewhere = [each for each in room if each.startswith("tests/multiprocess")]
    return sorted(file for file in found if file.startswith(tuple(room)) and file != own_test(change.path)) + elsewhere


def passes(tree: Path, tests: Sequence[str], limit_s: float, *plugins: type[object]) -> bool:
    """Return whether the tests pass in a copy of the tree; those that take longer than ``limit_s`` do not."""
    pid = os.fork()
    if pid == 0:
        _run(tree, tests, plugins)
    end, code = time.monotonic() + limit_s, None
    try:
        while code is None and time.monotonic() < end:
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                time.sleep(0.1)
            else:
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        return code in (0, pytest.ExitCode.NO_TESTS_COLLECTED)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        if code is None:
            os.waitpid(pid, 0)


def _run(tree: Path, tests: Sequence[str], plugins: Sequence[type[object]]) -> NoReturn:
    """Run tests in a process that was forked for them, and end it."""
    code: int = pytest.ExitCode.INTERNAL_ERROR
    try:
        os.setsid()
        log = os.open(tree / "tmp/log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(tree)
        for name in [each for each in sys.modules if each.partition(".")[0] == "tests"]:
            del sys.modules[name]
        sys.path[0] = f"{tree}/src"
        options = ["-xq", "-p", "no:cacheprovider", "-m", "not slow and not nightly"]
        code = pytest.main([*options, *tests], [each() for each in plugins])
    finally:
        os._exit(code)


def import_others(tree: Path) -> None:
    """Set what the tests need, and import what takes long and is none of ours: every process of tests has it then."""
    os.environ |= {
        **{"PYTHONPATH": f"{tree}/src", "TMPDIR": f"{tree}/tmp", "JAX_PLATFORMS": "cpu"},
        **{"XLA_FLAGS": COMPILED_FAST, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1"},
        "JAX_COMPILATION_CACHE_DIR": f"{ROOT}/build/mutate-cache",
        "LOCKSTEP_TEST_KEEP": "JAX_COMPILATION_CACHE_DIR PYTHONPATH",
    }
    for name in ("haliax", "hypothesis", "optax", "orbax.checkpoint", "transformers", "jax.experimental.pallas"):
        importlib.import_module(name)
    warnings.filterwarnings("ignore", "os.fork")  # no device is used here, so JAX has no threads yet


def copy_tree(to: Path) -> None:
    """Copy what git knows or would add, as it is in the working tree; the copy is a checkout too."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    for name in listed.stdout.decode().split("\0"):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, to / name)
    for words in (["init", "-q"], ["add", "-A"], ["-c", "user.name=n", "-c", "user.email=e", "commit", "-qm", "copy"]):
        subprocess.run(["git", *words], cwd=to, check=True)
    (to / "tmp").mkdir()


def main() -> None:
    """Parse the arguments, break the lines and print what was not noticed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "places", nargs="*", metavar="PATH:LINE", help="break these lines in every way, not random ones"
    )
    parser.add_argument("--count", type=int, default=100, help="how many lines (100)")
    parser.add_argument("--skip", type=int, default=0, help="go on after this many of them, which an earlier run broke")
    parser.add_argument("--seed", type=int, default=0, help="which ones (0)")
    parser.add_argument("--rooms", nargs="+", default=list(ROOMS), help="rooms, or folders in one (training/data)")
    parser.add_argument("--limit_s", type=float, default=900, help="tests that take longer have noticed (900 s each)")
    options = parser.parse_args()
    noticed: collections.Counter[bool] = collections.Counter()
    with tempfile.TemporaryDirectory(prefix="mutate-") as folder:
        tree = Path(folder)
        copy_tree(tree)
        changes = chosen(tree, range(options.skip, options.count), options.seed, options.rooms, options.places)
        own = {each.path: own_test(each.path) for each in changes}
        own = {path: test for path, test in own.items() if (tree / test).is_file()}
        tests = sorted({*own.values()}.union(*map(tests_of, options.rooms)))
        import_others(tree)
        if not passes(tree, tests, len(tests) * options.limit_s, Reached):
            raise SystemExit(f"tests fail before anything is broken:\n{(tree / 'tmp/log').read_text()[-4000:]}")
        reached = json.loads((tree / REACHED).read_text())
        for number, change in enumerate(changes, options.skip + 1):
            file = tree / change.path
            whole = file.read_bytes()
            steps = [[own[change.path]]] * (change.path in own) + [others_of(tree, change, reached, options.rooms)]
            file.write_bytes(broken(whole, change) or whole)
            by = next((step[0] for step in steps if step and not passes(tree, step, options.limit_s)), "NOT NOTICED")
            file.write_bytes(whole)
            noticed[by != "NOT NOTICED"] += 1
            old, new = (
                " ".join(text.split())[:60] for text in (whole[change.start : change.stop].decode(), change.text)
            )
            print(f"{number:3} {by}  {change.path}:{change.line}  {old}  ->  {new}", flush=True)
    print(f"{noticed[True]} of {noticed.total()} noticed, {noticed[True] / noticed.total():.0%}")


if __name__ == "__main__":
    main()
