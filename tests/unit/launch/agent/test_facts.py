"""What a worker says about itself."""

import os
import socket
import subprocess
import sys

import pytest

from lockstep.launch.agent import facts
from lockstep.launch.agent.facts import has_small_pages


@pytest.mark.skipif(sys.platform != "linux", reason="open files are in /proc on Linux only")
def test_who_uses_a_chip_is_found(tmp_path):
    chip = tmp_path / "accel0"
    chip.touch()
    (tmp_path / "accel1").touch()
    program = f"import sys, time; f = open({str(chip)!r}); print('open', flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-S", "-c", program], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline() == b"open\n"
        (holder,) = facts.holders([str(tmp_path / "accel*")])
        assert (holder["pid"], holder["device"]) == (process.pid, str(chip)) and "time.sleep(60)" in holder["command"]
    finally:
        process.kill()
        process.wait()
    assert facts.holders([str(tmp_path / "accel*")]) == []
    assert facts.holders([str(tmp_path / "nothing*")]) == []


@pytest.mark.parametrize("sudo", [True, False])
def test_processes_of_others_are_looked_at_as_root_only_where_that_is_allowed(tmp_path, monkeypatch, sudo):
    (tmp_path / "accel0").touch()
    for name in ("proc/7", "bin"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "proc/7/fd").mkdir()
    (tmp_path / "bin/sudo").write_text(f"#!/bin/sh\n: > {tmp_path}/called\n")
    (tmp_path / "bin/sudo").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    monkeypatch.setattr(facts.os, "listdir", lambda path: (_ for _ in ()).throw(PermissionError))
    assert facts.holders([str(tmp_path / "accel0")], str(tmp_path / "proc"), sudo=sudo) == []
    assert (tmp_path / "called").exists() == sudo


def test_a_port_in_use_is_found():
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert facts.is_busy(port)
    assert not facts.is_busy(port)


@pytest.mark.parametrize(
    ("error", "closed"), [(ConnectionRefusedError(), False), (TimeoutError(), True), (OSError(113, "no route"), True)]
)
def test_a_port_that_answers_nothing_is_closed_and_one_that_refuses_is_not(monkeypatch, error, closed):
    def fail(address, timeout):
        assert address == ("10.0.0.2", 8476)
        raise error

    monkeypatch.setattr(facts.socket, "create_connection", fail)
    assert facts.is_closed("10.0.0.2:8476") == closed


def test_a_port_where_somebody_listens_is_reached():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        assert not facts.is_closed(f"127.0.0.1:{listener.getsockname()[1]}")


def test_versions_are_those_of_the_python_of_the_job(tmp_path):
    found = facts.versions({"PATH": os.path.dirname(sys.executable)})
    assert found["python"] == sys.version.split()[0]
    assert facts.versions({"PATH": str(tmp_path)}) == {}


@pytest.mark.parametrize(("setting", "small"), [("[always] madvise never", False), ("always [madvise] never", True)])
def test_small_pages_count_where_there_are_chips(tmp_path, setting, small):
    chip, enabled = tmp_path / "accel0", tmp_path / "enabled"
    enabled.write_text(setting)
    assert not has_small_pages([f"{tmp_path}/accel*"], str(enabled)), "no chips"
    chip.touch()
    assert has_small_pages([f"{tmp_path}/accel*"], str(enabled)) == small
    assert not has_small_pages([f"{tmp_path}/accel*"], str(tmp_path / "none"))
