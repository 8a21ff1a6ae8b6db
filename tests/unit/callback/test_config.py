"""The inference_eval block."""

from typing import Any

import pytest

from lockstep.callback import InferenceEvalConfig
from lockstep.errors import ConfigError, PromptError
from lockstep.report import AlarmsConfig


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


def test_alarms_without_health_are_refused() -> None:
    with pytest.raises(ConfigError, match="inference_eval.health is false, so inference_eval.alarms has no effect"):
        InferenceEvalConfig(prompts=["a"], health=False, alarms=AlarmsConfig(on_alarm="stop"))
    assert not InferenceEvalConfig(prompts=["a"], health=False, alarms=AlarmsConfig(on_alarm=None)).health


@pytest.mark.parametrize(
    ("values", "error", "text"),
    [
        ({"prompts": []}, PromptError, "inference_eval: prompts holds no prompts; at least 1 is needed"),
        ({"prompts_per_round": 0}, ConfigError, "prompts_per_round is 0; it must be at least 1. Use null"),
        ({"prompts_per_round": 5}, ConfigError, "prompts_per_round is 5 and there is 1 prompt. Remove"),
        ({"eval_every": 0}, ConfigError, "eval_every is 0; it must be at least 1. Set enabled: false"),
        ({"timeout_s": 0}, ConfigError, "timeout_s is 0; it must be more than 0"),
        ({"max_seconds": 0}, ConfigError, "max_seconds is 0; it must be more than 0. Use null for no limit"),
        ({"stop": ["", "x"]}, ConfigError, "inference_eval: stop has an empty string at place 0"),
        ({"max_new_tokens": 0}, ConfigError, "inference_eval: max_new_tokens is 0; it must be at least 1"),
        ({"layout": {"tensor": 0}}, ConfigError, "layout is {'tensor': 0}; it must be auto, training"),
        ({"metrics": ["bleu"]}, ConfigError, "metric 'bleu' is not known"),
        ({"top_k": 0, "temperature": 1.0}, ConfigError, "inference_eval: top_k is 0"),
        ({"top_k": 5}, ConfigError, "l.top_k is 5 and temperature is 0, which is greedy: top_k would do nothing. Set"),
        ({"top_p": 0.9}, ConfigError, "inference_eval.top_p is 0.9 and temperature is 0"),
        ({"min_p": 0.1}, ConfigError, "inference_eval.min_p is 0.1 and temperature is 0"),
        ({"ignore_eos": True, "min_tokens": 2}, ConfigError, "inference_eval.min_tokens is 2 and ignore_eos is true"),
    ],
)
def test_values_that_are_wrong_or_would_do_nothing_are_refused_by_name(values, error, text):
    with pytest.raises(error, match=text.replace("{", r"\{")):
        InferenceEvalConfig(**{"prompts": ["one"]} | values)
