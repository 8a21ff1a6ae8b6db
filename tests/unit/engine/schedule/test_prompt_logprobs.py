"""Log-probabilities of a prompt's own tokens, page by page."""

from typing import Any

import numpy as np

from lockstep.engine.schedule.prompt_logprobs import PromptLogprobs
from tests.unit.engine.schedule.test_scheduler import request


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
