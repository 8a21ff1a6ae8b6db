"""The state of one completion while it is generated."""

from typing import Any

import pytest

from lockstep.schedule.sequence import Sequence
from lockstep.types import FinishReason
from tests.unit.schedule.test_scheduler import request


def sequence_of(prompt: int = 4, new: int = 3, **options: Any) -> Sequence:
    return Sequence(request=request(7, prompt, new, **options), generation_id=2)


def test_before_the_first_token_the_last_of_the_prompt_is_read() -> None:
    sequence = sequence_of(prompt=4, new=3)
    assert (sequence.last_token, sequence.position, sequence.num_prefill, sequence.remaining) == (3, 3, 3, 3)


def test_a_sampled_token_is_read_next() -> None:
    sequence = sequence_of(prompt=4, new=3)
    sequence.append(9, -0.5)
    assert (sequence.last_token, sequence.position, sequence.remaining) == (9, 4, 2)


@pytest.mark.parametrize(("prompt", "new", "pages"), [(1, 1, 1), (4, 1, 1), (4, 2, 2), (5, 4, 2), (5, 5, 3)])
def test_the_last_sampled_token_needs_no_page(prompt: int, new: int, pages: int) -> None:
    assert sequence_of(prompt=prompt, new=new).worst_case_pages(4) == pages


def test_a_stop_token_ends_it_and_is_kept() -> None:
    sequence = sequence_of(stop_token_ids=(5,))
    sequence.append(5, -0.5)
    assert (sequence.finish_reason, sequence.tokens) == (FinishReason.STOP, [5])


def test_an_ignored_stop_token_does_not_end_it() -> None:
    sequence = sequence_of(stop_token_ids=(5,), ignore_eos=True)
    sequence.append(5, -0.5)
    assert sequence.finish_reason is None


def test_a_stop_token_in_the_last_place_is_a_stop() -> None:
    sequence = sequence_of(new=1, stop_token_ids=(5,))
    sequence.append(5, -0.5)
    assert sequence.finish_reason is FinishReason.STOP


def test_the_most_tokens_end_it() -> None:
    sequence = sequence_of(new=2)
    sequence.append(1, -0.5)
    assert sequence.finish_reason is None
    sequence.append(1, -0.5)
    assert sequence.finish_reason is FinishReason.LENGTH


def test_what_follows_a_stop_string_is_removed_from_every_list() -> None:
    sequence = sequence_of(new=3)
    for token in range(3):
        sequence.append(token, -float(token), -2.0 * token, ((token, 0.0),))
    sequence.stop_at(2)
    completion = sequence.completion()
    assert (completion.tokens, completion.logprobs, completion.sampled_logprobs) == ((0, 1), (0.0, -1.0), (0.0, -2.0))
    assert completion.top_logprobs == (((0, 0.0),), ((1, 0.0),)) and completion.finish_reason is FinishReason.STOP


def test_a_completion_has_the_numbers_of_its_request() -> None:
    sequence = sequence_of(new=1)
    sequence.append(1, -0.5)
    completion = sequence.completion()
    assert (completion.prompt_id, completion.generation_id, completion.prompt_logprobs) == (7, 2, ())
