"""Rows are made of completions in one place, and survive their file."""

import dataclasses
import json

import pytest

from lockstep.report import Row, SampleRow
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


def test_a_completion_without_tokens_has_a_mean_of_zero():
    assert Row.from_completion(completion(), PROMPT, "", step=1).mean_logprob == 0.0


def test_a_sample_row_survives_its_file():
    before = row("text\n", metrics={"gsm8k": 1.0, "exact_match": None})
    values = before.to_dict()
    assert list(values) == [*SampleRow.columns, "finish_reason", "gsm8k", "exact_match"]
    assert SampleRow.from_dict(json.loads(json.dumps(values))).to_dict() == values


def test_a_row_of_training_survives_its_file():
    before = Row.from_completion(completion(-1.0), PROMPT, "so", step=7)
    before = dataclasses.replace(before, metrics={"gsm8k": None, "length": 2.0})
    assert Row.from_dict(json.loads(json.dumps(before.to_dict()))) == before
