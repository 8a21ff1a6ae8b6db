"""Sampling parameters that cannot work are refused where they are given, by name."""

import dataclasses
from typing import Any

import pytest

from lockstep.callback import InferenceEvalConfig
from lockstep.callback.round_prompts import RoundPrompts, from_bytes, to_bytes
from lockstep.errors import ConfigError
from lockstep.schedule import sampling_sizes
from lockstep.types import SamplingParams
from tests.unit.engine.models import request

NAN = float("nan")


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"temperature": 1e-6}, r"temperature is 1e-06; it must be 0 or at least 0\.0001, .* Use 0 for greedy"),
        ({"top_k": 0}, r"top_k is 0; it must be at least 1, or null\. Use null to draw from all tokens"),
        ({"top_k": -1}, "top_k is -1; it must be"),
        ({"top_p": 0.0}, r"top_p is 0\.0; it must be more than 0 and at most 1\. Use 1 to"),
        ({"top_p": 1.01}, r"top_p is 1\.01"),
        ({"top_p": NAN}, "top_p is nan"),
        ({"min_p": -0.1}, r"min_p is -0\.1; it must be 0 to 1\. Use 0 to"),
        ({"min_p": NAN}, "min_p is nan"),
        ({"repetition_penalty": 0.0}, r"repetition_penalty is 0\.0; it must be 0\.01 to 100\. Use 1 for none"),
        ({"repetition_penalty": NAN}, "repetition_penalty is nan"),
        ({"presence_penalty": 2.5}, r"presence_penalty is 2\.5; it must be -2 to 2\. Use 0 for none"),
        ({"frequency_penalty": -3.0}, r"frequency_penalty is -3\.0; it must be"),
        ({"min_tokens": -1}, "min_tokens is -1; it must be at least 0 and at most max_new_tokens, which is 8"),
        ({"min_tokens": 9}, r"min_tokens is 9; .* Lower min_tokens or raise max_new_tokens"),
        ({"top_logprobs": -1}, "top_logprobs is -1; it must be at least 0"),
        ({"logit_bias": ((1, 1.0), (1, 2.0))}, "logit_bias gives token 1 twice"),
        (
            {"logit_bias": ((1, 101.0),)},
            r"logit_bias of token 1 is 101\.0; it must be -100 to 100\. Use allowed_token_ids",
        ),
        ({"logit_bias": ((1, NAN),)}, "logit_bias of token 1 is nan"),
        ({"allowed_token_ids": ()}, r"allowed_token_ids is empty; .* Use null to allow all"),
        (
            {"allowed_token_ids": (1, 2), "stop_token_ids": (2, 1), "min_tokens": 1},
            "allowed_token_ids are all stop tokens and min_tokens is 1, so that no token could be sampled",
        ),
    ],
)
def test_values_that_cannot_work(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SamplingParams(max_new_tokens=8, **params)


def test_what_a_request_needs_of_the_program() -> None:
    names = ("penalties", "min_tokens", "bias_ids", "allowed_ids", "top_logprobs", "prompt_logprobs")
    none = dict.fromkeys(names, 0)
    assert sampling_sizes([]) == none
    neutral = SamplingParams(max_new_tokens=8, temperature=1.0, top_k=3, top_p=0.5, min_p=0.1, stop_token_ids=(1,))
    assert sampling_sizes([neutral]) == none
    lists = SamplingParams(max_new_tokens=8, logit_bias=((1, 1.0),), allowed_token_ids=tuple(range(9)))
    counts = SamplingParams(max_new_tokens=8, frequency_penalty=0.5, min_tokens=2, stop_token_ids=(1,), top_logprobs=3)
    counts = dataclasses.replace(counts, prompt_logprobs=True)
    assert sampling_sizes([lists, neutral, counts]) == {
        "penalties": 1,
        "min_tokens": 1,
        "bias_ids": 8,
        "allowed_ids": 16,
        "top_logprobs": 3,
        "prompt_logprobs": 1,
    }
    # Where no stop token ends an answer there is none to rule out.
    assert not any(sampling_sizes([SamplingParams(max_new_tokens=8, min_tokens=2)]).values())


def test_parameters_travel_whole() -> None:
    sent = [
        request(0, 5, 8, logit_bias=((1, 0.5), (2, -1.0)), allowed_token_ids=(1, 2, 3), top_k=4, stop_token_ids=(3,)),
        request(1, 5, 8, min_tokens=2, ignore_eos=True, top_p=0.3),
    ]
    for questions in (RoundPrompts(requests=sent), RoundPrompts(requests=sent[:1], largest=sent)):
        assert from_bytes(to_bytes(questions)) == questions


def test_the_callback_passes_its_fields_on() -> None:
    fields: dict[str, Any] = {
        "temperature": 0.7,
        "top_k": 5,
        "top_p": 0.9,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "min_tokens": 3,
    }
    params = InferenceEvalConfig(prompts=["a"], **fields).sampling_params((2,))
    assert {name: getattr(params, name) for name in fields} == fields
    assert InferenceEvalConfig(prompts=["a"], ignore_eos=True).sampling_params((2,)).stops == ()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"top_k": 0, "temperature": 1.0}, "inference_eval: top_k is 0"),
        (
            {"top_k": 5},
            r"inference_eval\.top_k is 5 and temperature is 0, which is greedy: top_k would do nothing\. Set",
        ),
        ({"top_p": 0.9}, r"inference_eval\.top_p is 0\.9 and temperature is 0"),
        ({"min_p": 0.1}, r"inference_eval\.min_p is 0\.1 and temperature is 0"),
        ({"ignore_eos": True, "min_tokens": 2}, r"inference_eval\.min_tokens is 2 and ignore_eos is true"),
    ],
)
def test_a_field_of_the_callback_that_would_do_nothing(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        InferenceEvalConfig(prompts=["a"], **fields)
