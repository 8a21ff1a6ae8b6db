"""The state of one completion while it is generated, the results of a launch in one array, and counts."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from lockstep.engine.schedule import DecodeResults, as_floats, digest_parts
from lockstep.engine.schedule.sequence import DraftCounts, PromptLogprobs, Sequence
from lockstep.hosts import digest
from lockstep.types import Completion, FinishReason, RoutedExperts
from tests.unit.engine.schedule.test_scheduler import request


def sequence_of(prompt: int = 4, new: int = 3, **options: Any) -> Sequence:
    return Sequence(request=request(7, prompt, new, **options), generation_id=2)


def test_before_the_first_token_the_last_of_the_prompt_is_read() -> None:
    sequence = sequence_of(prompt=4, new=3)
    assert (sequence.last_token, sequence.position, sequence.num_prefill, sequence.remaining) == (3, 3, 3, 3)


def sampled(*tokens: int, top: int = 0) -> np.ndarray:
    """What a launch gives a sequence: log-probabilities -token and -2 token, and ``top`` other tokens."""
    ids = np.array(tokens, np.int32).reshape(1, 1, -1)
    logprobs = -ids.astype(np.float32)
    tops = np.tile(ids[..., None], top) + np.arange(top, dtype=np.int32)
    given = (tops, -tops.astype(np.float32)) if top else ()
    return DecodeResults.of(ids, logprobs, 2 * logprobs, *given).packed[0, :, 0]


def test_a_sampled_token_is_read_next() -> None:
    sequence = sequence_of(prompt=4, new=5)
    sequence.extend(sampled(8, 9))
    assert (sequence.last_token, sequence.position, sequence.remaining, sequence.num_tokens) == (9, 5, 3, 2)
    assert sequence.tokens == [8, 9]
    sequence.extend(sampled(7))
    assert sequence.tokens == [8, 9, 7] and sequence.last_token == 7


@pytest.mark.parametrize(("prompt", "new", "pages"), [(1, 1, 1), (4, 1, 1), (4, 2, 2), (5, 4, 2), (5, 5, 3)])
def test_the_last_sampled_token_needs_no_page(prompt: int, new: int, pages: int) -> None:
    assert sequence_of(prompt=prompt, new=new).worst_case_pages(4) == pages


def test_what_follows_a_stop_string_is_removed_from_every_list() -> None:
    sequence = sequence_of(new=4)
    sequence.extend(sampled(0, 1, top=3))
    assert sequence.tokens == [0, 1]
    sequence.extend(sampled(2, 3, top=3))
    sequence.stop_at(3)
    assert sequence.tokens == [0, 1, 2] and sequence.num_tokens == 3
    completion = sequence.completion()
    assert completion.tokens == (0, 1, 2) and completion.finish_reason is FinishReason.STOP
    assert (completion.logprobs, completion.sampled_logprobs) == ((0.0, -1.0, -2.0), (0.0, -2.0, -4.0))
    assert completion.top_logprobs == ()


def test_a_completion_has_as_many_of_the_most_probable_tokens_as_its_request_asks_for() -> None:
    sequence = sequence_of(new=2, top_logprobs=2)
    sequence.extend(sampled(4, 6, top=3))
    sequence.finish_reason = FinishReason.LENGTH
    assert sequence.completion().top_logprobs == (((4, -4.0), (5, -5.0)), ((6, -6.0), (7, -7.0)))


def test_a_completion_is_plain_python_and_has_the_numbers_of_its_request() -> None:
    sequence = sequence_of(new=2)
    sequence.extend(sampled(1))
    sequence.extend(sampled(2))
    sequence.finish_reason = FinishReason.LENGTH
    completion = sequence.completion()
    assert (completion.prompt_id, completion.generation_id, completion.prompt_logprobs) == (7, 2, ())
    assert {type(value) for value in completion.tokens} == {int}
    assert {type(value) for value in (*completion.logprobs, *completion.sampled_logprobs)} == {float}
    assert sequence.completion() is completion


def test_an_answer_without_tokens() -> None:
    sequence = sequence_of()
    sequence.finish_reason = FinishReason.CANCELLED
    assert (sequence.completion().tokens, sequence.completion().logprobs, sequence.tokens) == ((), (), [])


def record_of(prompt: int, **options: Any) -> PromptLogprobs:
    return PromptLogprobs(request=request(0, prompt, 1, prompt_logprobs=True, **options))


def test_nothing_is_reported_until_every_token_has_its_own() -> None:
    record = record_of(4)
    record.add(np.array([-1.0, -2.0]), None, None)
    assert not record.done and record.result() == ((), ())
    record.add(np.array([-3.0]), None, None)
    assert record.done and record.result() == ((None, -1.0, -2.0, -3.0), ())


def test_a_prompt_of_one_token_is_done_at_once() -> None:
    record = record_of(1)
    assert record.done and record.result() == ((None,), ())


def test_of_the_most_probable_tokens_the_requested_number_is_kept() -> None:
    record = record_of(2, top_logprobs=2)
    record.add(np.array([-1.0]), np.array([[5, 3, 8]]), np.array([[-0.1, -0.2, -0.3]]))
    assert record.result() == ((None, -1.0), ((), ((5, -0.1), (3, -0.2))))


def test_each_array_is_a_part_and_numbers_keep_their_bits() -> None:
    shape = (2, 3, 4)
    tokens = np.arange(24, dtype=np.int32).reshape(shape)
    logprobs = np.float32(-0.1) * tokens.astype(np.float32)
    logprobs[1, 2, 3] = np.nan
    top_ids = np.arange(48, dtype=np.int32).reshape(*shape, 2)
    packed = DecodeResults.of(tokens, logprobs, 2 * logprobs, top_ids, top_ids.astype(np.float32)).packed
    assert packed.shape == (2, 7, 3, 4) and packed.dtype == np.int32
    np.testing.assert_array_equal(packed[:, 0], tokens)
    np.testing.assert_array_equal(as_floats(packed[:, 1]), logprobs)
    np.testing.assert_array_equal(as_floats(packed[:, 2]), 2 * logprobs)
    np.testing.assert_array_equal(np.moveaxis(packed[:, 3:5], 1, -1), top_ids)
    np.testing.assert_array_equal(as_floats(np.moveaxis(packed[:, 5:], 1, -1)), top_ids)


def test_without_other_probabilities_there_are_zeros() -> None:
    one = np.ones((1, 1, 1), np.int32)
    results = DecodeResults.of(one, one.astype(np.float32))
    assert results.packed.shape == (1, 3, 1, 1) and results.packed[0, 2, 0, 0] == 0
    assert results.tokens.tolist() == [[[1]]]


def test_counts_of_several_rounds_are_added_and_told() -> None:
    rounds = [DraftCounts(tokens=10, steps=4, drafted=8, right=5), DraftCounts(tokens=20, steps=16, drafted=2, right=1)]
    total = DraftCounts.sum(rounds)
    assert total == DraftCounts(tokens=30, steps=20, drafted=10, right=6)
    assert total.metrics() == {"drafts/accepted_share": 0.6, "drafts/steps_saved": 10, "drafts/tokens_per_step": 1.5}
    assert str(total) == "60% right, 10 of 30 steps saved"


def test_nothing_was_sampled() -> None:
    nothing = DraftCounts.sum([])
    assert set(nothing.metrics().values()) == {0} and str(nothing) == "0% right, 0 of 0 steps saved"


def test_completions_that_differ_in_anything_have_other_digests() -> None:
    completion = Completion(
        prompt_id=0, generation_id=0, tokens=(1, 2), logprobs=(-1.0, -2.0), finish_reason=FinishReason.STOP
    )
    changes: list[dict[str, Any]] = [
        {},
        {"prompt_id": 1},
        {"generation_id": 1},
        {"tokens": (1, 3)},
        {"tokens": (1,)},
        {"logprobs": (-1.0, -2.0000000000000004)},
        {"logprobs": (), "sampled_logprobs": (-1.0, -2.0)},
        {"finish_reason": FinishReason.LENGTH},
        {"top_logprobs": (((3, -1.0),), ((4, -1.0),))},
        {"prompt_logprobs": (None, -1.0)},
        {"prompt_top_logprobs": (((3, -1.0),),)},
        {"routed_experts": RoutedExperts((1, 1, 1), b"\0\0")},
    ]
    assert {name for change in changes for name in change} == {field.name for field in dataclasses.fields(Completion)}
    digests = [digest(*digest_parts([dataclasses.replace(completion, **change)])) for change in changes]
    digests += [digest(), digest(*digest_parts([completion] * 2))]
    assert len(set(digests)) == len(digests)
    assert digest(*digest_parts([dataclasses.replace(completion)])) == digests[0]
