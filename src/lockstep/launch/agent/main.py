"""The launcher's hands on a worker: one request per connection, read from standard input, answered by frames."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
import traceback
from typing import Any

from lockstep.launch.agent import files
from lockstep.launch.agent.facts import gather
from lockstep.launch.agent.follow import ask, follow, look, send, send_result
from lockstep.launch.agent.supervisor import environment

GREETING = b"lockstep-agent 1\n"
"""The first line of an answer; what a login shell has printed before it does not count."""
KILL_S = 15.0
"""Seconds in which a killed attempt must be gone."""


def main() -> None:
    """Read one request and answer it."""
    os.umask(0o077)
    sys.stdout.buffer.write(GREETING)
    request = json.loads(sys.stdin.buffer.readline().decode())
    root = os.path.expanduser(request["root"])
    try:
        os.makedirs(root, mode=0o700, exist_ok=True)
        if request["op"] == "follow":
            follow(os.path.join(root, request["attempt"]), request)
        else:
            send_result(OPERATIONS[request["op"]](root, request))
    except Exception as error:
        traceback.print_exc()
        send_result({"error": f"{type(error).__name__}: {error}"})
    sys.stderr.flush()
    os._exit(0)  # a thread may still wait for the next word of the launcher


def _facts(root: str, request: dict[str, Any]) -> dict[str, Any]:
    return gather(request, environment(request))


def _put(root: str, request: dict[str, Any]) -> dict[str, Any]:
    """Unpack the archive that follows into ``files``; what it does not name stays, such as what a run has written."""
    target, note = os.path.join(root, "files"), os.path.join(root, "files.digest")
    os.makedirs(target, exist_ok=True)
    with tarfile.open(fileobj=sys.stdin.buffer, mode="r|gz") as archive:
        if hasattr(tarfile, "data_filter"):
            archive.extraction_filter = tarfile.data_filter
        archive.extractall(target)
    files.write_whole(note, request["digest"].encode())
    return {}


def _has(root: str, request: dict[str, Any]) -> dict[str, Any]:
    """Whether an archive with this digest was unpacked last."""
    try:
        with open(os.path.join(root, "files.digest")) as file:
            return {"has": file.read() == request["digest"]}
    except FileNotFoundError:
        return {"has": False}


def _setup(root: str, request: dict[str, Any]) -> dict[str, Any]:
    """Run a script beside the files that follow, in ``setup``, and send what it prints."""
    folder = os.path.join(root, "setup")
    os.makedirs(folder, exist_ok=True)
    for name, size in request["files"]:
        files.write_whole(os.path.join(folder, name), sys.stdin.buffer.read(size), 0o644)
    script = os.path.join(folder, "setup.sh")
    files.write_whole(script, request["script"].encode(), 0o755)
    process = subprocess.Popen(
        ["sh", script], cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert process.stdout is not None
    for line in process.stdout:
        send("O", line)
    return {"code": process.wait()}


def _clear(root: str, request: dict[str, Any]) -> dict[str, Any]:
    """Name every attempt of this job that still runs here; end it (``how``), and wait until it is gone."""
    running = [path for path in _attempts(root) if files.is_locked(path)]
    names = [os.path.basename(path) for path in running]
    if not request["how"]:
        return {"running": names}
    for path in running:
        ask(path, request["how"])
    begin, killed = time.monotonic(), False
    while any(files.is_locked(path) for path in running):
        waited = time.monotonic() - begin
        if waited > request["timeout_s"] and not killed:
            killed = True
            for path in running:
                ask(path, "kill")
        if waited > request["timeout_s"] + KILL_S:
            raise RuntimeError(f"processes of {names} do not end, even killed")
        time.sleep(0.1)
    return {"running": [], "ended": names}


def _status(root: str, request: dict[str, Any]) -> dict[str, Any]:
    directory = os.path.join(root, request["attempt"])
    log = os.path.join(directory, files.LOG)
    state = look(directory)
    state["time"] = time.time()
    if os.path.exists(log):
        state["log_changed"] = os.stat(log).st_mtime
    return state


def _delete(root: str, request: dict[str, Any]) -> dict[str, Any]:
    _clear(root, {"how": "stop", "timeout_s": request["timeout_s"]})
    shutil.rmtree(root)
    try:
        os.rmdir(os.path.dirname(root))  # of the job, with its last worker
    except OSError:
        pass
    return {}


def _attempts(root: str) -> list[str]:
    found = (os.path.join(root, name) for name in sorted(os.listdir(root)) if name.startswith("attempt-"))
    return [path for path in found if os.path.isdir(path)]


OPERATIONS = {
    "facts": _facts,
    "put": _put,
    "has": _has,
    "setup": _setup,
    "clear": _clear,
    "status": _status,
    "delete": _delete,
}
