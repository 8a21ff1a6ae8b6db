"""Published numbers of chips, by which layouts are compared before anything is compiled."""

import dataclasses
import functools
import os
from collections.abc import Sequence
from typing import Final

import jax

from lockstep.errors import ConfigError
from lockstep.placement.device.platforms import platform_of

_GB = 10**9
_TPU_SOURCE = (
    "published: memory: the TPU compiler; bandwidth and operations: https://cloud.google.com/tpu/docs; links: "
    "https://jax-ml.github.io/scaling-book/"
)
_TPU7X_SOURCE = "published, memory by the TPU compiler: https://docs.cloud.google.com/tpu/docs/tpu7x"
_TPU8_SOURCE = (
    "published: jax 0.12.0.1 (jax/_src/tpu_info.py); links: https://blog.google/innovation-and-ai/"
    "infrastructure-and-cloud/google-cloud/eighth-generation-tpu-agentic-era/"
)


SLICES_VARIABLE: Final = "MEGASCALE_NUM_SLICES"
"""The environment variable with the number of slices of a job whose devices do not know theirs: CPUs and GPUs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Link:
    """An interconnect between devices."""

    bandwidth: float  # bytes per second that one device can send while it receives as many
    latency_s: float  # seconds that a collective takes, however little it moves and however near the devices are
    hop_s: float = 0.0  # seconds that each hop between neighbours adds to that

    def gather_s(self, hops: int) -> float:
        """Return the seconds of a gather that moves next to nothing."""
        return self.latency_s + hops * self.hop_s

    def reduce_s(self, hops: int) -> float:
        """Return the seconds of an all-reduce that moves next to nothing: to every device, and back."""
        return self.latency_s + 2 * hops * self.hop_s


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """One kind of device."""

    name: str
    memory: int  # bytes that programs may use, as a TPU's compiler says; a running device reports its own
    bandwidth: float  # bytes per second between memory and cores
    flops: float  # the 16-bit floating-point operations per second of matrix products
    link: Link  # the interconnect between devices of one host; on a TPU slice, between all devices
    network: Link  # the interconnect between devices of different hosts
    core: Link | None = None  # the interconnect between the devices that are one chip; None where each device is a chip
    dcn: float | None = None  # bytes per second that a device sends and receives between slices; None: not published
    source: str = "rough guesses"


def _tpu(
    name: str,
    memory_gib: float,
    bandwidth: float,
    flops: float,
    link: float,
    core: float = 0.0,
    dcn: float | None = None,
    source: str = _TPU_SOURCE,
) -> Chip:
    # A ring uses both directions of one axis: two links. https://jax-ml.github.io/scaling-book/sharding/ has about 1 us
    # per hop ("A note on ICI latency"), and one measurement: a gather over 3 hops of a v5e that moves next to nothing
    # takes 8 us (pop quiz 2). So the other 5 are those of any collective.
    ici = Link(bandwidth=2 * link, latency_s=5e-6, hop_s=1e-6)
    return Chip(
        name=name,
        memory=int(memory_gib * 2**30),
        bandwidth=bandwidth,
        flops=flops,
        link=ici,
        network=ici,
        core=Link(bandwidth=core, latency_s=ici.latency_s) if core else None,
        dcn=dcn,
        source=source,
    )


def _gpu(name: str, memory_gb: int, bandwidth: float) -> Chip:
    return Chip(
        name=name,
        memory=memory_gb * _GB,
        source="published: https://www.nvidia.com/en-us/data-center/ (SXM)",
        bandwidth=bandwidth,
        flops=989e12,  # dense
        link=Link(bandwidth=450e9, latency_s=1e-5),  # NVLink 4: 900 GB/s, both directions together
        network=Link(bandwidth=50e9, latency_s=3e-5),  # one 400 Gbit/s adapter per GPU, as in DGX systems
    )


# Memory: what the TPU compiler (libtpu 0.0.46.3) calls "available HBM" when it refuses a program; the published
# sizes (32, 16, 95, 32 GB) are rounded. Bandwidth, operations: https://cloud.google.com/tpu/docs (v4, v5e, v5p,
# v6e).
# One-way bandwidth of a link: https://jax-ml.github.io/scaling-book/tpus/, table of TPU specifications.
_V4 = _tpu("TPU v4", 2 * 15.25, 1.23e12, 275e12, 45e9)
# Data-centre network: https://cloud.google.com/tpu/docs/tpu7x has 50 Gbit/s per chip of v5p, 100 of v6e and TPU7x;
# .../v6e has 6.4 Tbit/s per 256 chips of v5e.
_V5E = _tpu("TPU v5e", 15.75, 819e9, 197e12, 45e9, dcn=3.125e9)
_V5P = _tpu("TPU v5p", 95.73, 2.765e12, 459e12, 90e9, dcn=6.25e9)
_V6E = _tpu("TPU v6e", 31.24, 1.64e12, 918e12, 90e9, dcn=12.5e9)
# A device is one of the two TensorCores of a chip. Half of 7.37 TB/s and 2,307 TFLOP/s; a link: 1,200 GB/s per chip in
# six links and both directions; between the cores: six times a link.
_TPU7X = _tpu("TPU7x core", 94.74, 7.37e12 / 2, 2307e12 / 2, 100e9, core=600e9, dcn=12.5e9 / 2, source=_TPU7X_SOURCE)
# Links carry twice what those of TPU7x do: 19.2 Tbit/s per chip. 8i is no torus (Boardfly): its number is that of as
# many links. A device of 8i is one of the two TensorCores of a chip; what is between them is not published.
_TPU8T = _tpu("TPU 8t", 231e9 / 2**30, 6.4e12, 996.1e12, 200e9, source=_TPU8_SOURCE)
_TPU8I = _tpu("TPU 8i core", 309e9 / 2 / 2**30, 8.6e12 / 2, 1101e12 / 2, 200e9, source=_TPU8_SOURCE)
# https://www.nvidia.com/en-us/data-center/h100/ and /h200/, SXM.
_H100 = _gpu("H100", 80, 3.35e12)
_H200 = _gpu("H200", 141, 4.8e12)
# Measured on two shared cores of an AMD EPYC, 2 processes × 2 devices (benchmarks/README.md): a decode step
# without collectives reads 15 GB/s, an all-reduce of a few KiB takes 2 to 3 ms inside a process as well as between two.
_CPU = Chip(
    name="CPU",
    memory=8 * _GB,
    bandwidth=15e9,
    flops=200e9,
    link=Link(bandwidth=2e9, latency_s=2e-3),
    network=Link(bandwidth=0.5e9, latency_s=2e-3),
)

# By prefix of ``device.device_kind``; the longest match counts. The numbers of a GPU are those of the whole name alone:
# "NVIDIA H100 PCIe", "NVIDIA H200 NVL" and the parts of a GPU ("… MIG 1g.18gb") are slower.
_KINDS = {
    "TPU v4": _V4,
    "TPU v5": _V5P,
    "TPU v5p": _V5P,
    "TPU v5 lite": _V5E,
    "TPU v5e": _V5E,
    "TPU v6 lite": _V6E,
    "TPU v6e": _V6E,
    "TPU7x": _TPU7X,
    "TPU8t": _TPU8T,
    "TPU8i": _TPU8I,
    "NVIDIA H100 80GB HBM3": _H100,
    "NVIDIA H200": _H200,
}


def chip_of(device: jax.Device) -> Chip:
    """The chip of a device; for a kind that is not in the table, one of the same platform."""
    return chip_named(device.device_kind, device.platform)


def published_chip(device: jax.Device) -> Chip | None:
    """The chip of a device whose numbers its maker publishes; None for a CPU and for a kind that no table has."""
    name = device.device_kind
    known = name in _KINDS if device.platform == "gpu" else any(name.startswith(kind) for kind in _KINDS)
    return chip_named(name, device.platform) if known else None


def slice_index(device: jax.Device) -> int:
    """The number of the slice that a device is in: devices of a slice reach each other without the data-centre network.

    TPUs know it. Elsewhere (``JAX_PARTITION_INDEX`` does not reach the CPU's client, jax 0.11) the devices of the job
    in order of their processes are as many equal slices as ``MEGASCALE_NUM_SLICES`` says, one where it is not set.

    Raises:
        ConfigError: The variable is no number of slices that divides the devices.
    """
    if platform_of(device.platform).slices:
        return getattr(device, "slice_index", 0)
    slices = os.environ.get(SLICES_VARIABLE) or "1"
    return 0 if slices == "1" else _simulated_slices(slices)[device]


@functools.cache
def _simulated_slices(slices: str) -> dict[jax.Device, int]:
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    if not slices.isdecimal() or int(slices) < 1 or len(devices) % int(slices):
        raise ConfigError(
            f"{SLICES_VARIABLE} is {slices!r}, but the job has {len(devices)} devices. Set it to a divisor, or "
            "unset it."
        )
    return {device: place * int(slices) // len(devices) for place, device in enumerate(devices)}


def on_one_chip(devices: Sequence[jax.Device]) -> bool:
    """Whether several devices are the cores of one chip, as on TPU7x."""
    places = {(getattr(device, "slice_index", 0), *(getattr(device, "coords", None) or ())) for device in devices}
    return len(devices) > 1 and len(places) == 1 and hasattr(devices[0], "coords")


def hops(devices: Sequence[jax.Device]) -> int:
    """Return the hops between the two devices of a group that are furthest apart, as if no axis were a ring.

    Axes are rings in slices of at least 4 x 4 x 4 chips (v4, v5p) or 16 x 16 (v5e, v6e), where it is half as many at
    best. Devices that do not say where they are count as a line.
    """
    places = [getattr(device, "coords", None) for device in devices]
    if any(place is None for place in places):
        return len(devices) - 1
    return sum(max(axis) - min(axis) for axis in zip(*places, strict=True))


def chip_named(kind: str, platform: str) -> Chip:
    """The chip of a ``device_kind``; for a kind that is not in the table, one of the same platform.

    Args:
        kind: The ``device_kind`` of a `jax.Device`, such as ``TPU v5 lite``.
        platform: The platform: cpu, gpu or tpu.
    """
    kinds = [known for known in _KINDS if kind.startswith(known)]
    if kinds:
        return _KINDS[max(kinds, key=len)]
    return {"tpu": _V5P, "gpu": _H100}.get(platform, _CPU)


def names_of_chips() -> list[str]:
    """Return the common names of all chips that have numbers here."""
    return sorted({chip.name for chip in (*_KINDS.values(), _CPU)})
