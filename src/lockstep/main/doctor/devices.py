"""The devices, their memory, and the mesh that a run would make of them."""

import collections
from collections.abc import Sequence
from typing import Final

import jax

from lockstep.errors import ConfigError
from lockstep.main.doctor.finding import Finding
from lockstep.placement import fsdp_spans_hosts, make_mesh, tensor_sizes
from lockstep.placement.device import chip_of, published_chip
from lockstep.printable import bytes_text

IN_USE: Final = 0.05
"""Share of a device's memory in use, before anything was done, above which there is a warning."""


def check_devices(devices: Sequence[jax.Device] | None = None) -> list[Finding]:
    """Say which devices there are.

    Args:
        devices: The devices of the job; None for all.
    """
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
    slices = {getattr(device, "slice_index", None) for device in devices} - {None}
    if len(slices) > 1:
        return [Finding.warning("devices", f"{text}, in {len(slices)} slices, which lockstep is not tested on.")]
    if published_chip(devices[0]) is None and devices[0].platform != "cpu":
        text += f"; no numbers are published here for this kind, and those of {chip_of(devices[0]).name} stand in"
        fix = "lockstep doctor --calibrate FILE measures them: give FILE to plan, and as calibration to a run."
        return [Finding.warning("devices", f"{text}.", fix)]
    return [Finding.ok("devices", text)]


def check_memory(devices: Sequence[jax.Device] | None = None) -> Finding:
    """Say how much memory the devices of this process have, and whether something else is in it.

    Args:
        devices: The devices of this process; None for all of them.
    """
    devices = jax.local_devices() if devices is None else devices
    stats = [device.memory_stats() or {} for device in devices]
    if any("bytes_limit" not in one for one in stats):
        if devices[0].platform == "cpu":
            return Finding.ok("device memory", "that of the host, which CPU devices share")
        text = "a device does not report its memory, so that nobody knows how much is free."
        return Finding.to_fix("device memory", text, "Set memory_bytes_per_device of the block that samples.")
    limit = min(int(one["bytes_limit"]) for one in stats)
    used = max(int(one.get("bytes_in_use", 0)) for one in stats)
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
    """Say which mesh a run would have, and into which groups it could decode.

    Args:
        mesh_shape: The mesh, as ``trainer.mesh_shape``.
        devices: The devices of the job; None for all.
    """
    try:
        mesh = make_mesh(mesh_shape, devices)
    except ConfigError as error:
        return Finding.to_fix("mesh", str(error))
    sizes = ", ".join(f"{name} {size}" for name, size in mesh.shape.items())
    tensor = ", ".join(map(str, tensor_sizes(dict(mesh.shape))))
    text = f"mesh_shape {mesh_shape}: {sizes}; layouts for decoding: training, tensor {tensor}"
    hosts = len({device.process_index for device in mesh.devices.flat})
    spans = f"; fsdp spans {hosts} hosts" if fsdp_spans_hosts(mesh) else ""
    return Finding.ok("mesh", f"{text}{spans}")
