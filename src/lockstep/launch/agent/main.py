"""The launcher's hands on a worker: one request per connection, read from standard input, answered by frames."""

from __future__ import annotations

import errno
import glob
import json
import os
import shutil
import socket
import subprocess
import sys
import tarfile
import threading
import time
import traceback
from collections.abc import Sequence
from typing import Any

from lockstep.files import write_file
from lockstep.launch.agent.supervisor import (
    EXIT,
    LEASE,
    LOG,
    STATE,
    STOP,
    environment,
    find_program,
    is_locked,
    read_json,
    start,
)

DEVICES = ("/dev/accel*", "/dev/vfio/*")  # the names of the devices of TPU chips
HUGE_PAGES = "/sys/kernel/mm/transparent_hugepage/enabled"
REACH_S = 5.0  # seconds after which a port of another machine counts as closed by a firewall
VERSIONS = """
import importlib.metadata, json, sys
found = {"python": sys.version.split()[0]}
for name, package in (("lockstep", "jax-lockstep"), ("jax", "jax"), ("libtpu", "libtpu")):
    try:
        found[name] = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


def gather(request: dict[str, Any], environ: dict[str, str]) -> dict[str, Any]:
    """The facts of this worker.

    Args:
        request: ``ports`` that the job will listen on, ``reaches`` what it connects to, ``program`` that it runs,
            ``cwd`` where, ``sudo`` whether it may look at processes of other users as root.
    """
    now = time.time()
    home = os.path.expanduser("~")
    return {
        "time": now,
        "agent_python": ".".join(map(str, sys.version_info[:3])),
        "disk": {path: shutil.disk_usage(path).free for path in sorted({home, "/tmp"})},
        "busy_ports": [port for port in request["ports"] if is_busy(port)],
        "closed": [address for address in request["reaches"] if is_closed(address)],
        "holders": holders(sudo=request["sudo"]),
        "small_pages": has_small_pages(),
        "program": find_program(request["program"], environ, os.path.expanduser(request["cwd"])),
        "versions": versions(environ),
        "path": environ["PATH"],
    }


def has_small_pages(devices: Sequence[str] = DEVICES, path: str = HUGE_PAGES) -> bool:
    """Whether there are chips, and memory has small pages alone: their runtime then takes long to start and to end."""
    if not any(glob.glob(pattern) for pattern in devices):
        return False
    try:
        with open(path, encoding="utf-8") as file:
            return "[always]" not in file.read()
    except OSError:
        return False


def is_busy(port: int) -> bool:
    """Whether a process listens on a port of this machine."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of an earlier job do not count
        try:
            probe.bind(("", port))
            return False
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return True


def is_closed(address: str) -> bool:
    """Whether a ``host:port`` cannot be reached; where nobody listens there, its system says so, and it can."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), REACH_S).close()
    except ConnectionRefusedError:
        pass
    except OSError:
        return True
    return False


def holders(devices: Sequence[str] = DEVICES, proc: str = "/proc", sudo: bool = True) -> list[dict[str, Any]]:
    """Processes that have a chip open: ``pid``, ``command``, ``device``; with ``sudo`` those of other users too."""
    chips = {os.path.realpath(path) for pattern in devices for path in glob.glob(pattern)}
    if not chips:
        return []
    holding = []
    hidden = False
    for folder in glob.glob(os.path.join(proc, "[0-9]*", "fd")):
        try:
            targets = {os.readlink(os.path.join(folder, name)) for name in os.listdir(folder)}
        except PermissionError:
            hidden = True
            continue
        except OSError:  # it has just ended
            continue
        holding += [(int(folder.split(os.sep)[-2]), device) for device in sorted(targets & chips)]
    if hidden and sudo:
        holding += _as_root(chips, proc)
    return [{"pid": pid, "command": _command(proc, pid), "device": device} for pid, device in sorted(set(holding))]


def _as_root(chips: set[str], proc: str) -> list[tuple[int, str]]:
    """The same for processes of other users, where this one may become root without a password.

    A file that a process has open may have any name, with line ends in it: the answers are separated by zeros.
    """
    script = f"cd {proc} && find [0-9]*/fd -maxdepth 1 -type l -printf '%h\\0%l\\0'"
    try:
        shown = subprocess.run(
            ["sudo", "-n", "sh", "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    words = shown.stdout.decode(errors="replace").split("\0")
    pairs = [(words[at], words[at + 1]) for at in range(0, len(words) - 1, 2)]
    return [(int(folder.split("/")[0]), target) for folder, target in pairs if target in chips]


def _command(proc: str, pid: int) -> str:
    try:
        with open(os.path.join(proc, str(pid), "cmdline"), "rb") as file:
            return file.read(200).replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return "?"


def versions(environ: dict[str, str]) -> dict[str, str]:
    """Versions in the Python that the job's command will find; empty where there is none."""
    python = shutil.which("python", path=environ["PATH"]) or shutil.which("python3", path=environ["PATH"])
    if python is None:
        return {}
    try:
        done = subprocess.run(
            [python, "-c", VERSIONS], env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=60
        )
        installed: dict[str, str] = json.loads(done.stdout.decode() or "{}")
        return installed
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return {}


