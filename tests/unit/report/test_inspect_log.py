"""Rows as logs of inspect_ai, read back by inspect_ai itself where it is installed."""

import json
from datetime import UTC, datetime

import pytest

from lockstep.errors import LockstepError
from lockstep.report import Row, SampleRow, write_inspect_log

MADE = datetime(2026, 11, 23, 8, 30, tzinfo=UTC)
HOSTILE = "</script>\x1b[31m\u202e <b>|"


def row(step, generation, **metrics):
    return Row(
        step=step,
        prompt_id=4,
        generation_id=generation,
        prompt="What?",
        generated_text=HOSTILE,
        num_tokens=7,
        finish_reason="length",
        mean_logprob=-0.5,
        metrics=metrics,
    ).to_dict()


ROWS = [row(10, 0, good=1.0, judge=None), row(10, 1, good=0.0, judge=7.5), row(20, 0, good=1.0)]
TASK = {
    "step": 20,
    "task": "own/words",
    "question_id": 2,
    "prompt": "What?",
    "generated_text": "x",
    "answer": "y",
    "acc": 0.0,
}
SAMPLE = SampleRow(
    round=1,
    prompt_id=0,
    generation_id=0,
    prompt="p",
    generated_text="g",
    num_tokens=1,
    finish_reason="stop",
    mean_logprob=0,
).to_dict()


def test_each_step_and_task_is_a_log(tmp_path):
    paths = write_inspect_log([*ROWS, TASK, SAMPLE], tmp_path, run="my run", created=MADE)
    assert [path.name for path in paths] == [
        "2026-11-23T08-30-00+00-00_samples_step-000010.json",
        "2026-11-23T08-30-00+00-00_samples_step-000020.json",
        "2026-11-23T08-30-00+00-00_own-words_step-000020.json",
        "2026-11-23T08-30-00+00-00_samples_round-000001.json",
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(path.name for path in paths)
    first = json.loads(paths[0].read_text())
    assert first["eval"]["model"] == "lockstep/my run@step-10" and first["results"]["total_samples"] == 2
    assert {each["name"]: each["metrics"]["mean"]["value"] for each in first["results"]["scores"]} == {
        "good": 0.5,
        "judge": 7.5,
    }


def test_inspect_itself_reads_the_logs(tmp_path):
    inspect_log = pytest.importorskip("inspect_ai.log")
    write_inspect_log([*ROWS, TASK, SAMPLE], tmp_path, run="run", created=MADE)
    logs = [inspect_log.read_eval_log(info.name) for info in inspect_log.list_eval_logs(str(tmp_path))]
    assert {log.eval.model for log in logs} == {"lockstep/run@step-10", "lockstep/run@step-20", "lockstep/run@round-1"}
    (log,) = [log for log in logs if log.eval.model == "lockstep/run@step-10"]
    assert log.status == "success" and log.version == 2
    assert [(one.id, one.epoch, one.input, one.output.completion) for one in log.samples] == [
        (4, 1, "What?", HOSTILE),
        (4, 2, "What?", HOSTILE),
    ]
    assert [one.output.choices[0].stop_reason for one in log.samples] == ["max_tokens"] * 2
    assert {name: score.value for name, score in log.samples[1].scores.items()} == {"good": 0.0, "judge": 7.5}
    assert {each.name: each.metrics["mean"].value for each in log.results.scores} == {"good": 0.5, "judge": 7.5}
    (task,) = [log for log in logs if log.eval.task == "own/words"]
    assert (task.samples[0].id, task.samples[0].target, task.samples[0].scores["acc"].value) == (2, "y", 0.0)


def test_nothing_is_not_a_log(tmp_path):
    with pytest.raises(LockstepError, match="there are no rows to write"):
        write_inspect_log([], tmp_path, run="run", created=MADE)
