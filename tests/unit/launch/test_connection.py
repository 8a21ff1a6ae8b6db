"""The answers of the agent, which anything on a worker's side may have written, over connections that drop."""

import subprocess

import pytest

from lockstep.launch.backend import LaunchError
from lockstep.launch.connection import answered
from tests.clock import until
from tests.fake_cloud.cloud import Cloud


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"{", "is not JSON"),
        (b"[]", "is a JSON list"),
        (b"{}", "it has no state"),
        (b'{"state": "ended", "code": 0}', "it has no ended"),
        (b'{"state": "ended", "code": "0", "ended": 1, "reason": ""}', "code is '0'"),
        (b'{"state": ["ended"]}', "state is"),
        (b"[" * 60_000, "(nested too deeply|Expecting value)"),  # Python 3.14 reads to its end
    ],
)
def test_an_answer_that_is_none_of_the_agents_is_an_error_of_the_launch(answer, why):
    with pytest.raises(LaunchError, match=f"the answer of a worker .*{why}.*Look at what else its ssh"):
        answered(answer, "follow")
    assert answered(b'{"error": "a\\u001b[2J"}', "follow") == {"error": "a\\x1b[2J"}


def test_what_runs_on_a_host_that_is_gone_is_that_of_its_own_cloud(tmp_path):
    """Tests that run side by side have hosts of the same name."""
    clouds = [Cloud(tmp_path / name) for name in ("one", "two")]
    connections = []
    try:
        for each in clouds:
            words = [each.directory / "bin" / "ssh", each.add("a"), "sleep 1000"]
            connections.append(subprocess.Popen(words, env=each.environment, stdin=subprocess.DEVNULL))
        until(lambda: all(each.processes() for each in clouds))
        clouds[0].set("a", "gone")
        assert connections[0].wait(60) == 255 and clouds[0].wait_until_empty()
        assert clouds[1].processes() and connections[1].poll() is None
    finally:
        for each in clouds:
            each.close()
        for connection in connections:
            connection.wait(60)
