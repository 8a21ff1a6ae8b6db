"""Rows are made of completions in one place, and survive their file."""

import dataclasses
import functools
import json
import math

import pytest

from lockstep.health import Health, State
from lockstep.report import HEALTH_COLUMNS, Row, SampleRow, rows
from lockstep.report.row_formats import write_parquet
from lockstep.report.rows import metric_names
from lockstep.report.saved_rows import parse_row
from lockstep.text import Prompt
from lockstep.types import Completion, FinishReason
from tests.unit.report.test_answers import row

PROMPT = Prompt(id=3, messages=({"role": "user", "content": "why?"},))


def completion(*logprobs):
    tokens = tuple(range(len(logprobs)))
    return Completion(prompt_id=3, generation_id=1, tokens=tokens, logprobs=logprobs, finish_reason=FinishReason.STOP)


@pytest.mark.parametrize(("cls", "when"), [(Row, {"step": 7}), (SampleRow, {"round": 2})])
def test_a_row_of_a_completion(cls, when):
    row = cls.from_completion(completion(-1.0, -2.5), PROMPT, "so", **when)
    assert row == cls(
        prompt_id=3,
        generation_id=1,
        prompt="user: why?",
        generated_text="so",
        num_tokens=2,
        finish_reason="stop",
        mean_logprob=-1.75,
        **when,
    )
    assert list(row.to_dict())[: len(cls.columns)] == list(cls.columns)


def test_a_row_of_a_job_keeps_its_tokens_where_that_is_asked_for():
    kept = SampleRow.from_completion(completion(-1.0, -2.5), PROMPT, "so", keep_tokens=True, round=2)
    record = json.loads(json.dumps(kept.to_dict()))
    assert record["token_ids"] == [0, 1] and record["logprobs"] == [-1.0, -2.5]
    assert SampleRow.from_dict(record) == dataclasses.replace(kept, mean_logprob=0.0)
    without = SampleRow.from_completion(completion(-1.0, -2.5), PROMPT, "so", round=2)
    assert without.kept is None and "token_ids" not in without.to_dict()


def test_a_completion_without_tokens_has_a_mean_of_zero():
    assert Row.from_completion(completion(), PROMPT, "", step=1).mean_logprob == 0.0


def test_answers_of_a_model_with_nan_are_warned_of_once(caplog, monkeypatch):
    monkeypatch.setattr(rows, "_warn_of_nan", functools.cache(rows._warn_of_nan.__wrapped__))
    for logprob in (-1.0, -2.0):
        SampleRow.from_completion(completion(-1.0, logprob), PROMPT, "so", round=0)
    assert not caplog.records
    for _ in range(2):
        SampleRow.from_completion(completion(-1.0, math.nan), PROMPT, "!!", round=0)
    assert [record.getMessage()[:53] for record in caplog.records] == [
        "answers have log-probabilities that are no numbers (N"
    ]


def test_a_sample_row_survives_its_file():
    before = row("text\n", metrics={"gsm8k": 1.0, "exact_match": None})
    values = before.to_dict()
    assert list(values) == [*SampleRow.columns, "finish_reason", "gsm8k", "exact_match"]
    assert SampleRow.from_dict(json.loads(json.dumps(values))).to_dict() == values


HEALTHS = [Health(), Health(states=(State.LOOP, State.CUT), loop_from=3)]


@pytest.mark.parametrize("health", [None, *HEALTHS])
def test_a_row_of_training_survives_its_file(health):
    before = Row.from_completion(completion(-math.inf), PROMPT, "so", step=7)
    before = dataclasses.replace(before, metrics={"gsm8k": None, "length": 2.0})
    assert metric_names([before, before]) == ("gsm8k", "length")
    before = before if health is None else before.with_health(health)
    record = before.to_dict()
    assert (record["health"], record["loop_from"]) == (
        (None, None) if health is None else (str(health), before.loop_from)
    )
    assert list(record)[-4:] == ["health", "loop_from", "gsm8k", "length"]
    assert Row.from_dict({**record, "mean_logprob": "-Infinity"}) == before, "as JSON has it"
    assert Row.from_dict({name: value for name, value in record.items() if name not in HEALTH_COLUMNS}) == (
        dataclasses.replace(before, health=None, loop_from=None)
    ), "as a version without health wrote it"
    saved = parse_row(record, "a.jsonl:1")
    assert (saved.health, saved.loop_from) == (before.health, before.loop_from)
    assert not {*saved.texts, *saved.numbers} & set(HEALTH_COLUMNS)
    assert (saved.axis, saved.when, saved.to_row()) == ("step", 7, before)


