"""The agent as a worker gets it: plain Python 3.8 with its standard library."""

import ast
import io
import json
import os
import shutil
import socket
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

import lockstep
from lockstep.launch import connection
from lockstep.launch.agent import main as agent
from lockstep.launch.agent.main import has_small_pages
from lockstep.launch.agent.supervisor import claim
from tests.fake_cloud.commands import LOADER

AGENT = Path(lockstep.__file__).parent / "launch" / "agent"
OLDEST = (3, 8)


def ask(python, home, request, payload=b""):
    done = subprocess.run(
        [python, "-I", "-c", connection.BOOT],
        input=connection.agent_line() + json.dumps(request).encode() + b"\n" + payload,
        env={"HOME": str(home), "PATH": "/usr/bin:/bin", **LOADER},
        stdout=subprocess.PIPE,
        timeout=30,
        check=True,
    )
    greeting, _, rest = done.stdout.partition(b"\n")
    assert greeting + b"\n" == connection.GREETING
    return rest


def imports(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), feature_version=OLDEST)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = node.module == "lockstep.launch.agent"
            yield from (f"{node.module}.{alias.name}" if package else node.module or "" for alias in node.names)


def test_every_module_is_sent_after_those_that_it_imports_and_is_of_the_oldest_python():
    ground = [AGENT.parents[1] / f"{name}.py" for name in connection.GROUND]
    sent = {f"lockstep.{path.stem}" for path in ground}
    assert not any(each.startswith("lockstep") for path in ground for each in imports(path))
    for name in connection.MODULES:
        own = {each for each in imports(AGENT / f"{name}.py") if each.startswith("lockstep")}
        assert own <= sent, name
        sent.add(f"{connection.AGENT}.{name}")
    for path in (*AGENT.glob("*.py"), *ground):
        others = {each.split(".")[0] for each in imports(path)} - {"lockstep"}
        assert others <= sys.stdlib_module_names, path


def test_it_does_what_it_is_asked_for_and_says_what_it_cannot(tmp_path):
    request = {"op": "setup", "root": "~/work", "script": "cat data; exit 4", "files": [["data", 6]]}
    assert ask(sys.executable, tmp_path, request, b"lines\n") == b'O 6\nlines\nR 11\n{"code": 4}'
    assert (tmp_path / "work").stat().st_mode & 0o077 == 0
    (tmp_path / "file").touch()
    refused = ask(sys.executable, tmp_path, {"op": "status", "root": "~/file", "attempt": "attempt-1"})
    assert b"error" in refused and b"FileExistsError" in refused
    absent = ask(sys.executable, tmp_path, {"op": "status", "root": "~/work", "attempt": "attempt-1"})
    assert json.loads(absent.partition(b"\n")[2])["state"] == "absent"


def test_of_two_connections_one_starts_the_command_and_both_follow_it(tmp_path):
    """A connection that dropped before it was answered is made anew, while the first may still be at work."""
    start = {"argv": ["sh", "-c", "echo ran >> ~/ran; sleep .2; echo done"], "cwd": None, "path": [], "env": {}}
    start |= {"secrets": {}, "lease_s": None, "grace_s": 1.0}
    request = {"op": "follow", "root": "~/w", "attempt": "attempt-1", "start": start, "offset": 0, "wait": True}
    processes = [follow(sys.executable, tmp_path, request) for _ in range(3)]
    for process in processes:
        answer = process.stdout.read()
        process.stdin.close()
        process.wait(timeout=60)
        assert answer.count(b"S\n") == 1 and b"O 5\ndone\n" in answer and b'"code": 0' in answer
    assert (tmp_path / "ran").read_text() == "ran\n"


