"""The answers of the agent, which anything on a worker's side may have written."""

import pytest

from lockstep.launch.backend import LaunchError
from lockstep.launch.connection import answered


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"{", "is not JSON"),
        (b"[]", "is a JSON list"),
        (b"{}", "it has no state"),
        (b'{"state": "ended", "code": 0}', "it has no ended"),
        (b'{"state": "ended", "code": "0", "ended": 1, "reason": ""}', "code is '0'"),
        (b'{"state": ["ended"]}', "state is"),
        (b"[" * 60_000, "nested too deeply"),
    ],
)
def test_an_answer_that_is_none_of_the_agents_is_an_error_of_the_launch(answer, why):
    with pytest.raises(LaunchError, match=f"the answer of a worker .*{why}.*Look at what else its ssh"):
        answered(answer, "follow")
    assert answered(b'{"error": "a\\u001b[2J"}', "follow") == {"error": "a\\x1b[2J"}
