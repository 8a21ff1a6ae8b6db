"""Who may import whom: read from the sources, so that a breach fails here and not in a review."""

import ast
import dataclasses
import functools
import graphlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "lockstep"

# The packages each package may import, besides itself, types and errors (docs/architecture.md).
BELOW: dict[str, set[str]] = {
    "types": set(),
    "errors": set(),
    "units": set(),
    "exits": set(),
    "urls": set(),
    "printable": set(),
    "credentials": set(),
    "redact": set(),
    "plugins": set(),
    "json_text": set(),
    "launch": set(),
    "hosts": set(),
    "check": {"launch"},
    "text": set(),
    "engine.schedule": set(),
    "placement.device": {"hosts"},
    "placement": {"placement.device", "hosts"},
    "models.attention": {"placement.device", "hosts"},
    "models": {"placement", "models.attention", "placement.device", "hosts"},
}
BELOW["engine"] = {"engine.schedule", "models", *BELOW["models"]}
BELOW["report"] = {"engine", "text", *BELOW["engine"]}
BELOW["callback.evaluation"] = {"engine", "text", *BELOW["engine"]}
BELOW["callback"] = {"report", "callback.evaluation", *BELOW["report"]}
BELOW["levanter"] = {"callback", *BELOW["callback"]}
BELOW["tunix"] = {"callback", *BELOW["callback"]}
BELOW["training.objectives"] = {"callback", *BELOW["callback"]}
BELOW["training.data"] = {"training.objectives", *BELOW["training.objectives"]}
BELOW["training.step"] = {"training.data", *BELOW["training.data"]}
BELOW["training.checkpoints"] = {"training.step", *BELOW["training.step"]}
BELOW["training.loop"] = {"training.checkpoints", *BELOW["training.checkpoints"]}
BELOW["training.rl"] = {"training.loop", *BELOW["training.loop"]}
BELOW["training.run"] = {"training.rl", *BELOW["training.rl"]}
BELOW["training"] = {"training.run", *BELOW["training.run"]}
BELOW["batch_inference"] = {"training", *BELOW["training"]}
BELOW["main.plan"] = {"launch", "batch_inference", *BELOW["batch_inference"]}
BELOW["main.doctor"] = BELOW["batch_inference"]
BELOW["testing"] = {"check", "launch", "hosts"}
BELOW["main"] = {"check", "main.plan", "main.doctor", *BELOW["main.plan"]}
"""The rooms, a room in another by its dotted name; what a room may import of the package, besides the ground."""

GROUND = set("types errors plugins units exits urls printable credentials redact json_text".split())
"""What every package may import."""

# A library and the only files of the package that may import it.
ONLY_IN = {
    "wandb": {"report/trackers/wandb.py"},
    "tensorboardX": {"report/trackers/tensorboard.py"},
    "grain": {"training/data/rows.py"},
    "jax._src": {"hosts/_client.py", "check/_jax.py"},
    "orbax": {"training/checkpoints/array_handler.py", "training/checkpoints/arrays.py"},
    "tensorstore": {"training/checkpoints/array_handler.py", "training/checkpoints/arrays.py"},
    "levanter": {"models/levanter_reader.py", "levanter.py"},
    "tunix": {"models/tunix_reader.py", "tunix/hooks.py", "tunix/rollout.py"},
    "qwix": {"models/tunix_reader.py"},
    "metrax": {"tunix/hooks.py"},
    "lm_eval": {"callback/evaluation/harness.py", "callback/evaluation/language_model.py"},
}

# Packages and files without jax, however they get at it.
NO_JAX = (*(f"{name}.py" for name in sorted(GROUND)), "engine/schedule/", "text/", "report/")
JAX = {"jax", "jaxlib", "equinox", "haliax", "optax", "orbax", "levanter"}


@dataclasses.dataclass(frozen=True)
class Import:
    """One imported module: where, what, and whether only a type checker sees it."""

    file: str
    line: int
    module: str
    typing_only: bool

    @property
    def place(self) -> str:
        return f"src/lockstep/{self.file}:{self.line} imports {self.module}"


