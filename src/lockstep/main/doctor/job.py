"""Joining the job, where not joining it is a finding and not the end."""

import dataclasses
import os
import socket
import threading
from typing import Final

from lockstep.errors import LockstepError
from lockstep.hosts import COORDINATOR_ADDRESS, DistributedConfig, Hosts, start
from lockstep.main.doctor.finding import Finding, failed

MARGIN_S: Final = 3600
"""Seconds that `start` may wait longer than doctor does, so that it does not end the process first."""
PROBE_S: Final = 3.0
"""Seconds that a connection to the coordinator may take."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Joined:
    """How joining the job ended.

    Args:
        hosts: The processes of the job; None where this process did not join.
        finding: What was found.
        waiting: Whether a thread still waits for the others, so that the process has to be ended.
    """

    hosts: Hosts | None
    finding: Finding
    waiting: bool = False


def join(config: DistributedConfig) -> Joined:
    """Join the job as a run does, within ``initialization_timeout_s``.

    Args:
        config: How the processes find each other.
    """
    timeout_s = config.initialization_timeout_s
    patient = dataclasses.replace(config, initialization_timeout_s=timeout_s + MARGIN_S)
    hosts: list[Hosts] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            hosts.append(start(patient))
        except BaseException as error:
            errors.append(error)

    # JAX waits for the other processes, or for devices that another process has, in a call that nothing interrupts.
    thread = threading.Thread(target=work, name="lockstep-join", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if hosts:
        count = hosts[0].count
        text = "this process is alone" if count == 1 else f"{count} processes have joined"
        return Joined(hosts=hosts[0], finding=Finding.ok("job", text))
    if errors:
        return Joined(hosts=None, finding=_not_joined(errors[0]))
    address = config.coordinator_address or os.environ.get(COORDINATOR_ADDRESS)
    text = f"not all processes of the job, or not the devices of this one, were there within {timeout_s:g} s"
    text += "." if address is None else f"; the coordinator {address} {probe(address)}."
    fix = (
        "Start the command on every worker (gcloud ... --worker=all, infra/launch.py), let them reach the port of the "
        "coordinator, end other processes that have the chips (sudo lsof /dev/accel* /dev/vfio/*), or raise timeout_s."
    )
    return Joined(hosts=None, finding=Finding.to_fix("job", text, fix), waiting=True)


def probe(address: str) -> str:
    """Say how the coordinator's port answers: ``answers``, or what connecting to it fails with.

    Args:
        address: The address as ``host:port``.
    """
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), PROBE_S).close()
    except (OSError, ValueError) as error:
        return f"does not answer ({error})"
    return "answers"


def _not_joined(error: BaseException) -> Finding:
    if isinstance(error, LockstepError):
        return Finding.to_fix("job", str(error))
    fix = "End other processes that have the devices, and install the version of libtpu that belongs to this jax."
    return dataclasses.replace(failed("job", error), fix=fix)
