"""A phase that every process goes through."""

import json

import pytest

from lockstep.errors import DisagreementError, HostError
from lockstep.hosts import MAY_DIFFER, Hosts, MemoryClient
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
