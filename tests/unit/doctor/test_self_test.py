"""The self-test on one process, and what becomes of errors in it."""

import dataclasses
import time

import jax
import pytest

from lockstep.doctor import layout_rounds
from lockstep.doctor.layout_rounds import LayoutResult
from lockstep.doctor.self_test import (
    TrainingRun,
    compare_bits,
    judge_bits,
    judge_failure,
    judge_layouts,
    judge_losses,
    judge_memory,
    self_test,
)
from lockstep.errors import DisagreementError, HostTimeoutError
from lockstep.hosts import Hosts, MemoryClient
from lockstep.placement import make_mesh

LAYOUTS = ["auto", "training"]
LOSSES = [value.hex() for value in (4.0, 3.5, 3.25, 3.0, 2.5)]
PLAIN = TrainingRun(losses=LOSSES, traces=1, used=100)
GOOD = LayoutResult(
    layout="auto", state="tested", rounds=2, traces=(1, 1, 1), seconds=4.0, gap=1e-6, answers=("a", "b", "c")
)


def test_equal_losses_are_ok():
    found = judge_losses("self-test", PLAIN, PLAIN, LAYOUTS)
    assert found.outcome == "ok"
    assert found.text.startswith("5 losses are equal bit for bit with and without samples (4.000 to 2.500)")


@pytest.mark.parametrize(
    ("step", "after"),
    [
        (0, "nothing was sampled"),
        (1, "the injected failure"),
        (2, "the round in layout auto"),
        (3, "the round in layout training"),
        (4, "the rounds in all layouts"),
    ],
)
def test_one_bit_of_a_loss_is_found_with_the_round_before_it(step, after):
    losses = list(LOSSES)
    losses[step] = (float.fromhex(LOSSES[step]) + 2**-50).hex()
    found = judge_losses("self-test", PLAIN, dataclasses.replace(PLAIN, losses=losses), LAYOUTS)
    assert found.outcome == "fix" and found.text.startswith(f"the loss of step {step + 1}, after {after}, is ")


def test_a_second_compilation_is_found():
    found = judge_losses("self-test", PLAIN, dataclasses.replace(PLAIN, traces=2), LAYOUTS)
    assert found.outcome == "fix" and "traced 2 times" in found.text


def test_a_failure_that_is_not_skipped_is_found():
    assert judge_failure("self-test", 0, 1, 8).text.startswith("the round was skipped on all 8 processes")
    assert judge_failure("self-test", 1, 0, 8).outcome == "fix"


def judged(**changed):
    first, *others = judge_layouts("self-test", [dataclasses.replace(GOOD, **changed)])
    assert not others
    return first.outcome, first.text


@pytest.mark.parametrize(
    ("changed", "outcome", "text"),
    [
        ({}, "ok", "2 rounds, the first in 4.0 s; log-probabilities are within 1e-06 of the training forward's"),
        (
            {"gap": 0.09, "mean_gap": 0.01, "mean_noise": 0.006},
            "ok",
            "0.01 in the mean, of which rounding explains 0.012",
        ),
        ({"gap": 0.03, "mean_gap": 0.01, "mean_noise": 0.004}, "warning", "within 0.03"),
        ({"gap": 0.03, "mean_gap": 0.01}, "warning", "within 0.03"),
        ({"gap": 2.0, "mean_gap": 0.01, "mean_noise": 0.01}, "fix", "within 2 of"),
        ({"gap": float("inf")}, "fix", "within inf of"),
        ({"rounds": 1}, "fix", "1 rounds of 2"),
        ({"traces": (1, 2)}, "fix", "traced [1, 2] times"),
        ({"state": "auto"}, "ok", "is the one that auto has chosen"),
        ({"state": "late"}, "warning", "not tested"),
    ],
    ids=str,
)
def test_a_layout_is_judged(changed, outcome, text):
    found = judged(**changed)
    assert found[0] == outcome and text in found[1]


