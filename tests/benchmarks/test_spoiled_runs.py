"""Runs that are spoiled on purpose raise an alarm that names the cause, and healthy ones raise none."""

import pytest

from benchmarks import spoiled_runs
from benchmarks.spoiled_runs import GRPO, LM, ROUNDS, SPOILED, Spoiled, fine_tune, outcomes, teach


@pytest.fixture(scope="module")
def taught(tmp_path_factory):
    """The checkpoint of a model that spells numbers."""
    return teach(tmp_path_factory.mktemp("taught"))


@pytest.mark.optimized
@pytest.mark.nightly
@pytest.mark.parametrize("name", SPOILED)
def test_a_spoiled_run_raises_an_alarm_within_two_rounds_that_names_the_cause_or_its_neighbour(name, taught, tmp_path):
    found = outcomes(fine_tune(tmp_path, taught, name), SPOILED[name])
    appeared = [rounds for rounds in found if rounds.appeared is not None]
    assert appeared and {rounds.name for rounds in found} == {"inference_eval", *(["rollout"] if name in GRPO else [])}
    for rounds in appeared:
        assert rounds.rounds is not None and rounds.rounds <= ROUNDS, rounds
    group = SPOILED[name].group
    assert not group or any(f"; {group} " in line for rounds in appeared for line in rounds.lines), appeared


@pytest.mark.optimized
@pytest.mark.nightly
@pytest.mark.parametrize("name", ["lm", "grpo"])
def test_healthy_runs_of_other_seeds_raise_no_alarm(name, taught, tmp_path):
    seeds = range(1, 51 if name == "lm" else 6)
    runs = [fine_tune(tmp_path / str(seed), taught, name, seed=seed) for seed in seeds]
    alarms = [line for run in runs for rounds in outcomes(run, Spoiled()) for line in rounds.others]
    assert not alarms


def test_the_five_ways_are_the_same_for_both_commands():
    assert [name.partition("-")[2] for name in LM] == [name.partition("-")[2] for name in GRPO]
    assert [spoiled.group for spoiled in LM.values()] == [spoiled.group for spoiled in GRPO.values()]
    trained, asked = spoiled_runs.split()
    assert not {number for number, _ in trained} & {number for number, _ in asked}
