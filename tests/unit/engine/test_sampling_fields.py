"""The fields of sampling that three configurations share: each reaches the engine, and its errors name its block."""

import dataclasses

import pytest

from lockstep.batch_inference import SampleConfig
from lockstep.callback import InferenceEvalConfig
from lockstep.engine import CapacityFields, EngineConfig
from lockstep.errors import ConfigError
from lockstep.main.arguments import ordered_fields
from lockstep.training import RolloutConfig
from lockstep.types import SamplingRules

REQUIRED = {
    SampleConfig: {"hf_checkpoint": "here", "prompts": ["one"]},
    InferenceEvalConfig: {"prompts": ["one"]},
    RolloutConfig: {},
}
CLASSES = list(REQUIRED)
OTHER_RULES = {
    "max_new_tokens": 9,
    "temperature": 0.5,
    "top_k": 3,
    "top_p": 0.25,
    "min_p": 0.125,
    "filters": ("my_filters:mine=0.5",),
    "repetition_penalty": 1.5,
    "presence_penalty": 0.75,
    "frequency_penalty": -0.75,
    "min_tokens": 2,
    "ignore_eos": True,
    "n_generations": 4,
    "seed": 11,
}
OTHER_CAPACITIES = {
    "max_seqs": 5,
    "page_size": 8,
    "max_pages": 50,
    "max_prefill_size": 80,
    "max_prompts_per_batch": 6,
    "hbm_utilization": 0.5,
    "kv_cache_dtype": "fp8",
    "weight_dtype": "int8",
    "layout": {"tensor": 2},
    "calibration": "measured.json",
}


def names(cls):
    return {field.name for field in dataclasses.fields(cls)}


def make(cls, **values):
    return cls(**REQUIRED[cls] | values)


@pytest.mark.parametrize("cls", CLASSES)
def test_every_rule_of_sampling_reaches_the_parameters(cls):
    assert OTHER_RULES.keys() == names(SamplingRules)
    for name, value in OTHER_RULES.items():
        values = {"temperature": 1.0, name: value}
        assert getattr(make(cls).sampling_params(()), name) != value
        assert getattr(make(cls, **values).sampling_params(()), name) == value


@pytest.mark.parametrize("cls", CLASSES)
def test_stops_reach_the_parameters(cls):
    params = make(cls, stop=["end"], stop_token_ids=[4]).sampling_params((7,))
    assert (params.stop, params.stop_token_ids) == (("end",), (4,))
    assert make(cls).sampling_params((7,)).stop_token_ids == (7,)


@pytest.mark.parametrize("cls", [InferenceEvalConfig, RolloutConfig])
def test_every_capacity_reaches_the_engine(cls):
    assert OTHER_CAPACITIES.keys() == names(CapacityFields)
    engine = make(cls, **OTHER_CAPACITIES).engine_config("bfloat16", 32)
    assert engine == EngineConfig(**OTHER_CAPACITIES, dtype="bfloat16", max_seq_len=32)
    assert make(cls).engine_config(None) == EngineConfig()


def test_the_longest_sequence_of_a_block_is_that_of_its_engine():
    assert make(InferenceEvalConfig, max_seq_len=48).engine_config(None).max_seq_len == 48


@pytest.mark.parametrize(
    ("cls", "values", "text"),
    [
        (SampleConfig, {"top_k": 5}, "^top_k is 5 and temperature is 0"),
        (InferenceEvalConfig, {"top_k": 5}, r"^inference_eval\.top_k is 5 and temperature is 0"),
        (SampleConfig, {"stop": "x"}, r"^stop is 'x'; it must be a list of strings\. Use \['x'\]"),
        (RolloutConfig, {"stop": "x"}, r"^rollout\.stop is 'x'; it must be a list of strings\. Use \['x'\]"),
        (RolloutConfig, {"ignore_eos": True, "min_tokens": 1}, r"^rollout\.min_tokens is 1 and ignore_eos is true"),
        (RolloutConfig, {"min_p": 2.0}, "^rollout: min_p is 2.0; it must be 0 to 1"),
        (RolloutConfig, {"kv_cache_dtype": "int4"}, "^rollout: kv_cache_dtype is 'int4'"),
        (RolloutConfig, {"weight_dtype": "int4"}, "^rollout: weight_dtype is 'int4'; it must be auto, int8, fp8"),
        (RolloutConfig, {"temperature": 0.0}, r"^rollout\.temperature is 0.0; it must be more than 0"),
        (RolloutConfig, {"n_generations": 1}, r"^rollout\.n_generations is 1; .* at least 2"),
        (InferenceEvalConfig, {"max_prompts_per_batch": 0}, "^inference_eval: max_prompts_per_batch is 0"),
        (SampleConfig, {"min_tokens": 257}, "^min_tokens is 257; .* max_new_tokens, which is 256"),
    ],
)
def test_an_error_names_the_block(cls, values, text):
    with pytest.raises(ConfigError, match=text):
        make(cls, **values)


@pytest.mark.parametrize("cls", CLASSES)
def test_a_configuration_lists_its_own_fields_first(cls):
    listed = [field.name for field in ordered_fields(cls)]
    assert sorted(listed) == sorted(names(cls))
    own = names(cls) - names(SamplingRules) - {"stop", "stop_token_ids", "drafts"} - names(CapacityFields)
    own -= {"prompts", "max_line_bytes", "metrics", "skip_samples_table"}
    own -= {"prompt_format", "prompt_field", "messages_field", "answer_field"}
    if cls is SampleConfig:
        own.add("max_prompts_per_batch")
    assert set(listed[: len(own)]) == own
