"""What a process prints when others have announced that they end; the rest of the file needs real processes."""

import json
import socket
import subprocess
import sys
import threading

import pytest

from lockstep.exits import EXIT_CODES, PEER_FAILED, TERMINATED
from lockstep.hosts import Hosts, MemoryClient, liveness, peers
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


@pytest.mark.parametrize("code", [0, -1, 7, 256, "0", None, True, 1.5])
def test_a_code_that_is_none_of_ours_is_a_failure(code) -> None:
    """Whoever reaches the service can post: 0 ended a job that was cut off as one that was done."""
    reasons, found = _summarize([json.dumps(["failed: boom", code, 0]).encode()])
    assert len(reasons) == 1 and found != 0 and found in EXIT_CODES


@pytest.mark.parametrize("value", [b"", b"\xff", b"[]", b"{}", b'"a"', b"[1, 2, 3]", b"[null, 85, 0]"])
def test_an_announcement_that_cannot_be_read_is_a_failure(value) -> None:
    assert _summarize([value]) == (["process -1 posted an announcement that cannot be read"], PEER_FAILED)


def test_the_text_of_a_peer_does_not_reach_a_terminal_raw() -> None:
    text = "failed: \x1b]0;title\x07\x1b[2J\rboom\nsecond line\x9b31m\u202e"
    ((reason,), _) = _summarize([json.dumps([text, PEER_FAILED, 1]).encode()])
    assert reason == r"process 1 failed: \x1b]0;title\x07\x1b[2J\rboom" + "\nsecond line\\x9b31m\\u202e"


def test_when_all_fail_the_first_wakes_all_and_a_few_say_why(monkeypatch) -> None:
    """Each woke all others: a million requests at 1,024 processes."""
    clients, sets = MemoryClient.hub(40), list[str]()
    for client in clients[::-1]:
        post = client.set
        monkeypatch.setattr(client, "set", lambda key, value, post=post: (sets.append(key), post(key, value)))
        if client.task:  # it waits for the others to leave
            peers.announce_exit(client, "PeerError")
    peers.announce_exit(clients[0], "OSError: disk full")
    assert sorted(sets)[: len(clients)] == sorted(f"{peers.WAKE_UPS}/{task}" for task in range(len(clients)))
    assert len(sets) == 3 * len(clients), "the wake-ups, and a reason and a departure of each"
    reasons, _ = _summarize(clients[1].get_dir(peers.ANNOUNCEMENTS).values())
    assert set(reasons) == {"processes 24-39 failed: PeerError", "process 0 failed: OSError: disk full"}
    assert peers.failure_is_announced(clients[3])


def test_who_ends_for_a_reason_that_others_have_told_is_not_ended_by_them(monkeypatch: pytest.MonkeyPatch) -> None:
    client, other = MemoryClient.hub(2)
    ended: list[int] = []
    monkeypatch.setattr(peers, "GRACE_S", 0.0)
    monkeypatch.setattr(peers, "ANNOUNCED", 1)
    monkeypatch.setattr(peers, "end_process", ended.append)
    peers.announce_exit(other, "PeerError")
    peers._watch(Hosts(client), threading.Event(), pytest.fail)
    assert ended == [PEER_FAILED]
    client.increment(f"{peers.COUNTS}/all")
    client.set(f"{peers.UNTOLD}/{client.task}", b"")
    peers._watch(Hosts(client), threading.Event(), pytest.fail)
    assert ended == [PEER_FAILED]


def test_nothing_ends_a_process_before_it_is_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    client, other = MemoryClient.hub(2)
    events: list[object] = []
    get, get_dir = client.get, client.get_dir
    waiting = threading.Event()

    def wait(key: str, timeout_s: float) -> bytes:
        waiting.set()
        value = get(key, timeout_s)
        events.append("woken")
        return value

    monkeypatch.setattr(client, "get", wait)
    monkeypatch.setattr(client, "get_dir", lambda prefix: (events.append("read"), get_dir(prefix))[1])
    monkeypatch.setattr(peers, "GRACE_S", 0.0)
    monkeypatch.setattr(peers, "end_process", events.append)
    watch = threading.Thread(target=peers._watch, args=(Hosts(client), threading.Event(), events.append))
    watch.start()
    assert waiting.wait(60)
    peers.announce_exit(other, "PeerError")
    watch.join(60)
    assert events[:2] == ["woken", "read"] and events[-1] == PEER_FAILED


SCRIPT = """
import faulthandler, os, sys, threading
from lockstep.hosts.peers import on_abort

faulthandler.enable()
def last_word():
    print("a last word", flush=True)
    return sys.argv[1] == "peer"

restore = on_abort(last_word)
if sys.argv[1] == "restored":
    restore()
thread = threading.Thread(target=os.abort)
thread.start()
thread.join()
"""


@pytest.mark.parametrize(
    ("why", "code", "said", "stacks"),
    [
        ("peer", 85, True, False),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (("own", -6, True, True), ("restored", -6, False, True))
        ),
    ],
)
def test_an_abort_because_of_a_peer_has_a_last_word_and_its_code(why, code, said, stacks) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT, why], capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr
    assert ("a last word" in done.stdout) == said
    assert ("Fatal Python error: Aborted" in done.stderr) == stacks, "the handler of before"


def test_a_process_that_was_silent_before_the_service_ended_is_named_first(monkeypatch, capsys):
    """JAX ends the process with the service because of it, and the others may hear of that end alone."""
    client = MemoryClient.hub(4)[3]
    connection = liveness.Connection(client, threading.Event())
    connection._silent.hear(["process 1 (2 s)"], 3600.0)
    connection._silent.hear(["process 1 (2 s)", "process 2 (40 s)"], 0.0)
    connection._silent.hear(["process 2 (41 s)"], 0.0)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    monkeypatch.setattr(liveness, "service_address", lambda: address)
    monkeypatch.setattr(peers, "service_address", lambda: address)
    monkeypatch.setattr(peers, "_ending", threading.Lock())
    ends: list[int] = []
    monkeypatch.setattr(peers, "end_process", ends.append)
    assert connection.missing() == "process 2 (41 s), process 0, which runs the coordination service"
    capsys.readouterr()
    peers._end_without_service(Hosts(client), threading.Event(), connection.unheard, liveness.DIED)
    assert "Missing: process 2 (41 s), process 0. This process" in capsys.readouterr().err and ends == [PEER_FAILED]
