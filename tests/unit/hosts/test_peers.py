"""What a process prints when others have announced that they end; the rest of the file needs real processes."""

import json

from lockstep.exit_codes import PEER_FAILED, TERMINATED
from lockstep.hosts.peers import _summarize


def test_a_reason_of_several_processes_is_said_once() -> None:
    boom, gone = ("failed: ValueError: boom", PEER_FAILED), ("was asked to end (SIGTERM)", TERMINATED)
    announced = [json.dumps([*what, index]).encode() for index, what in enumerate([boom, boom, gone, boom, boom])]

    assert _summarize(announced) == (
        ["processes 0, 1, 3, 4 failed: ValueError: boom", "process 2 was asked to end (SIGTERM)"],
        PEER_FAILED,
    )


def test_without_a_failure_the_exit_code_is_the_one_announced() -> None:
    assert _summarize([json.dumps(["was asked to end (SIGTERM)", TERMINATED, 3]).encode()]) == (
        ["process 3 was asked to end (SIGTERM)"],
        TERMINATED,
    )
