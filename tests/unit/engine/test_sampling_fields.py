"""The fields of sampling that three configurations share, and earlier answers that are kept as drafts."""

import dataclasses

import numpy as np
import pytest

from lockstep.batch_inference import SampleConfig
from lockstep.callback import InferenceEvalConfig
from lockstep.configuration import ordered_fields
from lockstep.engine import CapacityFields, EngineConfig
from lockstep.engine.sampling_fields import EarlierAnswers
from lockstep.errors import ConfigError
from lockstep.training import RolloutConfig
from lockstep.types import Drafts, SamplingRules
from tests.saved_states import as_saved

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
    "memory_bytes_per_device": 1 << 30,
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
        (SampleConfig, {"stop": "x"}, r"^stop is 'x'; it must be a list\. Use \['x'\]"),
        (RolloutConfig, {"stop": "x"}, r"^rollout\.stop is 'x'; it must be a list\. Use \['x'\]"),
        (RolloutConfig, {"ignore_eos": True, "min_tokens": 1}, r"^rollout\.min_tokens is 1 and ignore_eos is true"),
        (SampleConfig, {"ignore_eos": True, "stop_token_ids": [4]}, r"^stop_token_ids is \[4\] and ignore_eos is true"),
        (RolloutConfig, {"min_p": 2.0}, "^rollout: min_p is 2.0; it must be at least 0 and at most 1"),
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
    if cls is not RolloutConfig:
        own.remove("health")
    assert set(listed[: len(own)]) == own


def test_the_last_answers_are_the_next_drafts():
    earlier = EarlierAnswers("auto")
    assert earlier.drafts("a") == Drafts(ngrams=True)
    earlier.keep("a", [(1, 2), ()])
    earlier.keep("b", [(3,)])
    earlier.keep("a", [(4,), (5, 6)])
    assert earlier.drafts("a") == Drafts(answers=((4,), (5, 6)), ngrams=True, compared=1)
    assert earlier.drafts("b") == Drafts(answers=((3,),), ngrams=True)


def test_drafts_say_how_much_of_the_last_ones_was_right():
    earlier = EarlierAnswers("last_round")
    earlier.keep("a", [(1, 2, 3), (4, 5)])
    earlier.keep("a", [(1, 9, 3, 4), (4,), (7,)])
    assert earlier.drafts("a") == Drafts(answers=((1, 9, 3, 4), (4,), (7,)), compared=4, right=3)
    earlier.keep("a", [(), (8,)])
    assert earlier.drafts("a") == Drafts(answers=((), (8,)), compared=1)


def test_each_source_by_itself():
    none, ngram, last = (EarlierAnswers(source) for source in ("none", "ngram", "last_round"))
    for each in (none, ngram, last):
        each.keep("a", [(1, 2)])
    assert none.drafts("a") is None
    assert ngram.drafts("a") == Drafts(ngrams=True)
    assert last.drafts("a") == Drafts(answers=((1, 2),))


def test_what_was_kept_longest_ago_goes_first():
    earlier = EarlierAnswers("last_round", max_tokens=5)
    for name in "abc":
        earlier.keep(name, [(1, 2)])
    assert [bool(earlier.drafts(name).answers) for name in "abc"] == [False, True, True]
    earlier.keep("b", [(7,)])  # anew, and now the youngest
    earlier.keep("d", [(1, 2)])
    earlier.keep("e", [(1,)])
    assert [bool(earlier.drafts(name).answers) for name in "abcde"] == [False, True, False, True, True]


def test_a_draft_of_what_are_no_tokens_is_refused():
    with pytest.raises(ConfigError, match="draft of generation 1 has tokens from -1 to 7; token ids are at least 0"):
        Drafts(answers=((), (7, -1)))


@pytest.mark.parametrize(("compared", "right"), [(3, 4), (0, 1), (-1, -1), (2, -1)])
def test_no_more_tokens_were_right_than_there_were(compared, right):
    with pytest.raises(ConfigError, match=f"of {compared} tokens of earlier drafts {right} are said to be right"):
        Drafts(compared=compared, right=right)


def test_what_is_kept_comes_back_from_a_checkpoint():
    earlier = EarlierAnswers("auto", max_tokens=9)
    for key, answers in (((3, (7, 8)), [(1, 2), ()]), ((3, (7, 8)), [(1, 5), (4,)]), (17, [(6, 70000)]), (18, [])):
        earlier.keep(key, answers)
    copy, state = earlier.copy(), as_saved(earlier.state())
    resumed = EarlierAnswers("auto", max_tokens=9)
    resumed.load_state(state)
    for each in (earlier, copy, resumed):
        assert each.drafts((3, (7, 8))) == Drafts(answers=((1, 5), (4,)), ngrams=True, compared=2, right=1)
        assert each.drafts(17) == Drafts(answers=((6, 70000),), ngrams=True) and each.drafts(18) == Drafts(ngrams=True)
        each.keep(19, [range(5)])  # more than there is room for: the oldest go
        assert not each.drafts((3, (7, 8))).answers and each.drafts(17).answers and each.drafts(19).answers
    np.testing.assert_equal(copy.state(), earlier.state())
    np.testing.assert_equal(resumed.state(), earlier.state())
    before = EarlierAnswers("auto")
    before.load_state({"kept": "[]", "tokens": ""})
    assert before.drafts(17) == Drafts(ngrams=True), "version 0.2 wrote another kind, which is left"
    for source in ("none", "ngram"):
        other = EarlierAnswers(source)
        other.load_state(state)
        np.testing.assert_equal(other.state(), EarlierAnswers(source).state(), "a run that wants none now has none")
