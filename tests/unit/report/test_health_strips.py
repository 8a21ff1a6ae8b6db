"""The health of a run as the page and ``tail`` read it."""

import pytest

from lockstep.errors import LockstepError
from lockstep.health import State
from lockstep.report import HEALTH_FILE, append_jsonl, find_run
from lockstep.report.health_strips import MAX_CELLS, Strip, lasting_states, read_strips
from lockstep.report.saved_rows import read_rows

ALARM = {
    "step": 7,
    "name": "rollout",
    "alarm": {"step": 7, "state": "loop", "began": 5},
    "line": "step 7: loop in 3 of 4 answers (75 %)",
}


def row(step, health, prompt_id=0, **more):
    return {"step": step, "prompt_id": prompt_id, "prompt": "p", "generated_text": "x", "health": health, **more}


def round_of(step, states, answers=4, name="rollout", lasting=()):
    record = {"states": states, "answers": [1] * answers, "lasting": [{"state": state} for state in lasting]}
    return {"step": step, "name": name, "round": record}


def strips_of(directory, rows=(), health=(), rollouts=()):
    append_jsonl(directory / "samples.jsonl", rows)
    append_jsonl(directory / "rollouts.jsonl", rollouts)
    append_jsonl(directory / HEALTH_FILE, health)
    run = find_run(directory)
    return read_strips([row for path in (*run.rows, *run.rollouts) for row in read_rows(path)], run.health)


def test_samples_are_counted_from_their_rows_and_rollouts_from_their_rounds(tmp_path):
    rows = [row(0, ""), row(0, "loop cut", 1), row(5, "cut"), row(5, "cut", 1), row(9, None)]
    health = [round_of(0, {"loop": [0]}, name="inference_eval"), round_of(3, {"loop": [0, 2]}), round_of(4, {})]
    strips, alarms = strips_of(tmp_path, rows, health, rollouts=[row(3, "loop empty")])
    assert list(strips) == ["samples", "rollouts"] and not alarms
    samples, rollouts = strips.values()
    assert (samples.steps, samples.answers) == ([0, 5], [2, 2])
    assert samples.states == {state: {"loop": [1, 0], "cut": [1, 2]}.get(state, [0, 0]) for state in State}
    assert (rollouts.steps, rollouts.answers, rollouts.states["loop"]) == ([3, 4], [4, 4], [2, 0])


def test_a_run_without_health_has_no_strips(tmp_path):
    assert strips_of(tmp_path, [row(0, None), row(5, 0.5)]) == ({}, [])


def test_the_last_line_of_a_step_counts_and_alarms_begin_with_the_newest(tmp_path):
    again = {**ALARM, "line": "again"}
    later = {**ALARM, "step": 9, "alarm": {**ALARM["alarm"], "step": 9}}
    told = {"name": "rollout", "told": "loop", "time": 1.0}
    strips, alarms = strips_of(
        tmp_path, health=[round_of(7, {"loop": [1]}), ALARM, told, later, round_of(7, {}), again]
    )
    assert strips["rollouts"].states["loop"] == [0]
    assert [(alarm.step, alarm.began, alarm.text) for alarm in alarms] == [
        (9, 5, "rollout: step 7: loop in 3 of 4 answers (75 %)"),
        (7, 5, "rollout: again"),
    ]


def test_a_long_strip_has_several_rounds_in_a_cell():
    strip = Strip.of({step: {"": 2, "loop": step % 2} for step in range(10 * MAX_CELLS - 5)})
    assert len(strip.steps) == MAX_CELLS and strip.steps[:2] == [0, 10]
    assert set(strip.answers[:-1]) == {20} and set(strip.states["loop"][:-1]) == {5}
    assert (strip.answers[-1], strip.states["loop"][-1]) == (10, 2)


def test_states_of_another_version_are_shown_last(tmp_path):
    strips, _ = strips_of(tmp_path, [row(0, "asleep __proto__ loop")])
    assert list(strips["samples"].states)[-2:] == ["__proto__", "asleep"]


@pytest.mark.parametrize("damage", [{"states": 3}, {"answers": None}, {"states": {"loop": 5}}])
def test_a_line_that_is_no_round_is_said_with_its_number(tmp_path, damage):
    broken = round_of(3, {})
    broken["round"] |= damage
    with pytest.raises(LockstepError, match=rf"{HEALTH_FILE}:2: it is no round"):
        strips_of(tmp_path, health=[round_of(1, {}), broken])


@pytest.mark.parametrize("record", [{}, {"alarm": 3}, {"alarm": {"step": 1}}, {"alarm": {"step": 1, "began": "x"}}])
def test_what_is_no_alarm_is_none(tmp_path, record):
    assert strips_of(tmp_path, health=[{"step": 1, "name": "rollout"} | record]) == ({}, [])


def test_states_that_last_after_a_round():
    assert lasting_states(round_of(1, {}, lasting=["loop", "cut"])) == {"loop", "cut"}
    assert lasting_states(round_of(1, {})) == set()
    assert lasting_states(ALARM) is lasting_states({"round": 3}) is None
