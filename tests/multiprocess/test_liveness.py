"""Processes that are gone while the others wait for a device, as on a pod: no collective of gloo fails."""

import os
import re
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
    ends = run_unattended([*SCENARIO, "vanish", "1", "100"], processes=3, timeout_s=300)
    assert [end.code for end in ends] == [85, -9, 85], [end.log for end in ends]
    for survivor in (0, 2):
        log = ends[survivor].log
        assert f"process {survivor} ends because process 1 has died: its connection to process 0 has ended" in log
        assert "last phase 'waiting for a device'" in log
        assert "Check failure stack trace" not in log


@pytest.mark.nightly  # in make slow: the killed process above, and tests/unit/hosts/test_liveness.py
@pytest.mark.parametrize("moment", ["joining", "joined", "steps"])
@pytest.mark.parametrize("victim", [0, 2])
def test_a_stopped_process_of_four_is_named(victim, moment):
    command = [*SCENARIO, "stop", str(victim), moment, "40" if victim else "100"]
    check_survivors(run_unattended(command, processes=4, timeout_s=600), victim)


def check_survivors(ends, victim):
    silent = r"no sign of life for \d+ s"
    named = rf"Missing: process {victim} \((never heard of|last phase '.*' \d+ s ago, {silent})\)"
    if victim == 0:
        named = rf"process 0 does not answer \({silent}, since \d\d:\d\d:\d\d; .*Missing: process 0\."
    for survivor, end in enumerate(ends):
        if survivor != victim:
            assert end.code == 85, end.log
            (words,) = (line for line in end.log.splitlines() if " ends because " in line)
            assert re.search(named, words), words
            before_jax = end.log.partition("Check failure stack trace")[0]
            if victim:
                assert before_jax.count(f"nothing is heard of process {victim} (") == 1, end.log
            else:
                assert before_jax == end.log, "JAX was first"


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
@pytest.mark.nightly  # in make slow: the killed process
@pytest.mark.parametrize("victim", [0, 1])
def test_a_machine_without_power_is_named_within_a_minute(machines, victim, tmp_path):
    names, power_off = machines
    options = launch.parse(["--devices_per_process", "1", "--processes", "3", "--", "python"])
    command = [*SCENARIO, "vanish", "3", "300"]  # process 3, which is nobody
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
        deadline = time.monotonic() + 300
        while not all("all hear" in log.read_text() for log in logs):
            assert time.monotonic() < deadline, [log.read_text() for log in logs]
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
        end = "has died" if victim else "does not answer"
        assert f"process {victim} {end}" in text and "Check failure stack trace" not in text
