"""What the leader makes of a round, behind a queue: in order, whatever fails, however slow a part is."""

import dataclasses
import json
import sys
import threading
import types

import pytest

from lockstep.callback import InferenceEvalConfig
from lockstep.callback.evaluation import TaskResults
from lockstep.callback.evaluation.scoring import TaskRow
from lockstep.callback.reporter import MAX_WAITING, Reporter
from lockstep.engine import AuditResult, Generation
from lockstep.errors import ConfigError
from lockstep.health import State
from lockstep.report import Judge, JudgeConfig, Row, read_jsonl
from lockstep.report.metrics import SCALARS
from lockstep.report.saved_rows import read_rows
from lockstep.report.trackers import NoopTracker
from lockstep.text import Prompt
from lockstep.types import Completion, FinishReason
from tests import tiny
from tests.clock import until

PROMPTS = [Prompt(id=0, text="one", answer="two"), Prompt(id=1, text="two")]


class Recorder(NoopTracker):
    def __init__(self):
        self.calls = []

    def log_rows(self, name, rows, *, step):
        self.calls.append((step, name, [row.to_dict() for row in rows]))

    def log(self, metrics, *, step):
        self.calls.append((step, dict(metrics)))


@pytest.fixture
def own(monkeypatch):
    """A module of metrics, whose ``slow`` returns when the event is set."""
    module = types.ModuleType("own_metrics")
    module.release = threading.Event()
    module.slow = lambda row, prompt: float(module.release.wait(600))
    module.odd = lambda row, prompt: 1 / prompt.id
    monkeypatch.setitem(sys.modules, "own_metrics", module)
    yield module
    module.release.set()


def result(token=7):
    completions = [
        Completion(
            prompt_id=number, generation_id=0, tokens=(token,), logprobs=(-1.0,), finish_reason=FinishReason.LENGTH
        )
        for number in (0, 1)
    ]
    return Generation(completions=completions, seconds={"generate": 2.0}, memory={"after": 5})


def reporter(tmp_path=None, tracker=None, **values):
    return Reporter(
        name="inference_eval",
        config=InferenceEvalConfig(prompts=["one"], **values),
        tokenizer=tiny.tokenizer(),
        tracker=tracker,
        samples_path=tmp_path and tmp_path / "samples.jsonl",
    )


def test_reports_come_in_order_and_complete(tmp_path, capsys):
    tracker = Recorder()
    made = reporter(tmp_path, tracker, metrics=["exact_match"])
    for step in (1, 2, 3):
        made.report(step, PROMPTS, result(), {"skipped_rounds": 0})
    made.log(4, {"skipped_rounds": 1})
    assert made.flush(30)
    written = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [(row["step"], row["prompt_id"], row["exact_match"]) for row in written] == [
        (step, number, value) for step in (1, 2, 3) for number, value in ((0, 0.0), (1, None))
    ]
    assert [call[0] for call in tracker.calls] == [1, 1, 2, 2, 3, 3, 4]
    assert tracker.calls[0][1:] == ("inference_eval/samples", written[:2])
    scalars = tracker.calls[1][1]
    assert scalars.pop("inference_eval/time/report_s") > 0
    assert {name.removeprefix("inference_eval/"): value for name, value in scalars.items()} == {
        "step": 1,
        "num_prompts": 2,
        "num_completions": 2,
        "unfinished_completions": 0,
        "generated_tokens": 2,
        "tokens_per_second": 1.0,
        "exact_match": 0.0,
        "skipped_rounds": 0,
        "report_errors": 0,
        "dropped_reports": 0,
        "time/generate_s": 2.0,
        "hbm/after_bytes": 5,
        **{f"health/{state}": float(state == "cut") for state in State},
    }
    assert tracker.calls[-1][1]["inference_eval/skipped_rounds"] == 1
    shown = capsys.readouterr().out
    assert [f"what the model says after {step}" in shown for step in (1, 2, 3)] == [True] * 3


