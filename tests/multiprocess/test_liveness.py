"""Processes that are gone while the others wait for a device, as on a pod: no collective of gloo fails."""

import os
import shutil
import subprocess
import time
import uuid
from pathlib import Path

import pytest

from lockstep import launch
from tests.multiprocess.harness import POOL, run_unattended

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]
SCENARIO = ["python", "-m", "tests.multiprocess.scenarios"]


def test_a_killed_process_is_named_long_before_jax_misses_it():
    ends = run_unattended([*SCENARIO, "vanish", "1", "kill", "100"], processes=3, timeout_s=90)
    assert [end.code for end in ends] == [85, -9, 85], [end.log for end in ends]
    for survivor in (0, 2):
        log = ends[survivor].log
        assert f"process {survivor} ends because process 1 has died: its connection to process 0 has ended" in log
        assert "last phase 'waiting for a device'" in log
        assert "Check failure stack trace" not in log


@pytest.mark.nightly
@pytest.mark.parametrize("victim", [0, 1])
def test_a_stopped_process_is_named_when_jax_gives_it_up(victim):
    """The system keeps the connections of a process that stands still: JAX decides, and we say who it is."""
    ends = run_unattended([*SCENARIO, "vanish", str(victim), "stop", "20"], processes=3, timeout_s=90)
    survivors = [process for process in range(3) if process != victim]
    assert [ends[process].code for process in survivors] == [85, 85], [end.log for end in ends]
    for survivor in survivors:
        log = ends[survivor].log
        assert f"lockstep: process {survivor} of 3 ends because JAX gave up on a process of the job" in log
        assert f"Missing: process {victim}" in log


@pytest.fixture
def machines():
    """Three machines on a switch, as network namespaces; a function that takes the power of one away."""
    tag = uuid.uuid4().hex[:6]
    names, bridge = [f"{tag}{index}" for index in range(3)], f"{tag}b"

    def ip(*words):
        subprocess.run(["ip", *words], check=True, capture_output=True)

    try:
        ip("link", "add", bridge, "type", "bridge")
        ip("link", "set", bridge, "up")
        for index, name in enumerate(names):
            ip("netns", "add", name)
            ip("link", "add", f"{name}s", "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", f"{name}s", "master", bridge, "up")
            ip("-n", name, "addr", "add", f"10.213.0.{index + 1}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names, lambda index: ip("link", "set", f"{names[index]}s", "nomaster")
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        subprocess.run(["ip", "link", "del", bridge], capture_output=True)


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="makes network namespaces: root, iproute2")
@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=pytest.mark.nightly)])
def test_a_machine_without_power_is_named_within_a_minute(machines, victim, tmp_path):
    names, power_off = machines
    options = launch.parse(["--devices_per_process", "1", "--processes", "3", "--", "python"])
    command = [*SCENARIO, "vanish", "3", "kill", "300"]  # process 3, which is nobody
    running, logs = [], [tmp_path / str(index) for index in range(3)]
    for index, name in enumerate(names):
        base = {**os.environ, **POOL.settings.environment}
        environment = launch.local_environment(base, options, "10.213.0.1:8482", index)
        with logs[index].open("wb") as log:
            running.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", name, *launch.resolve(command)],
                    env=environment, cwd=Path(__file__).parents[2], stdout=log, stderr=subprocess.STDOUT,
                )
            )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while not all("all hear" in log.read_text() for log in logs) and time.monotonic() < deadline:
            time.sleep(0.1)
        power_off(victim)
        survivors = [index for index in range(3) if index != victim]
        codes = [running[index].wait(timeout=60) for index in survivors]
    finally:
        for process in running:
            process.kill()
            process.wait()
    assert codes == [85, 85], [log.read_text() for log in logs]
    for index in survivors:
        text = logs[index].read_text()
        assert f"process {victim} has died" in text and "Check failure stack trace" not in text
