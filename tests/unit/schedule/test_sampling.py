"""Which sampling features programs need, and the parameters of each slot."""

import dataclasses

from lockstep.schedule import sampling_sizes
from lockstep.types import SamplingParams


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
