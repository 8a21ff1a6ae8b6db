"""Slices that are asked for one by one: some may be missing."""

import pytest

from lockstep.exits import REFUSED, UNREACHABLE
from lockstep.launch.backend import LaunchError
from lockstep.launch.elastic_pod import ElasticPod
from lockstep.launch.pod import Machine, Wait


class Part:
    """A slice of one machine: after so many looks it can be used; never with None; an error is raised at once."""

    def __init__(self, name, looks, ours=True):
        self.name, self.looks, self.usable, self.withdrawn, self.ours = name, looks, False, False, ours

    def ensure(self, wait):
        if isinstance(self.looks, Exception):
            raise self.looks

        def look():
            self.looks = None if self.looks is None else self.looks - 1
            return "WAITING", self.looks is not None and self.looks < 0

        try:
            wait.until_usable(self.name, look, undone=", and is withdrawn")
        except BaseException:
            self.withdrawn = True
            raise
        self.usable = True

    def machines(self):
        return [Machine(name=self.name, slice_id=0, address="a", internal_address="b", host_key_alias="")]

    def lost(self):
        return None if self.usable else f"{self.name} is gone"

    def made_here(self):
        return self.ours

    def delete(self, wait):
        if isinstance(self.looks, Exception):
            raise self.looks
        wait.say(f"{self.name}: deleted")

    def delete_commands(self):
        return [["delete", self.name]]

    def login_commands(self, machines):
        return [[machine.name for machine in machines]]


def ensure(*looks, least=1, more_s=0.05, say=lambda text: None, timeout_s=60):
    parts = [Part(f"pod-{i}", each) for i, each in enumerate(looks)]
    pod = ElasticPod(parts, least, 1, more_s)
    pod.ensure(Wait(say=say, timeout_s=timeout_s, poll_s=0.001))
    return parts, pod


REFUSAL = LaunchError("Quota exceeded\nhint", REFUSED)


def delete(*parts):
    said = []
    pod = ElasticPod(parts, 1, 1, 0)
    assert pod.made_here()
    pod.delete(Wait(say=said.append, timeout_s=60, poll_s=0.001))
    return said


def test_a_slice_that_somebody_else_made_is_left_alone():
    assert delete(Part("pod-0", 0, ours=False), Part("pod-1", 0)) == [
        "pod-0 was not made by this launcher, or is gone, and is left as it is. To delete it:\n  delete pod-0",
        "pod-1: deleted",
    ]


def test_a_slice_that_cannot_be_deleted_is_named_after_the_others_were_deleted():
    last = Part("pod-2", 0)
    last.delete = lambda wait: said.append("pod-2")
    said = []
    failing = [Part(f"pod-{i}", LaunchError(f"no answer of {i}", code)) for i, code in ((0, UNREACHABLE), (1, REFUSED))]
    with pytest.raises(LaunchError, match="no answer of 0\nno answer of 1") as caught:
        delete(*failing, last)
    assert caught.value.code == UNREACHABLE and said == ["pod-2"]


def test_slices_that_do_not_come_are_withdrawn_and_those_that_are_there_are_numbered_without_a_gap():
    said = []
    (missing, there, last), pod = ensure(None, 3, 0, say=said.append)
    assert missing.withdrawn and there.usable and last.usable
    assert [(machine.name, machine.slice_id) for machine in pod.machines()] == [("pod-1", 0), ("pod-2", 1)]
    assert pod.login_commands(pod.machines()) == [["pod-1"], ["pod-2"]]
    assert said[-1].endswith(
        "going on with 2 of 3 slices, the next start asks for 3 again: pod-0 has not come, and is withdrawn"
    )
    # What was given up is not looked for; what is in use is.
    assert pod.lost() is None
    last.usable = False
    assert pod.lost() == "pod-2 is gone"
    # Another process, which has not asked for them, finds those that are there.
    assert [machine.name for machine in ElasticPod([missing, there, last], 1, 1, 0).machines()] == ["pod-1"]


def test_all_slices_are_used_where_they_come_in_time():
    _, pod = ensure(20, 0, more_s=60)
    assert [machine.name for machine in pod.machines()] == ["pod-0", "pod-1"]


def test_one_that_google_refuses_is_done_without_where_enough_are_left():
    said = []
    _, pod = ensure(0, REFUSAL, say=said.append)
    assert len(pod.machines()) == 1 and "with 1 of 2 slices" in said[-1] and said[-1].endswith(": Quota exceeded")


@pytest.mark.parametrize("looks", [(None, REFUSAL), (REFUSAL, None)])
def test_too_few_slices_end_the_wait_with_the_reason_and_leave_no_request(looks):
    parts = []

    class Kept(Part):
        def __init__(self, *words):
            super().__init__(*words)
            parts.append(self)

    pod = ElasticPod([Kept(f"pod-{i}", each) for i, each in enumerate(looks)], 2, 1, 60)
    with pytest.raises(LaunchError, match="Quota exceeded"):
        pod.ensure(Wait(say=lambda text: None, timeout_s=60, poll_s=0.001))
    assert [part.withdrawn for part in parts] == [each is None for each in looks]


def test_ctrl_c_withdraws_every_request(monkeypatch):
    parts = [Part("pod-0", None), Part("pod-1", None)]
    pod = ElasticPod(parts, 1, 1, 60)

    def interrupted(asked, wait):
        raise KeyboardInterrupt

    monkeypatch.setattr(pod, "_await", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pod.ensure(Wait(say=lambda text: None, timeout_s=60, poll_s=0.001))
    assert all(part.withdrawn for part in parts)


def test_a_job_that_somebody_ends_withdraws_every_request():
    parts = [Part("pod-0", None), Part("pod-1", None)]
    given_up = []
    wait = Wait(say=given_up.append, timeout_s=60, poll_s=0.001, given_up=lambda: len(given_up) == 2)
    with pytest.raises(LaunchError, match="pod-0 has not come, and is withdrawn"):
        ElasticPod(parts, 1, 1, 60).ensure(wait)
    assert all(part.withdrawn for part in parts)
