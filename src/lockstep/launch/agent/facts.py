"""The state of a worker before a job: clock, disk, ports, who uses its chips, and the versions of what will run."""

from __future__ import annotations

import errno
import glob
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from lockstep.launch.agent.supervisor import find_program

DEVICES = ("/dev/accel*", "/dev/vfio/*")
"""The names of the devices of TPU chips."""
HUGE_PAGES = "/sys/kernel/mm/transparent_hugepage/enabled"
REACH_S = 5.0
"""Seconds after which a port of another machine counts as closed by a firewall."""
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
    """Whether there are chips, and memory has small pages alone: their runtime then takes long to start and to end.

    Args:
        devices: Patterns of the devices' names.
        path: Where the kernel says when it makes huge pages.
    """
    if not any(glob.glob(pattern) for pattern in devices):
        return False
    try:
        with open(path) as file:
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
    """Processes that have a chip open: ``pid``, ``command``, ``device``.

    Args:
        devices: Patterns of the devices' names.
        proc: Where the kernel shows its processes.
        sudo: Whether those of other users are looked at too, by ``sudo -n``.
    """
    wanted = {os.path.realpath(path) for pattern in devices for path in glob.glob(pattern)}
    if not wanted:
        return []
    found = []
    hidden = False
    for folder in glob.glob(os.path.join(proc, "[0-9]*", "fd")):
        try:
            targets = {os.readlink(os.path.join(folder, name)) for name in os.listdir(folder)}
        except PermissionError:
            hidden = True
            continue
        except OSError:  # it has just ended
            continue
        found += [(int(folder.split(os.sep)[-2]), device) for device in sorted(targets & wanted)]
    if hidden and sudo:
        found += _as_root(wanted, proc)
    return [{"pid": pid, "command": _command(proc, pid), "device": device} for pid, device in sorted(set(found))]


def _as_root(wanted: set[str], proc: str) -> list[tuple[int, str]]:
    """The same for processes of other users, where this one may become root without a password."""
    script = f"cd {proc} && ls -l [0-9]*/fd"
    try:
        shown = subprocess.run(
            ["sudo", "-n", "sh", "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    found, pid = [], 0
    for line in shown.stdout.decode(errors="replace").splitlines():
        if line.endswith("/fd:"):
            pid = int(line.split("/")[0])
        else:
            target = line.partition(" -> ")[2]
            found += [(pid, target)] if target in wanted else []
    return found


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
        found: dict[str, str] = json.loads(done.stdout.decode() or "{}")
        return found
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return {}
