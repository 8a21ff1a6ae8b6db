"""The self-test on one process, and what becomes of errors in it."""

import time

import jax
import pytest

from lockstep.errors import DisagreementError, HostTimeoutError
from lockstep.hosts import Hosts, MemoryClient
from lockstep.main.doctor import layout_rounds
from lockstep.main.doctor.self_test import self_test


def outcomes(monkeypatch, deadline_s=300.0):
    hosts = Hosts(MemoryClient.hub(1)[0])
    monkeypatch.setattr(layout_rounds, "current", lambda: hosts)
    findings, values = self_test(hosts, f"1,{jax.device_count()},1", time.monotonic() + deadline_s, all_layouts=False)
    return {each.name.rpartition(": ")[2]: each for each in findings}, values


@pytest.mark.slow
def test_it_passes_and_its_report_has_the_losses(monkeypatch):
    found, values = outcomes(monkeypatch)
    names = ["losses", "failure on one host", "layout auto", "layout training", "answers", "memory", "launches"]
    assert list(found) == names and {each.outcome for each in found.values()} == {"ok"}
    ((_, numbers),) = values.items()
    assert numbers["losses with samples"] == numbers["losses without samples"]
    assert len(set(numbers["losses with samples"])) == 5


def test_a_disagreement_is_a_finding_and_not_the_end(monkeypatch):
    def train(*_):
        raise DisagreementError("the processes of this job disagree at 'train_step' on 'jax version'.")

    monkeypatch.setattr("lockstep.main.doctor.self_test._train", train)
    found, _ = outcomes(monkeypatch)
    ((_, only),) = found.items()
    assert only.outcome == "fix" and "disagree at 'train_step'" in only.text and "Send this report" in only.fix


def test_a_lost_process_is_the_end(monkeypatch):
    def train(*_):
        raise HostTimeoutError("barrier timed out")

    monkeypatch.setattr("lockstep.main.doctor.self_test._train", train)
    with pytest.raises(HostTimeoutError, match="barrier timed out"):
        outcomes(monkeypatch)