def test_layouts_that_answer_differently_are_named():
    other = dataclasses.replace(GOOD, layout="training")
    *_, found = judge_layouts("self-test", [GOOD, other])
    assert found.text == "2 layouts give the same 3 answers from the same weights"
    other = dataclasses.replace(other, answers=("a", "x", "y"))
    *_, found = judge_layouts("self-test", [GOOD, other])
    assert found.outcome == "warning" and found.text == "other answers than in layout auto, of 3: 2 in training."


def test_memory_that_stays_in_use_is_found():
    assert judge_memory("self-test", PLAIN, PLAIN).outcome == "ok"
    assert judge_memory("self-test", PLAIN, dataclasses.replace(PLAIN, used=101)).outcome == "warning"
    assert (
        judge_memory("self-test", PLAIN, dataclasses.replace(PLAIN, used=None)).text == "not counted on these devices"
    )


def test_other_bits_are_counted_by_layout():
    layouts, same, name = ["training", "{tensor: 2}"], ["-0x1.8p+0", "-0x1.4p+1"], "self-test"
    found = judge_bits(name, layouts, [same, same], 0.0)
    assert found.outcome == "ok" and found.text.startswith("2 log-probabilities have the same bits in layouts training")
    for bits, gap, text in [
        (
            [same, [same[0], "-0x1.4000000000001p+1"]],
            0.0,
            ": 1 in layout {tensor: 2}; the training forward's differ by",
        ),
        ([same, same], 2**-20, "in layout training: none; the training forward's differ by up to 9.5e-07."),
    ]:
        found = judge_bits(name, layouts, bits, gap)
        assert found.outcome == "warning" and text in found.text


@pytest.mark.nightly  # that the bits are those of training is shown by tests/unit/engine/decoder
def test_exact_numerics_are_compared_on_these_devices():
    found = compare_bits(Hosts(MemoryClient.hub(1)[0]), "self-test", make_mesh("1,1,2", jax.devices()[:2]))
    assert found.outcome == "ok", found.text
    assert "have the same bits in layouts training, {tensor: 2} and in training" in found.text


def outcomes(monkeypatch, deadline_s=300.0):
    hosts = Hosts(MemoryClient.hub(1)[0])
    monkeypatch.setattr(layout_rounds, "current", lambda: hosts)
    findings, values = self_test(hosts, f"1,{jax.device_count()},1", time.monotonic() + deadline_s, all_layouts=False)
    return {each.name.rpartition(": ")[2]: each for each in findings}, values


@pytest.mark.nightly  # in make slow: the tests around it
def test_it_passes_and_its_report_has_losses_and_memory(monkeypatch):
    calls = iter(range(100))
    monkeypatch.setattr("lockstep.doctor.self_test.raw_stats", lambda: [{"bytes_reserved": next(calls)}])
    found, values = outcomes(monkeypatch)
    names = ["losses", "failure on one host", "layout auto", "layout training", "answers", "memory", "launches"]
    assert list(found) == names and {each.outcome for each in found.values()} == {"ok"}
    ((_, numbers),) = values.items()
    assert numbers["losses with samples"] == numbers["losses without samples"]
    assert len(set(numbers["losses with samples"])) == 5
    (memory,) = numbers["memory of each process"]
    assert list(memory) == ["before the first step", "after the first step", "after the last round"]
    before, step, last = (stats[0]["bytes_reserved"] for stats in memory.values())
    assert before < step < last


def test_a_disagreement_is_a_finding_and_not_the_end(monkeypatch):
    def train(*_):
        raise DisagreementError("the processes of this job disagree at 'train_step' on 'jax version'.")

    monkeypatch.setattr("lockstep.doctor.self_test._train", train)
    found, _ = outcomes(monkeypatch)
    ((_, only),) = found.items()
    assert only.outcome == "fix" and "disagree at 'train_step'" in only.text and "Send this report" in only.fix


def test_a_lost_process_is_the_end(monkeypatch):
    def train(*_):
        raise HostTimeoutError("barrier timed out")

    monkeypatch.setattr("lockstep.doctor.self_test._train", train)
    with pytest.raises(HostTimeoutError, match="barrier timed out"):
        outcomes(monkeypatch)