@pytest.mark.parametrize("health", HEALTHS)
def test_the_health_of_a_sample_row_is_in_its_file_where_it_was_looked_at(health):
    values = row("text").with_health(health).to_dict()
    assert (values["health"], values["loop_from"]) == (str(health), health.loop_from)
    assert SampleRow.from_dict(json.loads(json.dumps(values))).to_dict() == values
    assert not set(HEALTH_COLUMNS) & {*SampleRow.columns, *row("text").to_dict()}


def test_a_number_named_health_is_a_metric_of_another_program():
    record = {"step": 1, "prompt_id": 0, "prompt": "a", "generated_text": "b", "health": 0.5}
    assert parse_row(record, "a.jsonl:1").numbers == {"health": 0.5} and parse_row(record, "a.jsonl:1").health is None


@pytest.mark.parametrize(("cls", "when"), [(Row, {"step": 7}), (SampleRow, {"round": 2})])
def test_further_fields_of_a_prompt_go_through_to_the_file_and_every_reader_of_it(cls, when, tmp_path):
    prompt = dataclasses.replace(PROMPT, fields={"id": "q7", "level": 3})
    before = cls.from_completion(completion(-1.0), prompt, "so", **when)
    record = before.to_record() if isinstance(before, Row) else before.to_dict()
    assert record["fields"] == {"id": "q7", "level": 3}
    assert cls.from_dict(json.loads(json.dumps(record))).fields == prompt.fields
    assert cls.from_dict(json.loads(json.dumps(record))).metrics == {}
    saved = parse_row(record, "a.jsonl:1")
    assert (saved.texts["id"], saved.texts["level"]) == ("q7", "3")
    lines = tmp_path / "rows.jsonl"
    lines.write_text(json.dumps(record) + "\n")
    pq = pytest.importorskip("pyarrow.parquet")
    (table_row,) = pq.read_table(write_parquet(lines)).to_pylist()
    assert {name: table_row[f"fields.{name}"] for name in prompt.fields} == prompt.fields


@pytest.mark.parametrize(("cls", "when"), [(Row, {"step": 7}), (SampleRow, {"round": 2})])
@pytest.mark.parametrize(
    ("text", "end", "reasoning", "content"),
    [
        ("<think>1 + 1</think>2", "", "1 + 1", "2"),
        ("1 + 1</think>2", "<think>\n", "1 + 1", "2"),
        ("1 + 1", "<think>\n", "1 + 1", ""),
        ("<|channel|>analysis<|message|>1 + 1<|end|><|start|>assistant<|channel|>final<|message|>2", "", "1 + 1", "2"),
        ("2", "", None, "2"),
    ],
)
def test_the_parts_of_an_answer_are_read_where_it_has_several(cls, when, text, end, reasoning, content, tmp_path):
    before = cls.from_completion(completion(-1.0), PROMPT, text, prompt_end=end, **when)
    assert (before.reasoning, before.content, before.generated_text) == (reasoning, content, text)
    record = json.loads(json.dumps(before.to_record() if isinstance(before, Row) else before.to_dict()))
    assert {"reasoning", "content"} & set(record) == ({"reasoning", "content"} if reasoning else set())
    again = cls.from_dict(record)
    assert (again.reasoning, again.content, dict(again.metrics)) == (reasoning, content, {})
    saved = parse_row(record, "samples.jsonl:1")
    assert not {"reasoning", "content"} & {*saved.texts, *saved.numbers}
