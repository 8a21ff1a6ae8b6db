"""Hosts compared with each other: what must be the same, and their clocks."""

import collections
import platform
import socket
from collections.abc import Mapping, Sequence
from typing import Final

import jax

from lockstep.hosts import environment, name_processes
from lockstep.main.doctor.finding import Finding
from lockstep.main.doctor.machine import run_variables

CLOCK_S: Final = 1.0
"""Seconds between two clocks above which messages name the wrong process as silent (`hosts/heartbeat.py`)."""
SIGNED_S: Final = 300.0
"""Seconds between two clocks above which cloud services refuse signed requests."""
SHOWN: Final = 100
"""The longest value that is shown in full."""


def host_facts(config_digest: str) -> dict[str, dict[str, str]]:
    """What this host tells the others about itself.

    Args:
        config_digest: The digest of the run's configuration.

    Returns:
        ``must``: what has to be the same on every host; ``should``: what better is; ``own``: what is its own.
    """
    device = jax.local_devices()[0]
    must = {
        **environment(),
        "configuration": config_digest,
        "device kind": device.device_kind,
        "devices of the process": str(jax.local_device_count()),
        "runtime of the devices": " ".join(str(device.client.platform_version).split()),
    }
    should = {f"variable {name}": value for name, value in run_variables().items()}
    should |= {"Python": platform.python_version(), "kernel": platform.release()}
    return {"must": must, "should": should, "own": {"host": socket.gethostname()}}


def compare(by_process: Sequence[Mapping[str, Mapping[str, str]]]) -> list[Finding]:
    """Find what differs between hosts.

    Args:
        by_process: The facts of each process, by process number.

    Returns:
        A finding for each fact that differs, which names who has what; one that is ok where none does.
    """
    found = []
    number = 0
    for kind in ("must", "should"):
        names = list(dict.fromkeys(name for one in by_process for name in one[kind]))
        number += len(names)
        for name in names:
            values = [one[kind].get(name, "not set") for one in by_process]
            if len(set(values)) == 1:
                continue
            text = f"{name}: {who_has_what(values)}."
            fix = "Start every process with the same command, configuration, versions and variables."
            make = Finding.to_fix if kind == "must" else Finding.warning
            found.append(make("hosts", text, fix))
    if found:
        return found
    machines = len({one["own"]["host"] for one in by_process})
    text = f"{len(by_process)} process{'es' * (len(by_process) > 1)} on {machines} machine{'s' * (machines > 1)}"
    return [Finding.ok("hosts", f"{text}; {number} facts (versions, flags, variables, configuration) are the same")]


def who_has_what(values: Sequence[str]) -> str:
    """The processes with each value, the most common value first and named where it is that of the majority.

    Args:
        values: The value of each process, by process number.
    """
    groups: collections.defaultdict[str, list[int]] = collections.defaultdict(list)
    for process, value in enumerate(values):
        groups[value].append(process)
    parts = []
    for value, processes in sorted(groups.items(), key=lambda group: (-len(group[1]), group[1])):
        majority = " (the majority)" if 2 * len(processes) > len(values) else ""
        short = value if len(value) <= SHOWN else value[: SHOWN - 3] + "..."
        parts.append(f"{name_processes(processes)}{majority}: {short!r}")
    return "; ".join(parts)


def compare_clocks(times: Sequence[float]) -> Finding:
    """Compare the clocks of all hosts.

    Args:
        times: The time of each process, by process number, in seconds since 1970, read just after a barrier.
    """
    middle = sorted(times)[len(times) // 2]
    spread = max(times) - min(times)
    if spread <= CLOCK_S:
        return Finding.ok("clocks", f"within {spread * 1e3:.0f} ms of each other")
    off = [f"process {i} by {t - middle:+.1f} s" for i, t in enumerate(times) if abs(t - middle) > CLOCK_S / 2]
    text = f"they differ by {spread:.1f} s: {', '.join(off)}."
    fix = "Start the time service there (systemctl restart chrony or systemd-timesyncd)."
    return Finding.to_fix("clocks", text, fix) if spread > SIGNED_S else Finding.warning("clocks", text, fix)