def imports_of(source: str, file: str) -> list[Import]:
    """Every import of a source text, those inside functions too."""
    tree = ast.parse(source, filename=file)
    hidden = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body
        for child in ast.walk(statement)
    }
    package = ["lockstep", *Path(file).parts[:-1]]
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            # ``from jax import _src`` is an import of jax._src.
            names = [f"{module}.{alias.name}" for alias in node.names]
        else:
            continue
        found += [Import(file, node.lineno, name, id(node) in hidden) for name in names]
    return found


def inside(module: str, name: str) -> bool:
    return module == name or module.startswith(name + ".")


def part_of(file: str) -> str:
    """The room of a file; '' for the top ``__init__``."""
    return (
        "" if file == "__init__.py" else room_of(file.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
    )


def room_of(module: str) -> str:
    """The room of a module, given without ``lockstep.``; its first name if it is in none."""
    names = module.split(".")
    rooms = (".".join(names[:end]) for end in range(len(names), 0, -1))
    return next((room for room in rooms if room in BELOW), names[0])


def breaches(found: list[Import]) -> list[str]:
    """What is wrong with some imports, one line each."""
    wrong = []
    for each in found:
        part = part_of(each.file)
        if inside(each.module, "lockstep"):
            target = room_of(each.module.removeprefix("lockstep").removeprefix("."))
            allowed = BELOW.get(part, set()) | {part, *GROUND}
            if part and target not in allowed:
                wrong.append(f"{each.place}: {part} may import only {', '.join(sorted(allowed))}")
        for library, files in ONLY_IN.items():
            if inside(each.module, library) and each.file not in files:
                wrong.append(f"{each.place}: {library} only in {', '.join(sorted(files))}")
        if each.file.startswith(NO_JAX) and each.module.split(".")[0] in JAX and not each.typing_only:
            wrong.append(f"{each.place}: no jax here")
    return wrong


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def test_no_file_imports_what_it_may_not():
    found = [each for path in sources() for each in imports_of(path.read_text(encoding="utf-8"), name_of(path))]
    assert len(found) > 100, "the sources were not found"
    wrong = breaches(found)
    assert not wrong, "\n" + "\n".join(wrong)


def test_every_package_has_a_place_in_the_layering():
    assert {part_of(name_of(path)) for path in sources()} - {""} <= set(BELOW)


def test_init_files_only_reexport():
    wrong = []
    for path in sources():
        if path.name != "__init__.py" or path.parent == PACKAGE:  # tests/unit/test_public_names.py looks at that one
            continue
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            names = isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__all__"]
            if not (docstring or names or isinstance(node, ast.Import | ast.ImportFrom)):
                wrong.append(f"src/lockstep/{name_of(path)}:{node.lineno}: {ast.unparse(node).splitlines()[0]}")
    assert not wrong, "an __init__ file holds imports and __all__, nothing else:\n" + "\n".join(wrong)


def test_no_file_is_longer_than_400_lines():
    files = {
        path: path.read_bytes().count(b"\n") for end in ("py", "js", "css", "j2") for path in PACKAGE.rglob(f"*.{end}")
    }
    assert len(files) > 300 and not {path: lines for path, lines in files.items() if lines > 400}


@pytest.mark.parametrize(
    ("file", "source", "message"),
    [
        ("engine/schedule/pages.py", "def f():\n    from jax import lax", "no jax here"),
        ("engine/engine.py", "from ..callback import SampleCallback", "engine may import only"),
        ("engine/engine.py", "from lockstep import SampleCallback", "engine may import only"),
        ("placement/place.py", "from jax import _src", "jax._src only in check/_jax.py, hosts/_client.py"),
        ("engine/schedule/batch.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import jax", None),
        ("report/trackers/wandb.py", "def build():\n    import wandb", None),
        ("engine/engine.py", "from .cache import Cache\nfrom ..types import Request", None),
    ],
)
def test_a_breach_is_seen(file, source, message):
    wrong = breaches(imports_of(source, file))
    assert len(wrong) == (message is not None) and (message or "") in "".join(wrong)


def deep_imports(found: list[Import]) -> list[str]:
    """Imports of a module inside another room: its ``__init__`` is what others may import."""
    wrong = []
    for each in found:
        module, part = each.module.removeprefix("lockstep."), part_of(each.file)
        room = room_of(module)
        rest = module.removeprefix(room).removeprefix(".").split(".")
        same = room.split(".")[0] == part.split(".")[0] == "training"
        if not inside(each.module, "lockstep") or room == part or same or room not in BELOW or not rest[0]:
            continue
        if each.file == "__init__.py" and each.typing_only:  # a name that is a module of its package too
            continue
        if not has_face(room) and "." in room:
            wrong.append(f"{each.place}: import it from lockstep.{room.split('.')[0]}")
            continue
        package = PACKAGE / room.replace(".", "/")
        hidden = (package / f"{rest[0]}.py").is_file() or (package / rest[0]).is_dir()
        # A package may export a function of a module's name: ``from lockstep.hosts import environment``.
        if hidden and not (len(rest) == 1 and module in exported()):
            wrong.append(f"{each.place}: import it from lockstep.{room}")
    return wrong


def has_face(room: str) -> bool:
    """Whether a room's ``__init__`` has names for others; that of a part of ``training`` is the whole one's."""
    return any(name.rpartition(".")[0] == room for name in exported())


@functools.cache
def exported() -> dict[str, str]:
    """Every name that a package's ``__init__`` imports, as ``package.name``, and the module it comes from."""
    found = {}
    for path in sources():
        if path.name == "__init__.py" and path.parent != PACKAGE:
            package = name_of(path).removesuffix("/__init__.py").replace("/", ".")
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ImportFrom) and node.module and inside(node.module, "lockstep"):
                    for alias in node.names:
                        found[f"{package}.{alias.asname or alias.name}"] = node.module.removeprefix("lockstep.")
    return found


