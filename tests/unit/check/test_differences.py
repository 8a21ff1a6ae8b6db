import dataclasses

import pytest

from lockstep.check.differences import PutComparison, compare_arguments, hints
from lockstep.check.log import ProcessLog, Put
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


LOGS = (ProcessLog(index=0), ProcessLog(index=1))


def put(line, **pieces):
    return Put(array="f32[8]", pieces=pieces, stack=at(line))


def compared(*puts):
    """The findings of pairs (process, put) in this order."""
    comparison = PutComparison(*LOGS)
    return [finding for side, each in puts for finding in comparison.add(side, each)]


def test_copies_of_an_argument_that_differ():
    (launch,) = launches("step")
    first = dataclasses.replace(launch, values=((1, "aa", "0.1"),))
    other = dataclasses.replace(launch, values=((1, "bb", "1.1"),))
    (finding,) = compare_arguments(*LOGS, first, other)
    assert [place.text for place in finding.places] == ["passes 0.1", "passes 1.1"]
    assert list(compare_arguments(*LOGS, first, first)) == []


def test_only_pieces_that_both_processes_have_must_be_equal():
    assert compared((0, put(3, a="aa")), (1, put(3, b="bb"))) == []
    assert [each.kind for each in compared((0, put(3, a="aa")), (1, put(3, a="bb")))] == ["values"]


def test_where_one_puts_more_it_is_not_known_which_belong_together():
    one, two = put(3, a="aa"), put(3, a="bb")
    assert compared((0, one), (0, two), (1, two)) == []
    assert len(compared((0, one), (0, two), (1, two), (1, one))) == 1
    assert compared((0, one), (1, put(4, a="bb"))) == []


@pytest.mark.parametrize("side", [0, 1])
def test_a_line_that_one_process_alone_has_takes_no_more_and_more_memory(side, monkeypatch):
    monkeypatch.setattr("lockstep.check.differences.MOST_AHEAD", 5)
    comparison = PutComparison(*LOGS)
    for _ in range(20):
        assert list(comparison.add(side, put(3, a="aa"))) == []
    (line,) = comparison._lines.values()
    assert line.given_up and not any(line.waiting)
