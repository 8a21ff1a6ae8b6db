"""Who may import whom, as docs/images/packages.svg draws it, and tests that mirror the package.

``src/lockstep/a/b.py`` is tested in ``tests/unit/a/test_b.py``, or in ``test_a.py`` there, which has those of all of
``a``, or in ``tests/multiprocess`` or ``tests/tpu_compile``, where it takes processes or the compiler of TPUs.
"""

import ast
import functools
import graphlib
import re
from pathlib import Path

from docs.images.make_architecture import ARROWS, NOT_DRAWN

ROOT = Path(__file__).parents[2]
SOURCE, UNIT = ROOT / "src" / "lockstep", ROOT / "tests" / "unit"
PATHS = [path.relative_to(SOURCE) for path in sorted(SOURCE.rglob("*.py"))]

GROUND = set(
    "types errors config_fields files job_key plugins exits storage urls printable redact json_text limits "
    "terminal".split()
)
"""What every room may import."""
NO_JAX = {*GROUND, "engine.schedule", "text", "health", "report"}
JAX = {"jax", "jaxlib", "equinox", "haliax", "optax", "orbax", "levanter"}

TRAINING = [f"training{part}" for part in ("", *".run .rl .loop .checkpoints .step .data .objectives".split())]
EDGES = [*ARROWS, *NOT_DRAWN, *zip(TRAINING, [*TRAINING[1:], "callback"], strict=True)]
BELOW = {room: {room, *GROUND} for room in GROUND.union(*EDGES)}
"""The rooms, a room in another by its dotted name, and what each may import of the package."""
for _ in BELOW:
    for _importer, _imported in EDGES:
        BELOW[_importer] |= BELOW[_imported]


def dotted(path):
    """The name of a module without ``lockstep.``; '' for the package itself."""
    return ".".join(path.with_suffix("").parts).removesuffix("__init__").rstrip(".")


@functools.cache
def imports_and_functions(source):
    """The name of each import of a source, those inside functions and for type checkers too; and each function's line,
    with the numbers of its arguments and of its lines.
    """
    imports, functions = [], {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            imports += [module + alias.name for alias in node.names]
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            functions[f"{node.lineno} {node.name}"] = number_of_arguments(node), number_of_lines(node)
    return imports, functions


SOURCES = {dotted(path): (SOURCE / path).read_text(encoding="utf-8") for path in PATHS}
FACES = {dotted(path) for path in PATHS if path.stem == "__init__"} - {""}


def room_of(name):
    return max((room for room in BELOW if f"{name}.".startswith(f"{room}.")), key=len, default=name)


def module_of(name):
    """The module that a dotted name is, or is in."""
    return name if name in SOURCES else module_of(name.rpartition(".")[0])


def breaches(module, source):
    """The imports of a module that break a rule, a line each."""
    room = room_of(module)
    for name in imports_and_functions(source)[0]:
        library, _, ours = name.partition(".")
        if library == "lockstep" and room_of(ours) not in BELOW[room]:
            yield f"{module} imports {name}: {room} may import only {', '.join(sorted(BELOW[room]))}"
        elif room in NO_JAX and library in JAX:
            yield f"{module} imports {name}: no jax here"


def test_no_module_imports_what_it_may_not():
    assert not [line for module in SOURCES if module for line in breaches(module, SOURCES[module])]
    assert list(breaches("engine.schedule.pages", "import jax\nfrom lockstep.callback import SampleCallback"))[1:]


def test_no_room_and_no_module_imports_itself_by_way_of_others():
    graphlib.TopologicalSorter({room: BELOW[room] - {room, *GROUND} for room in BELOW}).prepare()
    edges = {}
    for module in SOURCES.keys() - FACES:
        named = {name[9:] for name in imports_and_functions(SOURCES[module])[0] if name.startswith("lockstep.")}
        if module != "main.commands":  # its table names all of them, and the command that plans the others reads it
            # A module that is named in a string is loaded on demand: an import all the same.
            named |= {name for name in re.findall(r'"lockstep\.([\w.]+)"', SOURCES[module]) if name in SOURCES}
        edges[module] = {module_of(name) for name in named} - {module, "", *FACES}
    assert "engine.prepare" in edges["engine.engine"]
    graphlib.TopologicalSorter(edges).prepare()  # a CycleError names the circle


def test_faces_only_reexport_and_no_file_is_longer_than_400_lines():
    for face in FACES:
        for node in ast.parse(SOURCES[face]).body:
            assert re.match(r"from |import |__all__ = |'|\"", ast.unparse(node)), f"{face}:{node.lineno}"
    files = [path for end in ("py", "js", "css", "j2") for path in SOURCE.rglob(f"*.{end}")]
    assert len(files) > 250 and not [path for path in files if path.read_bytes().count(b"\n") > 400]


MOST_ARGUMENTS, MOST_LINES = 8, 60


def number_of_arguments(function):
    """The arguments of a function, ``self`` and ``cls`` not counted."""
    names = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def number_of_lines(function):
    """The lines of a function, those of its docstring not counted."""
    first = function.body[0]
    docstring = 0 if ast.get_docstring(function) is None else first.end_lineno - first.lineno + 1
    return function.end_lineno - function.lineno + 1 - docstring


def test_no_function_has_more_than_eight_arguments_or_60_lines():
    for module, source in SOURCES.items():
        for function, (arguments, lines) in imports_and_functions(source)[1].items():
            assert arguments <= MOST_ARGUMENTS, f"{module}:{function} has {arguments}: which have an owner?"
            assert lines <= MOST_LINES, f"{module}:{function} has {lines}: which part has a name?"
    source = "def f(self, a, /, b, *c, d, **e):\n    'g'\n    'h'\n"
    assert imports_and_functions(source)[1] == {"1 f": (3, 2)}


COVERED = {
    "testing/worker.py": "tests/multiprocess/test_pool.py",
    "batch_inference/generate.py": "tests/unit/batch_inference/test_run.py",
    "check/_jax.py": "tests/unit/check/test_launches.py",
    "placement/device/float8.py": "tests/unit/models/attention/test_page_ops.py",
    "models/train_ops.py": "tests/unit/models/test_layers.py",
}
"""Modules that have their tests in a file of another name: to become fewer."""


def files_for(path):
    """The files that may have the tests of a module, given below the package; its own first."""
    files = [UNIT / path.parent / f"test_{stem}.py" for stem in (path.stem, path.parent.name)]
    return files + [ROOT / "tests" / kind / f"test_{path.name}" for kind in ("multiprocess", "tpu_compile")]


def test_every_module_has_its_tests_and_every_test_file_its_module():
    tests = {path: files_for(path) for path in PATHS if path.stem != "__init__"}  # a face has nothing to test
    without = {path.as_posix() for path, files in tests.items() if not any(file.is_file() for file in files)}
    assert without == set(COVERED) and all((ROOT / test).is_file() for test in COVERED.values())
    # Beside the packages are the tests of the repository: of documents, snippets, layout, release.
    orphans = set(UNIT.glob("*/**/test_*.py")).difference(*tests.values())
    assert not orphans, "name these after the module that they test, or after its package"
    from scripts import mutate  # it imports this module

    assert mutate.own_test("src/lockstep/engine/engine.py") == "tests/unit/engine/test_engine.py"
