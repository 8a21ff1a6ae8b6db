"""The processes of a job: their coordination service, their number and their devices."""

import collections
import dataclasses
import os
import socket
import statistics
import threading
import time
from collections.abc import Sequence
from typing import Any, Final

import jax

from lockstep.doctor.finding import Finding, failed
from lockstep.errors import ConfigError, LockstepError
from lockstep.hosts import COORDINATOR_ADDRESS, DistributedConfig, Hosts, start
from lockstep.placement import PP, fsdp_spans_hosts, make_mesh, tensor_sizes
from lockstep.placement.device import chip_of, published_chip, slice_index
from lockstep.printable import bytes_text, seconds_text

MARGIN_S: Final = 3600
"""Seconds that `start` may wait longer than doctor does, so that it does not end the process first."""
PROBE_S: Final = 3.0  # seconds that a connection to the coordinator may take


@dataclasses.dataclass(frozen=True, kw_only=True)
class JoinResult:
    """The outcome of joining the job."""

    hosts: Hosts | None  # the processes of the job; None where this process did not join
    finding: Finding  # what was found
    waiting: bool = False  # whether a thread still waits for the others, so that the process has to be ended


def join(config: DistributedConfig) -> JoinResult:
    """Join the job as a run does, within ``initialization_timeout_s``."""
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
        return JoinResult(hosts=hosts[0], finding=Finding.ok("job", text))
    if errors:
        return JoinResult(hosts=None, finding=_not_joined(errors[0]))
    address = config.coordinator_address or os.environ.get(COORDINATOR_ADDRESS)
    text = f"not all processes of the job, or not the devices of this one, were there within {timeout_s:g} s"
    text += "." if address is None else f"; the coordinator {address} {probe(address)}."
    fix = (
        "Start the command on every worker (gcloud ... --worker=all, infra/launch.py), let them reach the port of the "
        "coordinator, end other processes that have the chips (sudo lsof /dev/accel* /dev/vfio/*), or raise timeout_s."
    )
    return JoinResult(hosts=None, finding=Finding.to_fix("job", text, fix), waiting=True)


def probe(address: str) -> str:
    """Say how the coordinator's port answers: ``answers``, or what connecting to it fails with."""
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


ROUNDS: Final = 20  # times that each is done; the median counts
SLOW_S: Final = 0.05  # seconds of a barrier above which there is a warning: decoding makes one before each launch


def measure_coordination(hosts: Hosts) -> dict[str, float]:
    """Measure this process's median seconds of a barrier and of an exchange; every process makes the same call."""
    barriers, exchanges = [], []
    for number in range(ROUNDS):
        with hosts.scope(f"doctor/latency/{number}") as scope:
            begin = time.perf_counter()
            scope.barrier("barrier")
            middle = time.perf_counter()
            with scope.run_on_all("exchange"):
                pass
            barriers.append(middle - begin)
            exchanges.append(time.perf_counter() - middle)
    return {"barrier_s": statistics.median(barriers), "exchange_s": statistics.median(exchanges)}


def judge_coordination(by_process: Sequence[dict[str, Any]]) -> Finding:
    """Say how long the slowest process waits."""
    if len(by_process) == 1:
        return Finding.ok("coordination", "one process: nothing to wait for")
    barrier, exchange = (max(times[name] for times in by_process) for name in ("barrier_s", "exchange_s"))
    text = f"a barrier takes {seconds_text(barrier)}, an exchange {seconds_text(exchange)} (median of {ROUNDS})"
    if barrier > SLOW_S:
        fix = "Look for a busy process 0, which serves all others, or for a slow network between hosts."
        return Finding.warning("coordination", f"{text}.", fix)
    return Finding.ok("coordination", text)


IN_USE: Final = 0.05  # share of a device's memory in use, before anything was done, above which there is a warning


def check_devices(devices: Sequence[jax.Device] | None = None) -> list[Finding]:
    """Say which devices there are."""
    devices = jax.devices() if devices is None else devices
    kinds = collections.Counter(device.device_kind for device in devices)
    if len(kinds) > 1:
        listed = ", ".join(f"{number} of {kind}" for kind, number in kinds.items())
        fix = "Start the job on machines of one kind: one program cannot run on two."
        return [Finding.to_fix("devices", f"the devices are of {len(kinds)} kinds: {listed}.", fix)]
    per_process = collections.Counter(device.process_index for device in devices)
    if len(set(per_process.values())) > 1:
        listed = ", ".join(f"process {index}: {number}" for index, number in sorted(per_process.items()))
        fix = "Start every process with the same number of devices."
        return [Finding.to_fix("devices", f"processes have different numbers of devices ({listed}).", fix)]
    ((kind, number),) = kinds.items()
    text = f"{number} of {kind}, {next(iter(per_process.values()))} in each process"
    slices = len(set(map(slice_index, devices)))
    text += f", in {slices} slices" if slices > 1 else ""
    if published_chip(devices[0]) is None and devices[0].platform != "cpu":
        text += f"; no numbers are published here for this kind, and those of {chip_of(devices[0]).name} stand in"
        fix = "lockstep doctor --calibrate FILE measures them: give FILE to plan, and as calibration to a run."
        return [Finding.warning("devices", f"{text}.", fix)]
    return [Finding.ok("devices", text)]


def check_memory(devices: Sequence[jax.Device] | None = None) -> Finding:
    """Say how much memory the devices of this process have, and whether something else is in it."""
    devices = jax.local_devices() if devices is None else devices
    stats = [device.memory_stats() or {} for device in devices]
    if any("bytes_limit" not in device_stats for device_stats in stats):
        if devices[0].platform == "cpu":
            return Finding.ok("device memory", "that of the host, which CPU devices share")
        text = "a device does not report its memory, so that nobody knows how much is free."
        return Finding.to_fix("device memory", text, "Set memory_bytes_per_device of the block that samples.")
    limit = min(int(device_stats["bytes_limit"]) for device_stats in stats)
    used = max(int(device_stats.get("bytes_in_use", 0)) for device_stats in stats)
    text = f"{bytes_text(limit)} per device, {bytes_text(used)} in use"
    if used > IN_USE * limit:
        return Finding.warning("device memory", f"{text} before anything was done.", "Free what this process keeps.")
    chip = published_chip(devices[0])
    if chip is not None and limit < 0.9 * chip.memory:
        text += f"; a {chip.name} has {bytes_text(chip.memory)}."
        fix = "End other processes that use the device, or look at variables that limit its memory."
        return Finding.warning("device memory", text, fix)
    return Finding.ok("device memory", text)


def check_mesh(mesh_shape: str, devices: Sequence[jax.Device] | None = None) -> Finding:
    """Say which mesh a run would have, and into which groups it could decode."""
    try:
        mesh = make_mesh(mesh_shape, devices)
    except ConfigError as error:
        return Finding.to_fix("mesh", str(error))
    sizes = ", ".join(f"{name} {size}" for name, size in mesh.shape.items())
    tensor = ", ".join(map(str, tensor_sizes(mesh)))
    in_place = "" if PP in mesh.shape else "training, "
    text = f"mesh_shape {mesh_shape}: {sizes}; layouts for decoding: {in_place}tensor {tensor}"
    hosts = len({device.process_index for device in mesh.devices.flat})
    spans = f"; fsdp spans {hosts} hosts" if fsdp_spans_hosts(mesh) else ""
    return Finding.ok("mesh", f"{text}{spans}")