def test_other_packages_are_imported_by_their_face():
    found = [each for path in sources() for each in imports_of(path.read_text(encoding="utf-8"), name_of(path))]
    wrong = deep_imports(found)
    assert not wrong, f"{len(wrong)} of {len(found)}\n" + "\n".join(wrong)


def circle(edges: dict[str, set[str]]) -> list[str]:
    """Modules that import each other in a circle, one circle of them; empty: there is none."""
    try:
        graphlib.TopologicalSorter(edges).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def module_edges() -> dict[str, set[str]]:
    """What each module imports; a name of a package counts as the module of the package that defines it."""
    files = {name_of(path): path.read_text(encoding="utf-8") for path in sources()}
    modules = {file.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for file in files}
    origin = exported()
    edges: dict[str, set[str]] = {}
    for file, text in files.items():
        if file.endswith("__init__.py"):
            continue
        own = file.removesuffix(".py").replace("/", ".")
        edges[own] = set()
        named = [each.module for each in imports_of(text, file)]
        # A module that is named in a string is loaded on demand: an import all the same. The table of commands names
        # all of them, and the command that plans the others reads it.
        tree = ast.Module([], []) if own == "main.commands" else ast.parse(text)
        strings = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
        named += [each for each in strings if isinstance(each, str) and each.removeprefix("lockstep.") in modules]
        for module in named:
            if not inside(module, "lockstep"):
                continue
            target = module.removeprefix("lockstep.")
            target = origin.get(target, target)
            while target and target not in modules:
                target = target.rpartition(".")[0]
            if target and target != own:
                edges[own].add(target)
    return edges


def test_no_module_imports_itself_by_way_of_others():
    edges = module_edges()
    assert len(edges) > 100 and "engine.prepare" in edges["engine.engine"]
    assert not circle(edges)
    assert set(circle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}})) == {"a", "b", "c"}
