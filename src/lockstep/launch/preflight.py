"""Whether workers are fit to start a job: what is wrong, on which worker, the limit and the fix."""

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.launch.workers import Worker

GIB = 1 << 30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What a worker must have.

    Args:
        disk_bytes: Free bytes in the home directory and in ``/tmp``.
        clock_s: Seconds by which its clock may differ from the launcher's: certificates and signed requests to buckets
            are refused minutes apart, and logs cannot be read side by side.
    """

    disk_bytes: int = 2 * GIB
    clock_s: float = 30.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
    """What a worker has said about itself (lockstep.launch.agent.facts).

    Args:
        answer: Its answer.
        skew_s: Seconds by which its clock is ahead of the launcher's.
    """

    answer: Mapping[str, Any]
    skew_s: float


def problems(workers: Sequence[Worker], facts: Sequence[Facts], program: str, limits: Limits) -> list[str]:
    """What is wrong with workers, one line each; empty: they are fit.

    Args:
        workers: The workers.
        facts: The facts of each.
        program: The program that the job runs.
        limits: What they must have.
    """
    found = []
    for worker, fact in zip(workers, facts, strict=True):
        found += [f"worker {worker.name}: {text}" for text in _own_problems(fact, program, limits)]
    return found + _differences(workers, facts)


def _own_problems(fact: Facts, program: str, limits: Limits) -> list[str]:
    answer, found = fact.answer, []
    for holder in answer["holders"]:
        found.append(
            f"process {holder['pid']} ({holder['command']}) uses {holder['device']}, and a chip serves one process. "
            f"End it there with: sudo kill {holder['pid']}"
        )
    for port in answer["busy_ports"]:
        found.append(
            f"port {port} is in use, and the job listens on it. End the process that `sudo ss -ltnp 'sport = {port}'` "
            "shows there, or take another one (ssh: --port; TPU VMs: --env JAX_COORDINATOR_PORT=8474)"
        )
    for path, free in answer["disk"].items():
        if free < limits.disk_bytes:
            found.append(
                f"{free / GIB:.2f} GiB are free in {path}; at least {limits.disk_bytes / GIB:g} GiB are needed for "
                "logs and caches. Delete files there, or take a larger disk"
            )
    if abs(fact.skew_s) > limits.clock_s:
        ahead = "ahead of" if fact.skew_s > 0 else "behind"
        found.append(
            f"its clock is {abs(fact.skew_s):.0f} s {ahead} this machine's; at most {limits.clock_s:g} s are allowed. "
            "Set it there with: sudo systemctl restart systemd-timesyncd (or chrony)"
        )
    if answer["program"] is None:
        found.append(
            f"no program {program!r} in {answer['path']}. Install it there, or say where it is (with ssh: --venv DIR)"
        )
    return found


def _differences(workers: Sequence[Worker], facts: Sequence[Facts]) -> list[str]:
    """What has another version on some workers than on most."""
    found = []
    for name in ("python", "lockstep", "jax", "libtpu"):
        versions = [fact.answer["versions"].get(name) for fact in facts]
        usual = collections.Counter(versions).most_common(1)[0][0]
        for worker, version in zip(workers, versions, strict=True):
            if version != usual:
                found.append(
                    f"worker {worker.name}: {name} is {version or 'not there'}, but {usual or 'not there'} on most "
                    "workers; all must have the same. Install the same everywhere"
                )
    return found
