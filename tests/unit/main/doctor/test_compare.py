"""Hosts that differ are named, with what they have."""

import copy

import pytest

from lockstep.main.doctor.compare import compare, compare_clocks, host_facts, who_has_what


def facts(count=4):
    return [copy.deepcopy(host_facts("digest")) for _ in range(count)]


def test_hosts_that_are_the_same_are_one_line():
    (found,) = compare(facts())
    assert found.outcome == "ok" and found.text.startswith("4 processes on 1 machine; ")


@pytest.mark.parametrize(
    ("kind", "name", "outcome"),
    [
        ("must", "jax version", "fix"),
        ("must", "configuration", "fix"),
        ("must", "device kind", "fix"),
        ("must", "LIBTPU_INIT_ARGS --xla_tpu_x", "fix"),
        ("should", "variable HF_HUB_OFFLINE", "warning"),
    ],
)
def test_a_host_that_differs_is_named(kind, name, outcome):
    hosts = facts()
    hosts[2][kind][name] = "another"
    (found,) = compare(hosts)
    assert found.outcome == outcome
    assert found.text.startswith(f"{name}: processes 0, 1, 3 (the majority): ") and "process 2: 'another'" in found.text


def test_a_flag_of_one_host_is_seen_in_its_environment(monkeypatch):
    hosts = facts(1)
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_y=2")
    (found,) = compare([*hosts, *facts(1)])
    assert found.text == "LIBTPU_INIT_ARGS --xla_tpu_y: process 0: 'not set'; process 1: '2'."


def test_long_values_are_shortened():
    assert who_has_what(["a" * 200, "b"]) == f"process 0: '{'a' * 97}...'; process 1: 'b'"


@pytest.mark.parametrize(
    ("times", "outcome", "text"),
    [
        ([100.0, 100.2], "ok", "within 200 ms of each other"),
        ([100.0, 100.1, 103.0], "warning", "they differ by 3.0 s: process 2 by +2.9 s."),
        ([100.0, 100.0, -500.0], "fix", "they differ by 600.0 s: process 2 by -600.0 s."),
    ],
)
def test_clocks(times, outcome, text):
    found = compare_clocks(times)
    assert (found.outcome, found.text) == (outcome, text)