POLL_S = 0.1  # seconds between two looks at the log
BEAT_S = 2.0  # seconds between two signs of life of this connection
PIECE = 1 << 16  # bytes of the log in one frame at most


def send(kind: str, data: bytes | None = None) -> None:
    """Send a frame: a letter, the length of what follows, and that; without length where nothing does."""
    head = kind if data is None else f"{kind} {len(data)}"
    sys.stdout.buffer.write(head.encode() + b"\n" + (data or b""))
    sys.stdout.buffer.flush()


def send_result(result: dict[str, Any]) -> None:
    """Send the last frame of a connection."""
    send("R", json.dumps(result).encode())


def follow(directory: str, request: dict[str, Any]) -> None:
    """Start the attempt where that is asked and it is not there, and send its log until it has ended.

    Args:
        request: ``start`` (the specification, or None), ``offset`` in bytes, ``wait`` (False: what there is now).
    """
    if request["start"] is not None:
        start(directory, request["start"])
        send("S")
    elif not os.path.isdir(directory):
        send_result({"state": "absent"})
        return
    threading.Thread(target=_obey, args=(directory,), daemon=True).start()
    offset, beat = request["offset"], 0.0
    log = os.path.join(directory, LOG)
    while True:
        state = look(directory)  # before the log is read: what ended has written all of it
        while True:
            piece = _read(log, offset)
            if not piece:
                break
            send("O", piece)
            offset += len(piece)
        if state["state"] != "running" or not request["wait"]:
            send_result(state)
            return
        if time.monotonic() - beat > BEAT_S:
            send("H")
            beat = time.monotonic()
        time.sleep(POLL_S)


def look(directory: str) -> dict[str, Any]:
    """The state of an attempt: absent, running, ended (with its code), or lost: its supervisor was killed."""
    if not os.path.isdir(directory):
        return {"state": "absent"}
    locked = is_locked(directory)  # before the note is read, which is written with the lock taken
    ended = read_json(os.path.join(directory, EXIT))
    if ended is not None:
        return dict(ended, state="ended")
    return dict(read_json(os.path.join(directory, STATE)) or {}, state="running" if locked else "lost")


def ask(directory: str, request: str) -> None:
    """Ask the supervisor for ``stop`` or ``kill``; a kill is not taken back by a stop."""
    path = os.path.join(directory, STOP)
    if request == "stop" and os.path.exists(path):
        return
    write_file(path, request.encode(), 0o600)


def _read(log: str, offset: int) -> bytes:
    try:
        with open(log, "rb") as file:
            file.seek(offset)
            return file.read(PIECE)
    except FileNotFoundError:
        return b""


