"""Who has not connected yet: what the process with the coordination service says once a minute while a job starts.

JAX does not tell before all are there, so the kernel is asked who has a connection to the service's port.
"""

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

SAY_S = 60.0
"""Seconds between two lines."""
PROC = "/proc/net"
ESTABLISHED = "01"
WORKERS = "TPU_WORKER_HOSTNAMES"
"""The variable in which GKE and TPU VMs name the hosts of a slice, with commas."""
NAMED = 8
"""Hosts that a line names."""


@contextlib.contextmanager
def say_who_is_missing(address: str | None, count: int | None, timeout_s: float) -> Iterator[None]:
    """Print a line a minute while the block waits for connections.

    Args:
        address: host:port of the service where this process runs it; None: elsewhere, where the lines come from.
        count: The number of processes of the job; None: not known.
        timeout_s: Seconds that the block may take.
    """
    done = threading.Event()

    def say() -> None:
        assert address is not None
        waited = SAY_S
        while not done.wait(SAY_S):
            text = missing(int(address.rpartition(":")[2]), count)
            print(f"lockstep: waited {waited:.0f} of {timeout_s:.0f} s for the start: {text}", file=sys.stderr)
            waited += SAY_S

    if address is not None:
        threading.Thread(target=say, daemon=True).start()
    try:
        yield
    finally:
        done.set()


def missing(port: int, count: int | None) -> str:
    """Who has not connected to a port of this machine, by name where the platform names the hosts of the job.

    Args:
        port: The port of the coordination service.
        count: The number of processes of the job; None: not known.
    """
    peers = connected(port)
    found = f"{len(peers)} of {count} processes have connected" if count else f"{len(peers)} processes have connected"
    hosts = {address for address, _ in peers}
    names = [name for name in os.environ.get(WORKERS, "").split(",") if name]
    absent = [f"worker {index} ({name})" for index, name in enumerate(names) if not _addresses(name) & hosts]
    if len(names) < 2 or not absent:
        return f"{found}, from {_some(sorted(hosts))}" if hosts else found
    return f"{found}; {_some(absent)} {'has' if len(absent) == 1 else 'have'} not"


def connected(port: int, folder: str = PROC) -> set[tuple[str, int]]:
    """Address and port of whoever has a connection to a port of this machine; nobody where there is no such table.

    Args:
        port: The port.
        folder: The directory with the kernel's tables ``tcp`` and ``tcp6``.
    """
    found = set()
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(folder, name).read_text().splitlines()[1:]:
                local, remote, state = line.split()[1:4]
                if state == ESTABLISHED and int(local.rpartition(":")[2], 16) == port:
                    address, _, number = remote.rpartition(":")
                    found.add((_address(address), int(number, 16)))
    return found


def _address(digits: str) -> str:
    """An address as the kernel writes it: words of 32 bits in this machine's order of bytes."""
    words = [digits[at : at + 8] for at in range(0, len(digits), 8)]
    raw = b"".join(int(word, 16).to_bytes(4, sys.byteorder) for word in words)
    if len(raw) == 16 and raw[:12] == b"\0" * 10 + b"\xff\xff":
        raw = raw[12:]  # IPv4 over a socket for both
    return socket.inet_ntop(socket.AF_INET if len(raw) == 4 else socket.AF_INET6, raw)


def _addresses(name: str) -> set[str]:
    """The addresses of a host; none where its name is not known yet, as of a pod that does not run."""
    with contextlib.suppress(OSError):
        return {str(each[4][0]) for each in socket.getaddrinfo(name, None)}
    return set()


def _some(names: list[str]) -> str:
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