def test_two_callbacks_of_one_name_that_write_in_turn_are_told_once(tmp_path, capsys, caplog):
    """A cell of a notebook that runs again makes a callback in the place of another: that is no mixture."""
    tracker = Recorder()
    first, second = reporter(tmp_path), reporter(tmp_path)
    for step, own in ((1, first), (2, first), (1, second), (2, second)):
        own.report(step, PROMPTS, result(), {})
        assert own.flush(60)
    assert "write in turn" not in caplog.text
    for step in (3, 4):
        for own in (first, second):
            own.report(step, PROMPTS, result(), {})
            assert own.flush(60)
    assert caplog.text.count(f"write in turn to {tmp_path / 'samples.jsonl'}, where rows do not say") == 2
    pair = [reporter(tracker=tracker), reporter(tracker=tracker), reporter(tracker=Recorder())]
    for own in pair * 2:
        own.report(1, PROMPTS, result(), {})
        assert own.flush(60)
    assert caplog.text.count("write in turn to the tracker's inference_eval/") == 2


def test_every_number_beside_the_metrics_has_a_name_that_no_metric_may_have():
    tracker = Recorder()
    made = reporter(tracker=tracker)
    made.report(1, PROMPTS, dataclasses.replace(result(), audit=AuditResult(logprob_gap=0.0, logprob_noise=0.0)), {})
    assert made.flush(30)
    names = {name.removeprefix("inference_eval/") for name in tracker.calls[1][1]} | {"samples"}
    audited = {each.name for each in dataclasses.fields(AuditResult)}
    assert {name for name in names | audited if "/" not in name} <= SCALARS | {"step"}


def test_a_metric_that_fails_on_one_row_loses_that_cell(tmp_path, own, caplog):
    tracker = Recorder()
    made = reporter(tmp_path, tracker, metrics=["own_metrics:odd", "length"])
    made.report(1, PROMPTS, result(), {})
    assert made.flush(30)
    written = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [(row["odd"], row["length"]) for row in written] == [(None, 1.0), (1.0, 1.0)]
    assert made.errors == tracker.calls[1][1]["inference_eval/report_errors"] == 1
    (record,) = caplog.records
    assert "after step 1 metric 'odd' failed on 1 of 2 rows" in record.message
    assert "first on prompt 0, generation 0: ZeroDivisionError" in record.message


def test_what_fails_does_not_keep_the_rest_from_being_reported(tmp_path, capsys, caplog):
    class Down(Recorder):
        def log_rows(self, name, rows, *, step):
            raise ConnectionError("down")

    (tmp_path / "samples.jsonl").mkdir()
    made = reporter(tmp_path, Down())
    made.report(1, PROMPTS, result(), {})
    assert made.flush(30) and made.errors == 2
    assert "what the model says after 1" in capsys.readouterr().out
    assert "writing samples.jsonl after step 1 failed" in caplog.text and "the tracker after step 1" in caplog.text


def test_a_metric_that_does_not_return_holds_up_neither_rounds_nor_the_end(tmp_path, own, caplog):
    made = reporter(tmp_path, metrics=["own_metrics:slow"])
    for step in range(MAX_WAITING + 3):
        made.report(step, PROMPTS, result(), {})
        if step == 0:
            until(lambda: "step 0" in made._queue._doing)
    assert made.dropped == 2
    for step in (MAX_WAITING + 1, MAX_WAITING + 2):
        assert f"the report of step {step} (2 rows) is dropped, because {MAX_WAITING} earlier ones" in caplog.text
    assert not made.flush(0.1)
    waiting = ", ".join(f"step {step} (2 rows)" for step in range(1, MAX_WAITING + 1))
    assert f"after 0.1 s the report of step 0 (2 rows) is not done, and behind it wait {waiting}." in caplog.text
    own.release.set()
    assert made.flush(30) and made.errors == 0
    assert len((tmp_path / "samples.jsonl").read_text().splitlines()) == 2 * (MAX_WAITING + 1)


