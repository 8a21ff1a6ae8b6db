"""From what was measured to the content of a calibration file."""

import importlib.metadata
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from scipy.optimize import nnls

from lockstep.main.doctor.collectives import CollectiveTime
from lockstep.main.doctor.device_speed import DeviceSpeed
from lockstep.placement.device import chip_of


def fit_link(measured: Sequence[CollectiveTime]) -> dict[str, float]:
    """Find the numbers of `Link` that collectives over it tell.

    Latency and hop are those, not below 0, whose prediction of the smallest collectives has the least squared error.
    The bandwidth is that at which a device receives what the largest all-gather brings, in the time that it takes
    longer than the smallest: over several groups, the least.

    Args:
        measured: The collectives, all over links of one kind.

    Returns:
        ``latency_s``, ``hop_s`` and ``bandwidth``, as far as they can be told; nothing where nothing was measured.
    """
    if not measured:
        return {}
    smallest = min(one.size for one in measured)
    small = [one for one in measured if one.size == smallest]
    unknowns = np.array([[1.0, one.turns] for one in small])
    (latency, hop), _ = nnls(unknowns, np.array([one.seconds for one in small]))
    found = {"latency_s": float(latency)}
    if len({one.turns for one in small}) > 1:
        found["hop_s"] = float(hop)
    rates = []
    for group in dict.fromkeys(one.group.name for one in measured):
        gathers = [one for one in measured if one.group.name == group and one.kind == "all-gather"]
        first, last = (pick(gathers, key=lambda one: one.size) for pick in (min, max))
        if last.seconds > first.seconds:
            rates.append((last.received - first.received) / (last.seconds - first.seconds))
    if rates:
        found["bandwidth"] = min(rates)
    return found


def calibration(
    speeds: Sequence[DeviceSpeed], measured: Sequence[CollectiveTime], device: jax.Device, processes: int, number: int
) -> dict[str, Any]:
    """The content of a calibration file; the same on every process.

    Args:
        speeds: What the devices of each process reach.
        measured: The measured collectives.
        device: A device.
        processes: The number of processes.
        number: The number of devices.
    """
    chip = chip_of(device)
    one_network = chip.network == chip.link  # as on a TPU slice
    inside = [one for one in measured if one_network or not one.group.crosses_hosts]
    across = [one for one in measured if not one_network and one.group.crosses_hosts]
    runtime = " ".join(str(device.client.platform_version).split())
    day = time.strftime("%Y-%m-%d", time.gmtime())
    values: dict[str, Any] = {
        "chip": chip.name,
        "measured": f"{day} by lockstep doctor on {number} of {device.device_kind} in {processes} processes, jax "
        f"{importlib.metadata.version('jax')}, {runtime[:120]}",
        "bandwidth": statistics.median(one.bandwidth for one in speeds),
        "flops": statistics.median(one.flops for one in speeds),
    }
    links = {"link": fit_link(inside), "network": fit_link(across)}
    return values | {name: found for name, found in links.items() if found}
