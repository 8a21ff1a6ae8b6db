"""What every process launched, compared between threads; between processes: tests/faults."""

import pytest

from lockstep.errors import HostTimeoutError, LaunchMismatchError
from lockstep.hosts import Hosts, Ledger
from lockstep.hosts.ledger import REMEMBERED
from tests.multiprocess.harness import run_threads


def filled(names):
    ledger = Ledger()
    for name in names:
        ledger.record(name, f"digest of {name}")
    return ledger


def test_the_hash_depends_on_names_digests_and_order():
    first, other, same = filled("aab"), filled("aba"), filled("aab")
    assert str(first) == str(same) != str(other) and first.state == same.state != other.state
    assert first.launches == ["a", "a", "b"] and str(first).startswith("3 launches, ")
    assert first.last(2) == [(1, "a", "digest of a"), (2, "b", "digest of b")]
    same.record("c", "x")
    first.record("c", "y")
    assert first.state != same.state


def test_a_long_run_needs_no_more_memory():
    ledger = filled(["step"] * (REMEMBERED + 5))
    assert len(ledger.launches) == REMEMBERED and ledger.count == REMEMBERED + 5
    assert ledger.last()[0][0] == 5


def launched(hosts: Hosts, names_of):
    for name in names_of[hosts.index]:
        hosts.ledger.record(name, f"digest of {name}")
    try:
        with hosts.launch_on_all("now"):
            pass
    except LaunchMismatchError as error:
        return str(error)


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["rpd", "rpd", "rdp"], "Launch 1 was 'p' (digest of p) on processes 0, 1; 'd' (digest of d) on process 2."),
        (["rp", "r", "r"], "Launch 1 was 'p' (digest of p) on process 0; nothing on processes 1, 2."),
        (["a", "b", "c"], "Launch 0 was 'a' (digest of a) on process 0; 'b' (digest of b) on process 1; 'c' "),
        (["a" + "s" * REMEMBERED, "b" + "s" * REMEMBERED], "They differ before launch 1, which is no longer remembere"),
    ],
)
def test_a_difference_is_named_by_index_processes_and_programs(names, text):
    texts = run_threads(launched, len(names), names)
    assert len(set(texts)) == 1
    assert text in texts[0], texts[0]


@pytest.mark.parametrize("at", [0, 63, 64, 2999, 3999])
def test_a_difference_long_ago_is_found_by_hashes_and_few_launches_are_sent(at):
    def body(hosts):
        longest = 0
        post = hosts.client.set

        def note(key, text):
            nonlocal longest
            longest = max(longest, len(text))
            post(key, text)

        hosts.client.set = note
        names = [f"step {number}" for number in range(4000)]
        if hosts.index == 1:
            names[at] = "evaluation"
        return launched(hosts, {hosts.index: names}), longest

    results = run_threads(body, 3)
    (text,) = {text for text, _ in results}
    assert f"Launch {at} was 'step {at}' (digest of st) on processes 0, 2; 'evaluation' (digest of ev) on proc" in text
    assert max(longest for _, longest in results) < 64 * 50


def test_the_same_launches_agree():
    assert run_threads(launched, 3, ["rpd"] * 3) == [None] * 3


def in_debug_mode(hosts: Hosts, names_of):
    hosts.timeout_s, hosts.debug = 0.3, True
    made = []
    try:
        for name in names_of[hosts.index]:
            hosts.ledger.record(name, f"digest of {name}")
            made.append(name)
    except (LaunchMismatchError, HostTimeoutError) as error:
        return made, f"{type(error).__name__}: {error}"
    return made, None


def test_debug_mode_prevents_the_launch():
    for made, text in run_threads(in_debug_mode, 2, ["rpd", "rdp"]):
        assert made == ["r"]
        assert "LaunchMismatchError" in text and "Launch 1 was 'p' (digest of p) on process 0; 'd' " in text


def test_debug_mode_names_who_does_not_launch_at_all():
    (made, text), (_, nothing) = run_threads(in_debug_mode, 2, ["rp", "r"])
    assert made == ["r"] and nothing is None
    assert text.startswith("HostTimeoutError: barrier 'lockstep/launch/1' timed out") and "Missing: process 1" in text
