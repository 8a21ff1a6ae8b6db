"""The inference_eval block."""

from typing import Any

import pytest

from lockstep.callback import InferenceEvalConfig
from lockstep.errors import ConfigError


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
