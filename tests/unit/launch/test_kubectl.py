"""How kubectl is called; what its errors mean is in test_gke.py."""

from types import SimpleNamespace

import pytest

from lockstep.exits import REFUSED, UNREACHABLE
from lockstep.launch.backend import LaunchError
from lockstep.launch.kubectl import STOPPED, Kubectl, PodLogs, first_failure, not_started, pod_states, verdict


@pytest.fixture
def says(tmp_path, monkeypatch):
    """Make a kubectl of a shell script."""

    def make(script):
        (tmp_path / "kubectl").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "kubectl").chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    return make


def test_context_and_namespace_come_first():
    assert Kubectl(context="c", namespace="n").argv("get", "pods") == [
        "kubectl", "--context=c", "--namespace=n", "get", "pods",
    ]  # fmt: skip
    assert Kubectl().argv("get", "pods") == ["kubectl", "get", "pods"]


def test_nothing_is_an_empty_object(says):
    says("true")
    assert Kubectl().get("jobset", "x") == {}
    says("echo Update available; echo '{}'")
    with pytest.raises(LaunchError, match="what kubectl prints is not JSON: .*Run it by hand"):
        Kubectl().get("jobset", "x")


@pytest.mark.parametrize(
    ("text", "code", "advice"),
    [
        ("executable gke-gcloud-auth-plugin not found", REFUSED, "gcloud components install gke-gcloud-auth-plugin"),
        ("error: You must be logged in to the server (Unauthorized)", REFUSED, "gcloud auth login"),
        ("something new", REFUSED, "kubectl get failed: something new"),
    ],
)
def test_an_error_is_explained(says, text, code, advice):
    says(f"echo '{text}' >&2; exit 1")
    with pytest.raises(LaunchError, match=advice) as caught:
        Kubectl().get("jobset", "x")
    assert caught.value.code == code


def test_a_cluster_that_does_not_answer(says, monkeypatch):
    says("exec sleep 20")
    monkeypatch.setattr("lockstep.launch.kubectl.CALL_S", 0.2)
    with pytest.raises(LaunchError, match="did not answer within 0.2 s") as caught:
        Kubectl().get("jobset", "x")
    assert caught.value.code == UNREACHABLE


def pod(slice_index=0, index=0, attempt=0, phase="Running", **status):
    labels = {"jobset.sigs.k8s.io/job-index": str(slice_index), "jobset.sigs.k8s.io/restart-attempt": str(attempt)}
    name = f"job-slice-{slice_index}-{index}-{attempt}"
    annotations = {"batch.kubernetes.io/job-completion-index": str(index)}
    metadata = {"name": name, "uid": name, "labels": labels, "annotations": annotations}
    return {"metadata": metadata, "status": {"phase": phase, **status}}


def ended(code, at, **place):
    state = {"terminated": {"exitCode": code, "finishedAt": f"2026-11-23T07:00:{at:02}Z"}}
    return pod(phase="Failed" if code else "Succeeded", containerStatuses=[{"state": state}], **place)


def states(*pods):
    return pod_states({"items": pods}, hosts=2)


def test_processes_are_numbered_slice_by_slice():
    found = states(pod(1, 1), pod(0, 1), pod(1, 0, attempt=1), pod(0, 0))
    assert [(each.attempt, each.process) for each in found] == [(1, 0), (1, 1), (1, 3), (2, 2)]


def test_why_a_pod_does_not_start():
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}
    (waits,) = states(pod(phase="Pending", conditions=[condition]))
    assert str(waits) == "Pending (Unschedulable: 0/3 nodes)" and waits.running and not waits.started
    waiting = {"waiting": {"reason": "ErrImagePull"}}
    (waits,) = states(pod(phase="Pending", containerStatuses=[{"state": waiting}]))
    assert str(waits) == "Pending (ErrImagePull)"


def test_who_is_missing_is_named_with_what_it_waits_for():
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}
    pods = states(pod(), pod(0, 1), pod(1, 0, phase="Pending", conditions=[condition]))
    missing = ["process 2 (job-slice-1-0-0: Pending (Unschedulable: 0/3 nodes))", "process 3 (no pod yet)"]
    assert not_started(pods, 4, None) == missing
    installing = ["process 1 (job-slice-0-1-0: installing)", *missing]
    assert not_started(pods, 4, {"job-slice-0-0-0"}) == installing
    again = states(pod(), pod(0, 1), pod(0, 0, attempt=1))
    assert not_started(again, 2, None) == ["process 1 (no pod yet)"]


@pytest.mark.parametrize(
    ("pods", "process"),
    [
        ([ended(85, 1, index=0), ended(3, 9, index=1)], 1),
        ([ended(7, 5, index=0), ended(3, 2, index=1), ended(0, 1, slice_index=1)], 1),
        ([ended(3, 1, index=0), ended(143, 1, attempt=1, index=1)], 1),
        ([ended(143, 2, index=0), ended(85, 1, index=1)], 1),
        ([ended(93, 1, index=0), ended(3, 2, index=1)], 1),
        ([ended(85, 1, index=0), ended(93, 2, index=1)], 1),
    ],
    ids=["consequence", "time", "last attempt", "only consequences", "a fault of it", "a fault"],
)
def test_the_first_failure(pods, process):
    assert first_failure(states(*pods)).process == process


def test_a_pod_whose_log_has_an_error_of_its_own_comes_before_one_that_was_told_and_ended_before(tmp_path):
    logs = PodLogs(SimpleNamespace(directory=tmp_path), None, None)
    told = states(ended(1, 1, index=0), ended(1, 2, index=1))
    logs._seen = dict(enumerate(told))
    assert logs.first_failure().process == 0
    log = tmp_path / f"attempt-{told[0].attempt}" / "worker-1.log"
    log.parent.mkdir()
    log.write_text("Traceback (most recent call last):\nKeyError: 'question'\n")
    assert logs.first_failure().process == 1


def test_the_verdict():
    failed = states(ended(3, 1))
    assert verdict({}, failed) is None and verdict({"status": {}}, failed) is None
    assert verdict({"status": {"terminalState": "Completed"}}, failed) == 0
    assert verdict({"status": {"terminalState": "Failed"}}, failed) == 3
    assert verdict({"status": {"terminalState": "Failed"}}, []) == 87
    assert verdict({"status": {"terminalState": STOPPED}}, failed) == 143
