"""Waiting for a pod."""

import pytest

from lockstep.exits import UNAVAILABLE
from lockstep.launch.backend import LaunchError
from lockstep.launch.gcloud import Gcloud
from lockstep.launch.pod import LOST_POLLS, Wait
from lockstep.launch.tool import ToolError


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
