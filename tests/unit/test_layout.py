"""Who may import whom, as docs/images/packages.svg draws it, and tests that mirror the package.

``src/lockstep/a/b.py`` is tested in ``tests/unit/a/test_b.py``, or in ``test_a.py`` there, which has those of all of
``a``, or in ``tests/multiprocess`` or ``tests/tpu_compile``, where it takes processes or the compiler of TPUs.
"""

import ast
import graphlib
import re
from pathlib import Path

from docs.images.make_architecture import ARROWS, NOT_DRAWN

ROOT = Path(__file__).parents[2]
SOURCE, UNIT = ROOT / "src" / "lockstep", ROOT / "tests" / "unit"
PATHS = [path.relative_to(SOURCE) for path in sorted(SOURCE.rglob("*.py"))]

GROUND = set("types errors plugins exits urls printable credentials redact json_text".split())
"""What every room may import."""
NO_JAX = {*GROUND, "engine.schedule", "text", "report"}
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


def imports_of(source):
    """Each import of a source, those inside functions too, as (name, whether only a type checker sees it)."""
    nodes = list(ast.walk(ast.parse(source)))
    checks = [node for node in nodes if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    hidden = {child for node in checks for child in ast.walk(node)}
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            yield from ((module + alias.name, node in hidden) for alias in node.names)


SOURCES = {dotted(path): (SOURCE / path).read_text(encoding="utf-8") for path in PATHS}
FACES = {dotted(path) for path in PATHS if path.stem == "__init__"} - {""}
EXPORTED = {
    f"{face}.{name.rpartition('.')[2]}": name.removeprefix("lockstep.")
    for face in FACES
    for name, _ in imports_of(SOURCES[face])
}
"""Each name that a package's face has, and where it is from."""


def room_of(name):
    return max((room for room in BELOW if f"{name}.".startswith(f"{room}.")), key=len, default=name.partition(".")[0])


def module_of(name):
    """The module that a dotted name is, or is in."""
    return name if name in SOURCES else module_of(name.rpartition(".")[0])


def breaches(module, source):
    """The imports of a module that break a rule, a line each."""
    room = room_of(module)
    for name, typing_only in imports_of(source):
        library, _, ours = name.partition(".")
        target = room_of(ours)
        inside = room == target or {room, target} <= set(TRAINING)
        if library != "lockstep":
            if room in NO_JAX and library in JAX and not typing_only:
                yield f"{module} imports {name}: no jax here"
        elif target not in BELOW[room]:
            yield f"{module} imports {name}: {room} may import only {', '.join(sorted(BELOW[room]))}"
        elif not inside and module_of(ours) != target and (ours not in EXPORTED or ours.rpartition(".")[0] != target):
            yield f"{module} imports {name}: import it from the package's own __init__"


def test_no_module_imports_what_it_may_not():
    assert not [line for module in SOURCES if module for line in breaches(module, SOURCES[module])]


def test_a_breach_is_seen():
    for module, source, message in (
        ("engine.schedule.pages", "def f():\n    from jax import lax", "no jax here"),
        ("engine.engine", "from lockstep.callback import SampleCallback", "engine may import only"),
        ("engine.engine", "from lockstep import SampleCallback", "engine may import only"),
        ("callback.round", "from lockstep.engine.engine import Engine", "own __init__"),
    ):
        (wrong,) = breaches(module, source)
        assert message in wrong


def test_no_module_imports_itself_by_way_of_others():
    edges = {}
    for module in SOURCES.keys() - FACES:
        named = {name[9:] for name, _ in imports_of(SOURCES[module]) if name.startswith("lockstep.")}
        if module != "main.commands":  # its table names all of them, and the command that plans the others reads it
            # A module that is named in a string is loaded on demand: an import all the same.
            named |= {name for name in re.findall(r'"lockstep\.([\w.]+)"', SOURCES[module]) if name in SOURCES}
        edges[module] = {module_of(EXPORTED.get(name, name)) for name in named} - {module, ""}
    assert "engine.prepare" in edges["engine.engine"]
    graphlib.TopologicalSorter(edges).prepare()  # a CycleError names the circle


def test_faces_only_reexport_and_no_file_is_longer_than_400_lines():
    """tests/unit/test_docs.py looks at the face of the package itself."""
    for face in FACES:
        for node in ast.parse(SOURCES[face]).body:
            assert re.match(r"from |import |__all__ = |'|\"", ast.unparse(node)), f"{face}:{node.lineno}"
    files = [path for end in ("py", "js", "css", "j2") for path in SOURCE.rglob(f"*.{end}")]
    assert len(files) > 250 and not [path for path in files if path.read_bytes().count(b"\n") > 400]


REPOSITORY = [
    UNIT / f"test_{name}.py" for name in "bonsai_example docs extending first_pod layout release snippets".split()
]
"""Tests of what is in the repository beside the package. Those of the benchmarks are in ``tests/benchmarks``."""
COVERED = {
    "testing/worker.py": "tests/multiprocess/test_pool.py",
    "models/attention/tpu_block_table.py": "tests/tpu_compile/test_blocks.py",
    "batch_inference/generate.py": "tests/unit/batch_inference/test_run.py",
    "check/_jax.py": "tests/unit/check/test_launches.py",
    "placement/device/float8.py": "tests/unit/models/attention/test_page_ops.py",
    "models/attention/base.py": "tests/unit/models/attention/test_reference.py",
}
"""Modules that have their tests in a file of another name: to become fewer."""


def files_for(module: Path) -> list[Path]:
    """The files that may have the tests of a module, given by its path in the package."""
    processes = [ROOT / "tests" / kind / f"test_{module.name}" for kind in ("multiprocess", "tpu_compile")]
    return [UNIT / module.parent / f"test_{name}.py" for name in (module.stem, module.parent.name)] + processes


def test_every_module_has_its_tests_and_every_test_file_its_module():
    tests = {path: files_for(path) for path in PATHS if path.stem != "__init__"}  # a face has nothing to test
    without = {path.as_posix() for path, files in tests.items() if not any(file.is_file() for file in files)}
    assert without == set(COVERED) and all((ROOT / test).is_file() for test in COVERED.values())
    orphans = set(UNIT.rglob("test_*.py")).difference(REPOSITORY, *tests.values())
    assert not orphans, "name these after the module that they test, or after its package"


def test_mutate_finds_the_tests_of_every_room_and_changes_every_operator():
    from scripts import mutate

    assert all((ROOT / test).exists() for tests in mutate.ROOMS.values() for test in tests)
    source = b"def f(x):\n    if x < 2:\n        return x + 1\n"
    changes = {(each.line, each.text) for each in mutate.mutants("f.py", source)}
    assert changes == {(2, "(not (x < 2))"), (2, "<="), (2, "3"), (3, "None"), (3, "-"), (3, "2")}