def _obey(directory: str) -> None:
    """Do what comes over the connection; when it is gone, so is this process, and nothing renews the lease."""
    for line in sys.stdin.buffer:
        word = line.strip().decode(errors="replace")
        if word == "renew":
            try:
                os.utime(os.path.join(directory, LEASE))
            except FileNotFoundError:
                pass
        elif word in ("stop", "kill"):
            ask(directory, word)
    os._exit(0)


GREETING = b"lockstep-agent 1\n"  # the first line of an answer; what a login shell has printed before it does not count
KILL_S = 15.0  # seconds in which a killed attempt must be gone


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


def _put(root: str, request: dict[str, Any]) -> dict[str, Any]:
    """Unpack the archive that follows into ``files``; what it does not name stays, such as what a run has written."""
    target, note = os.path.join(root, "files"), os.path.join(root, "files.digest")
    os.makedirs(target, exist_ok=True)
    if os.path.exists(note):
        os.unlink(note)  # until all is unpacked the files are of no archive
    with tarfile.open(fileobj=sys.stdin.buffer, mode="r|gz") as archive:
        if hasattr(tarfile, "data_filter"):
            archive.extraction_filter = tarfile.data_filter
        archive.extractall(target)
    write_file(note, request["digest"].encode(), 0o600)
    return {}


def _has(root: str, request: dict[str, Any]) -> dict[str, Any]:
    """Whether an archive with this digest was unpacked last."""
    try:
        with open(os.path.join(root, "files.digest"), encoding="utf-8") as file:
            return {"has": file.read() == request["digest"]}
    except FileNotFoundError:
        return {"has": False}


def _setup(root: str, request: dict[str, Any]) -> dict[str, Any]:
    """Run a script beside the files that follow, in ``setup``, and send what it prints."""
    folder = os.path.join(root, "setup")
    os.makedirs(folder, exist_ok=True)
    for name, size in request["files"]:
        write_file(os.path.join(folder, name), sys.stdin.buffer.read(size), 0o644)
    script = os.path.join(folder, "setup.sh")
    write_file(script, request["script"].encode(), 0o755)
    process = subprocess.Popen(
        ["sh", script], cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert process.stdout is not None
    for line in process.stdout:
        send("O", line)
    return {"code": process.wait()}


def _clear(root: str, request: dict[str, Any]) -> dict[str, Any]:
    """Name every attempt of this job that still runs here; end it (``how``), and wait until it is gone.

    An attempt that is not among the ``attempts`` of the launcher's record is somebody else's, who has a job of the same
    name: nothing is ended then.
    """
    attempts = (os.path.join(root, name) for name in sorted(os.listdir(root)) if name.startswith("attempt-"))
    running = [path for path in attempts if os.path.isdir(path) and is_locked(path)]
    names = [os.path.basename(path) for path in running]
    own = request.get("attempts")
    strangers = [] if own is None else [name for name in names if name not in own]
    if strangers:
        raise RuntimeError(
            f"{', '.join(strangers)} runs here, which this launcher has not started: somebody else has a job of this "
            "name. Nothing was ended; end it where it was started"
        )
    if not request["how"]:
        return {"running": names}
    for path in running:
        ask(path, request["how"])
    begin, killed = time.monotonic(), False
    while any(is_locked(path) for path in running):
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
    log = os.path.join(directory, LOG)
    state = look(directory)
    state["time"] = time.time()
    if os.path.exists(log):
        state["log_changed"] = os.stat(log).st_mtime
    return state


def _delete(root: str, request: dict[str, Any]) -> dict[str, Any]:
    _clear(root, {"how": "stop", "timeout_s": request["timeout_s"], "attempts": request.get("attempts")})
    shutil.rmtree(root)
    try:
        os.rmdir(os.path.dirname(root))  # of the job, with its last worker
    except OSError:
        pass
    return {}


OPERATIONS = {
    "facts": lambda root, request: gather(request, environment(request)),
    "put": _put,
    "has": _has,
    "setup": _setup,
    "clear": _clear,
    "status": _status,
    "delete": _delete,
}
