"""How kubectl is called, and the logs of pods; what its errors mean is in test_gke.py."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from lockstep.exits import UNREACHABLE
from lockstep.launch.backend import LaunchError
from lockstep.launch.kubectl import TOOL, KeptLog, Kubectl, PodLogs
from tests.unit.launch.test_pods import ended, pod, states


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


def test_a_cluster_that_does_not_answer(says, monkeypatch):
    says("exec sleep 20")
    monkeypatch.setattr("lockstep.launch.kubectl.TOOL", dataclasses.replace(TOOL, limit_s=0.2))
    with pytest.raises(LaunchError, match="did not answer within 0.2 s") as caught:
        Kubectl().get("jobset", "x")
    assert caught.value.code == UNREACHABLE


def test_a_pod_whose_log_has_an_error_of_its_own_comes_before_one_that_was_told_and_ended_before(tmp_path):
    logs = PodLogs(SimpleNamespace(directory=tmp_path), None, None)
    told = states(ended(1, 1, index=0), ended(1, 2, index=1))
    logs._seen = dict(enumerate(told))
    assert logs.first_failure().process == 0
    log = tmp_path / f"attempt-{told[0].attempt}" / "worker-1.log"
    log.parent.mkdir()
    log.write_text("Traceback (most recent call last):\nKeyError: 'question'\n")
    assert logs.first_failure().process == 1


TIMES = [f"2026-11-27T07:00:0{i}.5Z" for i in range(4)]


def test_a_kept_log_goes_on_after_its_last_line_and_has_one_writer(tmp_path):
    path = tmp_path / "attempt-1" / "worker-0.log"
    with KeptLog(path) as first:
        first.write(b"one", TIMES[0])
        with KeptLog(path) as second:
            assert (second.text, second.last) == (b"one\n", TIMES[0])
            second.write(b"shown elsewhere", TIMES[1])
        first.write(b"two", TIMES[1])
    with KeptLog(path) as third:
        assert (third.text, third.last) == (b"one\ntwo\n", TIMES[1])
        third.write(b"three", TIMES[2])
    assert path.read_bytes() == b"one\ntwo\nthree\n"


def test_what_a_cluster_has_forgotten_stays_in_the_kept_log(says, tmp_path):
    """The kubelet keeps the last 10 MiB of a container's log alone."""
    job = SimpleNamespace(directory=tmp_path, log=lambda attempt, process: tmp_path / "worker-0.log")
    with KeptLog(tmp_path / "worker-0.log") as kept:
        for number in (0, 1):
            kept.write(f"line {number}".encode(), TIMES[number])
    says("".join(f"echo '{TIMES[number]} line {number}'\n" for number in (1, 2)))
    shown, (one,) = [], states(pod())
    logs = PodLogs(job, Kubectl(), SimpleNamespace(line=lambda prefix, text: shown.append(text)))
    logs.follow(one)
    logs.join()
    assert shown == [b"line 0", b"line 1", b"line 2"]
    assert (tmp_path / "worker-0.log").read_bytes() == b"line 0\nline 1\nline 2\n"


def test_ctrl_c_at_a_terminal_is_not_for_kubectl(says, tmp_path):
    """A terminal sends it to the whole group of processes."""
    says(f"echo $$ > {tmp_path}/pid; sleep 1; echo '{{}}'")
    text = "from lockstep.launch.kubectl import Kubectl; print('began', flush=True); print(Kubectl().get('pods', 'x'))"
    text = f"import signal; signal.signal(signal.SIGINT, lambda *_: print('told', flush=True)); {text}"
    child = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True, start_new_session=True)
    while not (tmp_path / "pid").exists():
        time.sleep(0.01)
    os.killpg(child.pid, signal.SIGINT)
    assert child.communicate(timeout=60)[0].split() == ["began", "told", "{}"]
