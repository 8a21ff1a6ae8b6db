"""Requests and sampling parameters that cannot work are refused where they are given, by name."""

import dataclasses
from typing import Any, ClassVar

import pytest

from lockstep.errors import ConfigError
from lockstep.types import Request, SamplingParams

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
        ({"min_p": -0.1}, r"min_p is -0\.1; it must be at least 0 and at most 1\. Use 0 to"),
        ({"min_p": NAN}, "min_p is nan"),
        (
            {"repetition_penalty": 0.0},
            r"repetition_penalty is 0\.0; it must be at least 0\.01 and at most 100\. Use 1 for none",
        ),
        ({"repetition_penalty": NAN}, "repetition_penalty is nan"),
        ({"presence_penalty": 2.5}, r"presence_penalty is 2\.5; it must be at least -2 and at most 2\. Use 0 for none"),
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
        ({"max_new_tokens": 0}, "max_new_tokens is 0; it must be at least 1"),
        ({"n_generations": 0}, "n_generations is 0; it must be at least 1"),
        ({"temperature": -0.1}, "temperature is -0.1; it must be finite and at least 0"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"temperature": NAN}, "temperature is nan"),
        ({"seed": 2**32}, "seed is 4294967296; it must be at least 0 and less than"),
    ],
)
def test_values_that_cannot_work(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SamplingParams(**{"max_new_tokens": 8} | params)


def test_an_empty_prompt() -> None:
    with pytest.raises(ValueError, match="prompt 4 has 0 tokens; the model needs at least 1"):
        Request(prompt_id=4, prompt_tokens=(), params=SamplingParams(max_new_tokens=1))


@pytest.mark.parametrize(("ignore_eos", "stops"), [(False, (1, 2)), (True, ())])
def test_stop_tokens_end_an_answer_unless_they_are_ignored(ignore_eos: bool, stops: tuple[int, ...]) -> None:
    params = SamplingParams(max_new_tokens=8, stop_token_ids=(1, 2), ignore_eos=ignore_eos, min_tokens=3)
    assert params.stops == stops and params.rules_out_stops == bool(stops)


@pytest.mark.parametrize("name", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_any_penalty_makes_logits_depend_on_the_tokens_so_far(name: str) -> None:
    assert not SamplingParams(max_new_tokens=8).has_penalties
    assert SamplingParams(max_new_tokens=8, **{name: 0.5}).has_penalties


@dataclasses.dataclass(frozen=True, kw_only=True)
class WithOneMore(SamplingParams):
    """What a new filter and a new penalty add to this file."""

    FILTERS: ClassVar[tuple[str, ...]] = (*SamplingParams.FILTERS, "top_n")
    PENALTIES: ClassVar[tuple[str, ...]] = (*SamplingParams.PENALTIES, "length_penalty")

    top_n: float | None = None
    length_penalty: float = 1.0


def test_a_new_filter_alone_is_a_filter_and_a_new_penalty_alone_a_penalty() -> None:
    neutral = WithOneMore(max_new_tokens=8, temperature=1.0)
    assert not neutral.has_filters and not neutral.has_penalties
    assert dataclasses.replace(neutral, top_n=1.5).has_filters
    assert not dataclasses.replace(neutral, top_n=1.5, temperature=0.0).has_filters
    assert dataclasses.replace(neutral, length_penalty=0.9).has_penalties


def test_values_at_the_ends_of_their_ranges_work() -> None:
    SamplingParams(max_new_tokens=1, temperature=1e-4, top_k=1, top_p=1.0, min_p=1.0, min_tokens=1, seed=2**32 - 1)
    SamplingParams(max_new_tokens=1, repetition_penalty=100.0, presence_penalty=-2.0, frequency_penalty=2.0)
    SamplingParams(max_new_tokens=1, logit_bias=((0, -100.0), (1, 100.0)), allowed_token_ids=(1,), stop_token_ids=(1,))