def test_no_table_where_none_is_wanted(tmp_path, capsys):
    tracker = Recorder()
    made = reporter(tmp_path, tracker, skip_samples_table=True)
    made.report(1, PROMPTS, result(), {})
    assert made.flush(30) and len(tracker.calls) == 1
    assert capsys.readouterr().out == "" and (tmp_path / "samples.jsonl").exists()


def test_the_file_has_the_log_probabilities_of_tokens_where_they_are_wanted(tmp_path, capsys):
    tracker = Recorder()
    made = reporter(tmp_path, tracker, token_logprobs=True)
    made.report(1, PROMPTS, result(), {})
    assert made.flush(30)
    rows = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [row["token_logprobs"] for row in rows] == [[-1.0], [-1.0]]
    assert [row["tokens"] for row in rows] == [[row["generated_text"]] for row in rows]
    (table,) = [call[2] for call in tracker.calls if len(call) == 3]
    assert not any({"tokens", "token_logprobs"} & set(row) for row in table)
    assert [Row.from_dict(row).to_dict() for row in rows] == table


def test_the_file_keeps_the_tokens_where_they_are_wanted(tmp_path, capsys):
    tracker = Recorder()
    made = reporter(tmp_path, tracker, keep_tokens=True)
    made.report(1, PROMPTS, result(), {})
    assert made.flush(30) and made.errors == 0
    rows = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    sampled = result().completions
    assert [row["token_ids"] for row in rows] == [list(each.tokens) for each in sampled]
    assert [row["logprobs"] for row in rows] == [list(each.logprobs) for each in sampled] != [[], []]
    assert not any({"tokens", "token_logprobs"} & set(row) for row in rows)
    (table,) = [call[2] for call in tracker.calls if len(call) == 3]
    assert not any({"token_ids", "logprobs"} & set(row) for row in table)
    assert [Row.from_dict(row).to_dict() for row in rows] == table
    assert [row.texts for row in read_rows(tmp_path / "samples.jsonl")] == [{}, {}]


def looping(token=7):
    """One answer that loops from its fourth token on, and one that is fine."""
    first, second = result().completions
    loop = (5, 6, 8, *[token] * 40)
    first = dataclasses.replace(first, tokens=loop, logprobs=(-1.0,) * len(loop))
    second = dataclasses.replace(second, finish_reason=FinishReason.STOP)
    return dataclasses.replace(result(), completions=[first, second])


