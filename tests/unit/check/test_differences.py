import dataclasses

import pytest

from lockstep.check.differences import hints
from tests.unit.check.test_compare import at, launches


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("for name in set(names):", "set"),
        ("if time.monotonic() > limit:", "clocks"),
        ("for path in directory.iterdir():", "directory"),
        ("random.shuffle(names)", "seed"),
        ("rng = np.random.default_rng()", "seed"),
        ("noise = np.random.normal(size=3)", "seed"),
        ("seed = hash('train')", "processes"),
        ("rng = np.random.default_rng(0)", None),
        ("key = jax.random.key(0)", None),
        ("x = jax.random.normal(key, (3,))", None),
        ("x = random.normal(key, (3,))", None),
        ("x = random.normal(random.key(0), (3,))", None),
        ("cache = cache.at[index].set(value)", None),
        ("x = x + 1", None),
    ],
)
def test_hints_at_what_differs_between_processes(tmp_path, line, why):
    script = tmp_path / "train.py"
    script.write_text(f"{line}\n    launch()\n")
    found = hints(dataclasses.replace(launches("a")[0], stack=at(2, str(script))))
    assert (why is None and not found) or why in found[0]
