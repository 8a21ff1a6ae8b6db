"""The environment and the program of a command on a worker."""

import json
import shutil
import sys

from tests.unit.launch.agent.test_main import ask, follow


def test_variables_of_the_job_win_over_the_agents_and_one_that_cannot_be_is_an_end(tmp_path):
    """The launcher takes a supervisor that is gone for a preemption, and tries again."""

    def run(env, attempt):
        start = {"argv": ["sh", "-c", "echo $PYTHONUNBUFFERED $PATH"], "cwd": None, "path": ["/first"], "env": env}
        start |= {"secrets": {}, "lease_s": None, "grace_s": 1}
        request = {"op": "follow", "root": "~/w", "attempt": attempt, "start": start, "offset": 0, "wait": True}
        process = follow(sys.executable, tmp_path, request)
        answer = process.stdout.read()
        process.stdin.close()
        process.wait(timeout=60)
        return answer

    answer = run({"PATH": "/mine:/bin", "PYTHONUNBUFFERED": "0"}, "attempt-1")
    assert b"0 /first:/mine:/bin:" in answer and b'"code": 0' in answer
    answer = run({"NAME": "a\0b"}, "attempt-2")
    assert b"sh cannot be started: embedded null byte" in answer and b'"code": 126' in answer


def test_a_program_with_a_slash_is_found_where_it_runs(tmp_path):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "run.sh").write_text("#!/bin/sh\npwd\n")
    (tmp_path / "code" / "run.sh").chmod(0o755)
    start = {"argv": ["./run.sh"], "cwd": "~/code", "path": [], "env": {}, "secrets": {}, "lease_s": None, "grace_s": 1}
    request = {"op": "follow", "root": "~/w", "attempt": "attempt-1", "start": start, "offset": 0, "wait": True}
    process = follow(sys.executable, tmp_path, request)
    answer = process.stdout.read()
    process.stdin.close()
    process.wait(timeout=60)
    assert f"{tmp_path}/code\n".encode() in answer and b'"code": 0' in answer
    facts = {
        "op": "facts",
        "root": "~/w",
        "ports": [],
        "reaches": [],
        "cwd": "~/code",
        "path": [],
        "env": {},
        "secrets": {},
        "sudo": False,
    }
    shell = shutil.which("sh", path="/usr/bin:/bin")
    for program, found in (("./run.sh", f"{tmp_path}/code/./run.sh"), ("./code/run.sh", None), ("sh", shell)):
        answer = ask(sys.executable, tmp_path, {**facts, "program": program})
        assert json.loads(answer.partition(b"\n")[2])["program"] == found
