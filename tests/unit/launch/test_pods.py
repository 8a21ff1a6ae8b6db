"""What Kubernetes says of pods, and what their ends mean."""

import pytest

from lockstep.launch.pods import STOPPED, first_failure, not_started, pod_states, verdict


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
        ([ended(85, 1, index=0), ended(137, 2, index=1), ended(3, 3, slice_index=1)], 2),
        ([ended(85, 2, index=0), ended(137, 2, index=1)], 1),
    ],
    ids=["consequence", "time", "last attempt", "only consequences", "fault of it", "fault", "end by force", "second"],
)
def test_the_first_failure(pods, process):
    assert first_failure(states(*pods)).process == process


def test_the_verdict():
    failed = states(ended(3, 1))
    assert verdict({}, failed) is None and verdict({"status": {}}, failed) is None
    assert verdict({"status": {"terminalState": "Completed"}}, failed) == 0
    assert verdict({"status": {"terminalState": "Failed"}}, failed) == 3
    assert verdict({"status": {"terminalState": "Failed"}}, []) == 87
    assert verdict({"status": {"terminalState": STOPPED}}, failed) == 143
