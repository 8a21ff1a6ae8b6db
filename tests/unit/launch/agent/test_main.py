"""The agent as a worker gets it: plain Python 3.8 with its standard library."""

import ast
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import lockstep
from lockstep.launch import connection

AGENT = Path(lockstep.__file__).parent / "launch" / "agent"
OLDEST = (3, 8)


def ask(python, home, request, payload=b""):
    done = subprocess.run(
        [python, "-I", "-c", connection.BOOT],
        input=connection.agent_line() + json.dumps(request).encode() + b"\n" + payload,
        env={"HOME": str(home), "PATH": "/usr/bin:/bin"},
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
    sent = {"lockstep.redact"}
    assert not any(each.startswith("lockstep") for each in imports(AGENT.parents[1] / "redact.py"))
    for name in connection.MODULES:
        own = {each for each in imports(AGENT / f"{name}.py") if each.startswith("lockstep")}
        assert own <= sent, name
        sent.add(f"{connection.AGENT}.{name}")
    for path in (*AGENT.glob("*.py"), AGENT.parents[1] / "redact.py"):
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
        env={"HOME": str(home), "PATH": "/usr/bin:/bin"},
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
