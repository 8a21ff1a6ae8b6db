"""A phase that every process goes through."""

import json

import pytest

from lockstep.errors import DisagreementError, HostError, HostTimeoutError, LaunchMismatchError
from lockstep.hosts import MAY_DIFFER, Hosts, Ledger, MemoryClient
from lockstep.hosts.phase import REMEMBERED
from tests.multiprocess.harness import run_threads


def _phase(hosts, errors, agreed, launches=None):
    """A phase in which each process may fail, and gives what it shares and what must agree."""
    for name in () if launches is None else launches[hosts.index]:
        hosts.ledger.record(name, f"digest of {name}")
    run = hosts.run_on_all if launches is None else hosts.launch_on_all
    try:
        with run("prepare") as phase:
            phase.agree({"programs": agreed[hosts.index]})
            phase.share({"free": hosts.index})
            if errors[hosts.index]:
                raise ValueError(errors[hosts.index])
    except HostError as error:
        return type(error).__name__, str(error), repr(error.__cause__), error.on_every_process
    return phase.shared


def test_a_phase_gives_every_process_what_all_share():
    assert run_threads(_phase, 3, [None] * 3, ["d"] * 3) == [[{"free": 0}, {"free": 1}, {"free": 2}]] * 3


def test_the_same_error_of_several_processes_is_named_once():
    errors = ["no prompts", "no prompts", "no prompts", None, "disk full", "no prompts"]
    results = run_threads(_phase, 6, errors, ["d"] * 6)
    text = "5 of 6 processes failed at 'prepare'. processes 0-2, 5: ValueError: no prompts; process 4: ValueError: disk"
    assert {(kind, message.startswith(text), everywhere) for kind, message, _, everywhere in results} == {
        ("PeerError", True, True)
    }
    assert [cause for *_, cause, _ in results][3:5] == ["None", "ValueError('disk full')"]


def test_values_that_differ_are_an_error_on_every_process():
    results = run_threads(_phase, 3, [None] * 3, ["a", "b", "b"])
    assert len(set(results)) == 1
    kind, text, _, everywhere = results[0]
    assert kind == "DisagreementError" and everywhere
    assert "disagree at 'prepare' on 'programs'. programs: processes 1, 2 (the majority): 'b'; process 0: 'a'" in text


def test_a_failure_comes_before_a_difference():
    results = run_threads(_phase, 2, ["no prompts", None], ["a", "b"])
    assert [kind for kind, *_ in results] == ["PeerError"] * 2


def test_a_phase_that_launches_compares_the_launches():
    results = run_threads(_phase, 3, [None] * 3, ["d"] * 3, ["rp", "rp", "rd"])
    assert len(set(results)) == 1
    kind, text, _, everywhere = results[0]
    assert kind == "LaunchMismatchError" and everywhere
    assert "Launch 1 was 'p' (digest of p) on processes 0, 1; 'd' (digest of d) on process 2." in text
    assert run_threads(_phase, 2, [None] * 2, ["d"] * 2, ["rp", "rp"]) == [[{"free": 0}, {"free": 1}]] * 2


def _compiles(hosts, debug):
    hosts.debug = debug
    for _ in range(2):
        with hosts.run_on_all("prepare") as phase:
            phase.agree({"decode: StableHLO": "s", f"decode: optimised HLO{MAY_DIFFER}": f"h{hosts.index // 2}"})


def test_a_value_that_may_differ_is_a_warning_of_the_leader(caplog):
    run_threads(_compiles, 3, False)
    (record,) = caplog.records  # once, whatever the number of rounds
    assert record.levelname == "WARNING"
    text = "decode: optimised HLO (may differ): processes 0, 1 (the majority): 'h0'; process 2: 'h1'. The compilers of"
    assert record.getMessage().startswith(text)


def test_a_value_that_may_differ_is_an_error_in_debug_mode():
    with pytest.raises(DisagreementError, match="disagree at 'prepare' on 'decode: optimised HLO"):
        run_threads(_compiles, 3, True)


def _waits(hosts):
    before = len(hosts._channel.heartbeat._waits)
    with hosts.launch_on_all("generate") as phase:
        phase.agree({"tokens": "t"})
        phase.share(1)
    return len(hosts._channel.heartbeat._waits) - before


def test_a_phase_waits_once():
    assert run_threads(_waits, 2) == [1, 1]


def test_what_the_others_share_is_not_known_before_the_end():
    with Hosts(*MemoryClient.hub(1)).run_on_all("prepare") as phase:
        with pytest.raises(AssertionError, match="is known when the phase has ended"):
            _ = phase.shared


def test_values_that_are_added_later_do_not_replace_earlier_ones():
    def body(hosts):
        with hosts.run_on_all("prepare") as phase:
            phase.agree({"data": str(hosts.index)})
            phase.agree({"config": "same"})

    with pytest.raises(DisagreementError, match="disagree at 'prepare' on 'data'"):
        run_threads(body, 2)


@pytest.mark.parametrize("post", [[None, None, 7, None], [None, None, None, None], [3, None, "", None]])
def test_a_digest_or_an_error_that_is_no_text_is_refused_on_every_process(post):
    def body(hosts):
        if hosts.index == 1:
            real = hosts.client.set
            hosts.client.set = lambda key, text: real(
                key, json.dumps(post).encode() if key.endswith("prepare#1/1") else text
            )
        with pytest.raises(HostError, match="what process 1 has posted"), hosts.run_on_all("prepare"):
            pass

    run_threads(body, 2)


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
