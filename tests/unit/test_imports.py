"""Who may import whom, read from the sources; pyproject.toml has the files that may import some libraries."""

import ast
import functools
import graphlib
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "lockstep"
GROUND = set("types errors plugins exits urls printable credentials redact json_text".split())
"""What every room may import."""

BELOW: dict[str, set[str]] = dict.fromkeys((*GROUND, "launch", "hosts", "text", "engine.schedule"), set())
"""The rooms, a room in another by its dotted name, and what each may import of the package beside the ground."""
for _room, _direct in {
    "check": "launch",
    "testing": "check hosts",
    "placement.device": "hosts",
    "placement": "placement.device",
    "models.attention": "placement.device",
    "models": "placement models.attention",
    "engine": "engine.schedule models",
    "report": "engine text",
    "callback.evaluation": "engine text",
    "callback": "report callback.evaluation",
    "levanter": "callback",
    "tunix": "callback",
    "training.objectives": "callback",
    "training.data": "training.objectives",
    "training.step": "training.data",
    "training.checkpoints": "training.step",
    "training.loop": "training.checkpoints",
    "training.rl": "training.loop",
    "training.run": "training.rl",
    "training": "training.run",
    "batch_inference": "training",
    "main.doctor": "batch_inference",
    "main.plan": "launch batch_inference",
    "main": "check main.plan main.doctor",
}.items():
    BELOW[_room] = set(_direct.split()).union(*(BELOW[each] for each in _direct.split()))

NO_JAX = (*(f"{name}.py" for name in sorted(GROUND)), "engine/schedule/", "text/", "report/")
JAX = {"jax", "jaxlib", "equinox", "haliax", "optax", "orbax", "levanter"}


def imports_of(source, file):
    """Each import of a source, those inside functions too, as (module, whether only a type checker sees it)."""
    tree = ast.parse(source)
    checks = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)]
    hidden = {id(child) for node in checks for statement in node.body for child in ast.walk(statement)}
    package = ["lockstep", *Path(file).parts[:-1]]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) in hidden) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            yield from ((f"{module}.{alias.name}", id(node) in hidden) for alias in node.names)


def room_of(module):
    """The room of a module, given without ``lockstep.``; '' for the package itself."""
    names = module.split(".")
    return next((room for end in range(len(names), 0, -1) if (room := ".".join(names[:end])) in BELOW), names[0])


def dotted(file):
    return file.removesuffix(".py").removesuffix("__init__").rstrip("/").replace("/", ".")


@functools.cache
def sources():
    return {path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}


@functools.cache
def exported():
    """Each name that a package's ``__init__`` has from a module: ``package.name``, and the module."""
    faces = {file: text for file, text in sources().items() if file.endswith("/__init__.py")}
    return {
        f"{dotted(file)}.{alias.asname or alias.name}": (node.module or "").removeprefix("lockstep.")
        for file, text in faces.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lockstep.")
        for alias in node.names
    }


def breaches(source, file):
    """The imports of a file that break a rule, a line each."""
    room = room_of(dotted(file))
    allowed = BELOW.get(room, set()) | {room, *GROUND}
    for module, typing_only in imports_of(source, file):
        ours = module.removeprefix("lockstep").removeprefix(".")
        if module.partition(".")[0] != "lockstep":
            if file.startswith(NO_JAX) and module.partition(".")[0] in JAX and not typing_only:
                yield f"{file} imports {module}: no jax here"
        elif room and room_of(ours) not in allowed:
            yield f"{file} imports {module}: {room} may import only {', '.join(sorted(allowed))}"
        elif beyond_the_face(ours, room) and not (file == "__init__.py" and typing_only):
            yield f"{file} imports {module}: import it from the package's own __init__"


def beyond_the_face(module, room):
    """Whether a module is one inside another room; the parts of ``training`` may import each other's."""
    target = room_of(module)
    rest = module.removeprefix(target).removeprefix(".").partition(".")
    if target == room or target not in BELOW or not rest[0] or target.split(".")[0] == room.split(".")[0] == "training":
        return False
    if "." in target and not any(name.rpartition(".")[0] == target for name in exported()):
        return True
    path = PACKAGE / target.replace(".", "/") / rest[0]
    # A package may export a function of a module's name: ``from lockstep.hosts import environment``.
    return (path.with_suffix(".py").is_file() or path.is_dir()) and not (not rest[2] and module in exported())


def test_no_file_imports_what_it_may_not():
    assert not [line for file, source in sources().items() for line in breaches(source, file)]
    assert {room_of(dotted(file)) for file in sources()} - {""} <= set(BELOW)


@pytest.mark.parametrize(
    ("file", "source", "message"),
    [
        ("engine/schedule/pages.py", "def f():\n    from jax import lax", "no jax here"),
        ("engine/engine.py", "from ..callback import SampleCallback", "engine may import only"),
        ("engine/engine.py", "from lockstep import SampleCallback", "engine may import only"),
        ("callback/round.py", "from ..engine.engine import Engine", "own __init__"),
        ("engine/schedule/batch.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import jax", None),
        ("engine/engine.py", "from .cache import Cache\nfrom ..types import Request", None),
    ],
)
def test_a_breach_is_seen(file, source, message):
    wrong = list(breaches(source, file))
    assert len(wrong) == (message is not None) and (message or "") in "".join(wrong)


def test_init_files_only_reexport():
    """tests/unit/test_public_names.py looks at that of the package itself."""
    for file, source in sources().items():
        for node in ast.parse(source).body if file.endswith("/__init__.py") else ():
            names = isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__all__"]
            docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            assert docstring or names or isinstance(node, ast.Import | ast.ImportFrom), f"{file}:{node.lineno}"


def test_no_file_is_longer_than_400_lines():
    files = [path for end in ("py", "js", "css", "j2") for path in PACKAGE.rglob(f"*.{end}")]
    assert len(files) > 250 and not [path for path in files if path.read_bytes().count(b"\n") > 400]


def edges():
    """The modules that each module imports; a name of a package counts as the module that defines it."""
    modules = {dotted(file) for file in sources()}
    found = {}
    for file, text in sources().items():
        own = dotted(file)
        named = [module for module, _ in imports_of(text, file) if module.startswith("lockstep.")]
        # A module that is named in a string is loaded on demand: an import all the same. The table of commands names
        # all of them, and the command that plans the others reads it.
        nodes = ast.walk(ast.parse(text)) if own != "main.commands" else ()
        strings = (node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))
        named += [each for each in strings if each.startswith("lockstep.") and each[9:] in modules]
        targets = {exported().get(name, name) for name in (each.removeprefix("lockstep.") for each in named)}
        while inner := targets - modules:
            targets = targets - inner | {name.rpartition(".")[0] for name in inner}
        if not file.endswith("__init__.py"):
            found[own] = targets - {own, ""}
    return found


def test_no_module_imports_itself_by_way_of_others():
    assert "engine.prepare" in edges()["engine.engine"]
    graphlib.TopologicalSorter(edges()).prepare()  # a CycleError names the circle