def follow(python, home, request):
    process = subprocess.Popen(
        [python, "-I", "-c", connection.BOOT],
        env={"HOME": str(home), "PATH": "/usr/bin:/bin", **LOADER},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    process.stdin.write(connection.agent_line() + json.dumps(request).encode() + b"\n")
    process.stdin.flush()
    return process


@pytest.mark.parametrize("version", ["3.8", "3.9", "3.10", "3.11"])
def test_older_pythons_run_a_command_to_its_end(tmp_path, version):
    python = shutil.which(f"python{version}")
    if python is None or subprocess.run([python, "-V"], capture_output=True).returncode != 0:
        # Whatever older Python a machine has is tried; lockstep itself needs none of them.
        pytest.skip(f"no python{version} here")
    start = {"argv": ["sh", "-c", "echo hi $A; exit 5"], "cwd": None, "path": [], "env": {"A": "1"}, "secrets": {}}
    start |= {"lease_s": None, "grace_s": 1.0}
    request = {"op": "follow", "root": "~/w", "attempt": "attempt-1", "start": start, "offset": 0, "wait": True}
    process = follow(python, tmp_path, request)
    answer = process.stdout.read()
    process.stdin.close()
    process.wait(timeout=60)
    assert b"O 5\nhi 1\n" in answer and b'"code": 5' in answer


@pytest.mark.skipif(sys.platform != "linux", reason="open files are in /proc on Linux only")
def test_who_uses_a_chip_is_found(tmp_path):
    chip = tmp_path / "accel0"
    chip.touch()
    (tmp_path / "accel1").touch()
    program = f"import sys, time; f = open({str(chip)!r}); print('open', flush=True); time.sleep(60)"
    command = [sys.executable, "-S", "-c", program]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline() == b"open\n"
        (holder,) = agent.holders([str(tmp_path / "accel*")])
        assert (holder["pid"], holder["device"]) == (process.pid, str(chip))
        assert holder["command"] and " ".join(command).startswith(holder["command"])
    finally:
        process.kill()
        process.wait()
    assert agent.holders([str(tmp_path / "accel*")]) == []
    assert agent.holders([str(tmp_path / "nothing*")]) == []


@pytest.mark.parametrize("sudo", [True, False])
def test_processes_of_others_are_looked_at_as_root_only_where_that_is_allowed(tmp_path, monkeypatch, sudo):
    (tmp_path / "accel0").touch()
    for name in ("proc/7", "bin"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "proc/7/fd").mkdir()
    (tmp_path / "bin/sudo").write_text(f"#!/bin/sh\n: > '{tmp_path}/called'\n")
    (tmp_path / "bin/sudo").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    monkeypatch.setattr(agent.os, "listdir", lambda path: (_ for _ in ()).throw(PermissionError))
    assert agent.holders([str(tmp_path / "accel0")], str(tmp_path / "proc"), sudo=sudo) == []
    assert (tmp_path / "called").exists() == sudo


def test_a_name_with_line_ends_is_no_process_that_has_a_chip(tmp_path, monkeypatch):
    """What root reads of others' open files is named by them."""
    chip = tmp_path / "accel0"
    chip.touch()
    for pid in ("7", "8"):
        (tmp_path / "proc" / pid / "fd").mkdir(parents=True)
    (tmp_path / "proc/8/fd/3").symlink_to(chip)
    (tmp_path / "proc/7/fd/3").symlink_to(f"x\n1/fd:\nl 0 -> {chip}")
    (tmp_path / "proc/7/fd/4").symlink_to(tmp_path / "\udcff")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/sudo").write_text('#!/bin/sh\nshift\nexec "$@"\n')
    (tmp_path / "bin/sudo").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    monkeypatch.setattr(agent.os, "listdir", lambda path: (_ for _ in ()).throw(PermissionError))
    found = agent.holders([str(chip)], str(tmp_path / "proc"))
    assert [(one["pid"], one["device"]) for one in found] == [(8, str(chip))]


def test_nothing_of_somebody_else_with_the_same_name_is_ended(tmp_path):
    started = claim(str(tmp_path / "attempt-1-theirs"))
    asked = {"how": "stop", "timeout_s": 0.1, "attempts": ["attempt-1-mine"]}
    try:
        for operation in ("clear", "delete"):
            with pytest.raises(RuntimeError, match="attempt-1-theirs runs here, which this launcher has not started"):
                agent.OPERATIONS[operation](str(tmp_path), asked)
        with pytest.raises(RuntimeError, match="Nothing was ended"):
            agent.OPERATIONS["clear"](str(tmp_path), {**asked, "how": ""})
        assert os.listdir(tmp_path / "attempt-1-theirs") == ["lock"], "it was not asked to end"
        assert agent.OPERATIONS["clear"](str(tmp_path), {"how": ""}) == {"running": ["attempt-1-theirs"]}
    finally:
        os.close(started)
    agent.OPERATIONS["delete"](str(tmp_path), asked)
    assert not tmp_path.exists(), "what has ended is in nobody's way"


def test_a_port_in_use_is_found():
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert agent.is_busy(port)
    assert not agent.is_busy(port)


@pytest.mark.parametrize(
    ("error", "closed"), [(ConnectionRefusedError(), False), (TimeoutError(), True), (OSError(113, "no route"), True)]
)
def test_a_port_that_answers_nothing_is_closed_and_one_that_refuses_is_not(monkeypatch, error, closed):
    def fail(address, timeout):
        assert address == ("10.0.0.2", 8476)
        raise error

    monkeypatch.setattr(agent.socket, "create_connection", fail)
    assert agent.is_closed("10.0.0.2:8476") == closed


def test_a_port_where_somebody_listens_is_reached():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        assert not agent.is_closed(f"127.0.0.1:{listener.getsockname()[1]}")


def test_versions_are_those_of_the_python_of_the_job(tmp_path):
    found = agent.versions({"PATH": os.path.dirname(sys.executable), **LOADER})
    assert found["python"] == sys.version.split()[0]
    assert agent.versions({"PATH": str(tmp_path)}) == {}


@pytest.mark.parametrize(("setting", "small"), [("[always] madvise never", False), ("always [madvise] never", True)])
def test_small_pages_count_where_there_are_chips(tmp_path, setting, small):
    chip, enabled = tmp_path / "accel0", tmp_path / "enabled"
    enabled.write_text(setting)
    assert not has_small_pages([f"{tmp_path}/accel*"], str(enabled)), "no chips"
    chip.touch()
    assert has_small_pages([f"{tmp_path}/accel*"], str(enabled)) == small
    assert not has_small_pages([f"{tmp_path}/accel*"], str(tmp_path / "none"))


def archive_of(text):
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w:gz") as tar:
        for name, content in (("first", text), ("second", os.urandom(100_000))):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return target.getvalue()


def test_files_of_which_a_part_was_replaced_are_those_of_no_archive(tmp_path):
    old, new = archive_of(b"old"), archive_of(b"new")

    def answer(operation, digest, data=b""):
        request = {"op": operation, "root": "~/x", "digest": digest}
        return json.loads(ask(sys.executable, tmp_path, request, data).partition(b"\n")[2])

    assert answer("put", "old", old) == {} and answer("has", "old") == {"has": True}
    assert "error" in answer("put", "new", new[: len(new) // 2])
    assert (tmp_path / "x" / "files" / "first").read_bytes() == b"new"
    assert [answer("has", digest) for digest in ("old", "new")] == [{"has": False}] * 2
    assert answer("put", "old", old) == {} and answer("has", "old") == {"has": True}