def test_the_health_of_answers_is_in_table_file_and_scalars(tmp_path, capsys):
    tracker = Recorder()
    made = reporter(tmp_path, tracker)
    made.report(1, PROMPTS, looping(), {})
    assert made.flush(30) and made.errors == 0
    (_, _, rows), (_, scalars) = tracker.calls
    assert [(row["health"], row["loop_from"]) for row in rows] == [("loop cut", 3), ("", None)]
    assert rows == [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    shares = {state: scalars[f"inference_eval/health/{state}"] for state in State}
    assert shares == {state: 0.5 * (state in ("loop", "cut")) for state in State}
    assert "health" in capsys.readouterr().out
    assert [(row.health, row.loop_from) for row in read_rows(tmp_path / "samples.jsonl")] == [
        ("loop cut", 3),
        ("", None),
    ]


def test_health_that_fails_is_counted_and_the_rows_are_reported_without_it(monkeypatch, caplog):
    monkeypatch.setattr("lockstep.callback.reporter.measure_round", lambda answers, vocabulary: 1 / 0)
    tracker = Recorder()
    made = reporter(tracker=tracker)
    made.report(1, PROMPTS, looping(), {})
    assert made.flush(30) and made.errors == 1
    (_, _, rows), (_, scalars) = tracker.calls
    assert [(row["health"], row["loop_from"]) for row in rows] == [(None, None)] * 2
    assert scalars["inference_eval/report_errors"] == 1 and not any("/health/" in name for name in scalars)
    assert "the health of answers after step 1 failed on the leader; training goes on" in caplog.text


def test_nobody_looks_at_the_health_of_answers_where_it_is_switched_off():
    tracker = Recorder()
    made = reporter(tracker=tracker, health=False)
    made.report(1, PROMPTS, looping(), {})
    assert made.flush(30) and made.errors == 0
    (_, _, rows), (_, scalars) = tracker.calls
    assert [(row["health"], row["loop_from"]) for row in rows] == [(None, None)] * 2
    assert not any("/health/" in name for name in scalars)


def test_the_verdicts_of_a_judge_are_a_column_and_its_failures_are_said(monkeypatch, caplog):
    def half(self, rows, prompts):
        values = [7.0, None]
        judged = [
            dataclasses.replace(row, metrics={**row.metrics, "judge": v}) for row, v in zip(rows, values, strict=True)
        ]
        return judged, ["the judge gave no verdict on 1 of 2 rows"]

    monkeypatch.setattr(Judge, "judge", half)
    tracker = Recorder()
    judge = JudgeConfig(base_url="http://127.0.0.1:1/v1", model="judge-1")
    made = reporter(tracker=tracker, metrics=["length"], judge=judge)
    made.report(1, PROMPTS, result(), {})
    assert made.flush(30)
    (_, _, rows), (_, scalars) = tracker.calls
    assert [(row["length"], row["judge"]) for row in rows] == [(1.0, 7.0), (1.0, None)]
    assert (scalars["inference_eval/judge"], scalars["inference_eval/report_errors"]) == (7.0, 1)
    assert "after step 1 the judge gave no verdict on 1 of 2 rows; training goes on" in caplog.text
    with pytest.raises(ConfigError, match="the table already has a column 'judge'"):
        reporter(metrics=["own:judge"], judge=judge)


def test_scores_of_tasks_and_their_rows_are_reported(tmp_path, caplog):
    tracker = Recorder()
    made = reporter(tmp_path, tracker)
    row = TaskRow(step=2, task="t", question_id=0, prompt="p", generated_text="g", answer="a", metrics={"acc": 1.0})
    made.report_tasks(
        2,
        TaskResults(
            scores={"t": {"acc": 1.0}}, rows=[row], requests=3, truncated=1, failures=["task u: the metric f1"]
        ),
    )
    made.report_tasks(3, KeyError("no such field"))
    assert made.flush(30) and made.errors == 2
    assert read_jsonl(tmp_path / "tasks.jsonl") == [row.to_dict()]
    (_, scalars), (_, name, rows), (_, counts) = tracker.calls
    assert scalars["eval/t/acc"] == 1.0 and scalars["eval/t/step"] == 2 and scalars["eval/truncated_requests"] == 1
    assert (name, rows) == ("eval/tasks", [row.to_dict()])
    assert counts == {"inference_eval/step": 3, "inference_eval/report_errors": 2, "inference_eval/dropped_reports": 0}
    assert "after step 2 task u: the metric f1; training goes on" in caplog.text
    assert "the tasks after step 3 could not be scored; training goes on: 'no such field'" in caplog.text


@pytest.mark.parametrize("fails", ["the file", "the tracker"])
def test_what_fails_of_a_report_of_tasks_costs_its_own_part_alone(tmp_path, caplog, fails):
    tracker = Recorder()
    made = reporter(tmp_path, tracker)
    if fails == "the file":
        (tmp_path / "tasks.jsonl").mkdir()
    else:
        tracker.log_rows = None
    row = TaskRow(step=2, task="t", question_id=0, prompt="p", generated_text="g", answer="a", metrics={"acc": 1.0})
    results = TaskResults(scores={"t": {"acc": 1.0}}, rows=[row], requests=3, truncated=0, failures=["no f1"])
    made.report_tasks(2, results)
    assert made.flush(30) and made.errors == 2 and "after step 2 no f1; training goes on" in caplog.text
    if fails == "the file":
        assert "writing tasks.jsonl after step 2 failed" in caplog.text and len(tracker.calls) == 2
    else:
        assert "the tracker after step 2 failed" in caplog.text
        assert read_jsonl(tmp_path / "tasks.jsonl") == [row.to_dict()]
