"""Waiting for a pod, and what is the same of both ways to rent one. On a fake Google Cloud of files."""

import dataclasses
import shlex

import pytest

from lockstep.exits import REFUSED, UNAVAILABLE
from lockstep.launch.backend import LaunchError
from lockstep.launch.gcloud import Gcloud
from lockstep.launch.mig import Mig
from lockstep.launch.pod import LOST_POLLS, Wait
from lockstep.launch.slices import slices
from lockstep.launch.tool import ToolError
from lockstep.launch.tpu_vm import TpuVm


def ensure(pod, timeout_s=60.0):
    """What was shown while it was made."""
    said = []
    pod.ensure(Wait(say=said.append, timeout_s=timeout_s, poll_s=0.01))
    return [line.partition(" after ")[0] for line in said]


def replies(*texts):
    """A look that raises the errors of gcloud with these texts, then says that the pod is there."""
    left = list(texts)

    def look():
        if left:
            raise Gcloud(zone="z").error(["gcloud", "describe", "pod"], left.pop(0))
        return "READY", True

    return look


def test_a_wait_survives_some_failed_polls_and_no_refusal():
    said = []
    wait = Wait(say=said.append, timeout_s=60, poll_s=0)
    assert wait.until("pod", replies(*["Max retries exceeded"] * (LOST_POLLS - 1)))
    assert "no answer from Google" in said[0] and said[1:] == ["pod: READY"]
    with pytest.raises(ToolError, match="could not be reached"):
        wait.until("pod", replies(*["Max retries exceeded"] * LOST_POLLS))
    with pytest.raises(ToolError, match="there is nothing of this name"):
        wait.until("pod", replies("NOT_FOUND"))


def test_each_state_is_shown_once_and_the_limit_is_named():
    said = []
    with pytest.raises(LaunchError, match=r"pod could not be used within 0 s; it was deleted\. .*--wait_s") as caught:
        Wait(say=said.append, timeout_s=0, poll_s=0).until_usable(
            "pod", lambda: ("WAITING", False), undone="; it was deleted"
        )
    assert caught.value.code == UNAVAILABLE and said == ["pod: WAITING"]


@pytest.fixture(params=["tpu-vm", "mig"])
def pod(request, google_cloud):
    """A pod that does not come soon."""
    google_cloud.queue(["WAITING_FOR_RESOURCES"] * 1000)
    values = {"gcloud": Gcloud(project="p", zone="us-east5-a"), "name": "pod", "slice": slices()["v6e-16"]}
    return TpuVm(**values) if request.param == "tpu-vm" else Mig(**values, machine_type="ct6e-standard-4t")


def waits(text):
    return "WAITING" in text or "PENDING" in text


def test_nothing_there_and_no_kind_given(pod):
    with pytest.raises(LaunchError, match=r"no usable \w+ named pod in zone us-east5-a.*Give --tpu_type") as caught:
        ensure(dataclasses.replace(pod, slice=None))
    assert caught.value.code == REFUSED


def test_a_wait_that_is_too_long_withdraws_what_was_asked_for(pod, google_cloud):
    with pytest.raises(LaunchError, match=f"could not be used within 0 s{pod.undone}") as caught:
        ensure(pod, timeout_s=0.0)
    assert caught.value.code == UNAVAILABLE and not google_cloud.costs()


def test_a_job_that_somebody_ends_withdraws_what_was_asked_for(pod, google_cloud):
    with pytest.raises(LaunchError, match=pod.undone):
        pod.ensure(Wait(say=lambda text: None, timeout_s=60, poll_s=0.01, given_up=lambda: True))
    assert google_cloud.calls(" create ") and not google_cloud.costs()


def test_what_cannot_be_withdrawn_is_told_with_the_commands(pod, google_cloud):
    command, said = shlex.join(pod.delete_commands()[0]), []
    google_cloud.reply(command.partition("gcloud compute ")[2][:40], "ERROR: Max retries exceeded")
    with pytest.raises(LaunchError, match="could not be used within 0 s"):
        pod.ensure(Wait(say=said.append, timeout_s=0.0, poll_s=0.01))
    assert "pod could not be deleted, and may cost money" in said[-1] and f"\n  {command}" in said[-1]


def test_ctrl_c_in_the_wait_withdraws_what_was_asked_for(pod, google_cloud):
    def say(text):
        if waits(text):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pod.ensure(Wait(say=say, timeout_s=60, poll_s=0.01))
    assert not google_cloud.costs()


@pytest.mark.parametrize(
    "error",
    [
        KeyboardInterrupt(),
        Gcloud(zone="z").error(["gcloud"], "Command killed by keyboard interrupt"),
        Gcloud(zone="z").error(["gcloud"], "Max retries exceeded"),
    ],
    ids=["here", "gcloud", "no answer"],
)
def test_ctrl_c_as_it_is_made_withdraws_it(pod, google_cloud, monkeypatch, error):
    run = Gcloud.run

    def interrupted(self, command, *words):
        printed = run(self, command, *words)
        if "create" in command:
            raise error
        return printed

    monkeypatch.setattr(Gcloud, "run", interrupted)
    with pytest.raises(type(error)):
        ensure(pod)
    assert google_cloud.calls(" create ") and not google_cloud.costs()


def test_a_login_that_expires_in_the_wait_leaves_nothing_behind(pod, google_cloud):
    def say(text):
        if waits(text):
            google_cloud.reply("describe pod", "ERROR: There was a problem refreshing your current auth tokens: x")

    with pytest.raises(ToolError, match="gcloud auth login"):
        pod.ensure(Wait(say=say, timeout_s=60, poll_s=0.01))
    assert not google_cloud.costs()


def test_a_second_ctrl_c_says_what_may_cost_money(pod, monkeypatch):
    run, said = Gcloud.run, []

    def say(text):
        said.append(text)
        if waits(text):
            raise KeyboardInterrupt

    def interrupted(self, command, *words):
        if "delete" in command:
            raise KeyboardInterrupt
        return run(self, command, *words)

    monkeypatch.setattr(Gcloud, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pod.ensure(Wait(say=say, timeout_s=60, poll_s=0.01))
    assert "pod could not be deleted, and may cost money: interrupted" in said[-1]
