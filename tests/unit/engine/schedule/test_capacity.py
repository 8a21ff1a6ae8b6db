"""Requests that can never fit."""

import pytest

from lockstep.engine.schedule import (
    Capacity,
    Scheduler,
    check_capacity,
)
from lockstep.errors import CapacityError
from lockstep.types import Request
from tests.unit.engine.schedule.test_scheduler import capacity_of, request


@pytest.mark.parametrize(
    ("one", "capacity", "message"),
    [
        (
            request(7, 10, 8),
            capacity_of(),
            r"prompt 7 has 10 tokens and max_new_tokens is 8, 18 together; max_seq_len is 16\. Shorten the prompt to "
            r"at most 8 tokens, or lower max_new_tokens to at most 6, or raise max_seq_len to at least 18\.",
        ),
        (request(7, 16, 3), capacity_of(), r"16\. Shorten the prompt to at most 13 tokens, or raise max_seq_len"),
        (request(7, 3, 16), capacity_of(), r"16\. Lower max_new_tokens to at most 13, or raise max_seq_len"),
        (request(7, 16, 16), capacity_of(), r"max_seq_len is 16\. Raise max_seq_len to at least 32\.$"),
        (
            request(7, 6, 5),
            capacity_of(pages=5),
            r"prompt 7 needs 5 pages of 2 tokens for its 6 prompt and 5 new tokens; a replica has 4 .* Raise max_pages "
            r"to at least 6, or lower max_new_tokens to at most 3\.",
        ),
        (request(7, 12, 1), capacity_of(pages=5), r"Raise max_pages to at least 7, or shorten the prompt\."),
        (request(7, 1, 1, stop_token_ids=(1, 2, 3)), capacity_of(), "3 stop token ids; the programs were built for 2"),
    ],
)
def test_what_can_never_fit_is_refused(one: Request, capacity: Capacity, message: str) -> None:
    with pytest.raises(CapacityError, match=message):
        Scheduler(capacity, [request(0, 1, 1), one])


@pytest.mark.parametrize("prompt", [1, 2, 5, 12])
def test_the_values_that_a_refusal_names_work(prompt: int) -> None:
    for pages in range(2, 9):
        capacity = capacity_of(pages=pages)
        room = (pages - 1) * capacity.page_size + 1 - prompt
        if 1 <= room <= 16 - prompt:
            check_capacity(capacity, [request(0, prompt, room)])
        if room + 1 <= 16 - prompt:
            with pytest.raises(CapacityError, match=rf"^prompt 0 needs .* a replica has {pages - 1} "):
                check_capacity(capacity, [request(0, prompt, max(room + 1, 1))])
