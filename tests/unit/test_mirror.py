"""Tests mirror the package: ``src/lockstep/a/b.py`` is tested in ``tests/unit/a/test_b.py``.

Or in ``tests/unit/a/test_a.py``, which has the tests of all of ``a``, or where it takes processes or the compiler of
TPUs in ``tests/multiprocess/test_b.py`` or ``tests/tpu_compile/test_b.py``.
"""

from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE, UNIT = ROOT / "src" / "lockstep", ROOT / "tests" / "unit"

REPOSITORY = {
    f"test_{name}.py"
    for name in "api_docs bonsai_example docs extending first_pod imports mirror public_names release snippets".split()
}
"""Tests of what is in the repository beside the package. Those of the benchmarks are in ``tests/benchmarks``."""

ELSEWHERE = {
    "tests/multiprocess/test_hosts.py": "testing/command",
    "tests/multiprocess/test_pool.py": "testing/worker",
    "tests/tpu_compile/test_blocks.py": "models/attention/tpu_block_table",
    "tests/unit/batch_inference/test_run.py": "batch_inference/generate",
    "tests/unit/check/test_launches.py": "check/_jax",
    "tests/unit/models/attention/test_page_ops.py": "placement/device/float8",
    "tests/unit/models/attention/test_reference.py": "models/attention/base",
}
"""Test files that have the tests of modules of other names, and these modules: to become fewer."""
COVERED = {f"{module}.py": test for test, names in ELSEWHERE.items() for module in names.split()}


def files_for(module: Path) -> list[Path]:
    """The files that may have the tests of a module, given by its path in the package."""
    processes = [ROOT / "tests" / kind / f"test_{module.name}" for kind in ("multiprocess", "tpu_compile")]
    return [UNIT / module.parent / f"test_{name}.py" for name in (module.stem, module.parent.name)] + processes


def modules() -> list[Path]:
    """Every module, by its path in the package; a package's face has nothing to test."""
    return [path.relative_to(SOURCE) for path in SOURCE.rglob("*.py") if path.name != "__init__.py"]


def test_every_test_file_is_that_of_a_module_or_of_its_package():
    orphans = []
    for test in UNIT.rglob("test_*.py"):
        tested = SOURCE / test.relative_to(UNIT).with_name(test.name.removeprefix("test_"))
        of_package = tested.stem == tested.parent.name and tested.parent.is_dir()
        if not (tested.exists() or of_package or test.parent == UNIT and test.name in REPOSITORY):
            orphans.append(test.relative_to(ROOT).as_posix())
    assert not orphans, "name these after the module that they test, or after its package"


def test_every_module_has_its_test_file_and_only_these_are_tested_elsewhere():
    without = {module.as_posix() for module in modules() if not any(test.is_file() for test in files_for(module))}
    assert without == set(COVERED), "write their tests, or correct ELSEWHERE"
    assert not [test for test in ELSEWHERE if not (ROOT / test).is_file()]


def test_mutate_finds_the_tests_of_every_module_and_room():
    from scripts import mutate

    assert all((ROOT / mutate.own_test(f"{mutate.PACKAGE}/{module}")).is_file() for module in modules())
    assert all((ROOT / test).exists() for tests in mutate.ROOMS.values() for test in tests)
    source = b"def f(x):\n    if x < 2:\n        return x + 1\n"
    changes = {(each.line, each.text) for each in mutate.mutants("f.py", source)}
    assert changes == {(2, "(not (x < 2))"), (2, "<="), (2, "3"), (3, "None"), (3, "-"), (3, "2")}
