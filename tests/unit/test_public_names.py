"""The names of ``lockstep`` itself: all there, and imported when they are used."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import lockstep

ROOT = Path(__file__).parents[2]

IMPORTED = """
import time
import jax
begin = time.process_time()
import lockstep
print(time.process_time() - begin)
for name in lockstep.__all__:
    getattr(lockstep, name)
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
"""

LOOK = """
import sys
import lockstep
assert "jax" not in sys.modules
import lockstep.hosts
assert "jax" in sys.modules
print(*{name.partition(".")[0] for name in sys.modules} & {"haliax", "equinox", "flax", "optax", "transformers"})
lockstep.Engine
assert "haliax" in sys.modules
"""


def test_the_names_that_a_type_checker_sees_are_those_that_are_found():
    tree = ast.parse(Path(lockstep.__file__).read_text(encoding="utf-8"))
    block, _ = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {
        (name.asname, node.module.removesuffix(f".{name.name}"))
        for node in block.body
        if isinstance(node, ast.ImportFrom) and node.module
        for name in node.names
    }
    assert seen == {(name, f"lockstep.{module}") for name, module in lockstep._HOME.items()}
    assert lockstep.__all__ == sorted(lockstep._HOME)


@pytest.mark.parametrize("name", lockstep.__all__)
def test_a_name_is_that_of_its_package(name):
    module = sys.modules[getattr(lockstep, name).__module__]
    assert module.__name__.startswith(f"lockstep.{lockstep._HOME[name]}")
    assert name in dir(lockstep)


def test_packages_that_pages_name_need_no_import_of_their_own():
    """But for those of an extra, which the pages import."""
    pages = [page.read_text(encoding="utf-8") for page in (*ROOT.glob("docs/*.md"), ROOT / "README.md")]
    named = {match for text in pages for match in re.findall(r"\blockstep\.([a-z_]+)\.\w", text)}
    packages = {name for name in named if (ROOT / "src" / "lockstep" / name / "__init__.py").exists()}
    assert packages - {"tunix"} >= {"hosts", "models", "report"}
    for name in packages - {"tunix"}:
        assert lockstep.__getattr__(name) is sys.modules[f"lockstep.{name}"]


def test_who_starts_processes_does_not_wait_for_the_engine():
    found = subprocess.run([sys.executable, "-c", LOOK], capture_output=True, text=True, timeout=120)
    assert (found.returncode, found.stdout.split()) == (0, []), found.stdout + found.stderr


def test_an_import_costs_little_beside_that_of_jax_and_starts_no_backend():
    """A backend that is started too early is one that a job of several processes cannot be made with any more."""
    found = subprocess.run([sys.executable, "-c", IMPORTED], capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stdout + found.stderr
    assert float(found.stdout) < 0.4, "seconds of processor time"
