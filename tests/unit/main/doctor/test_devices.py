"""Devices, their memory and their mesh; devices that differ are found."""

import dataclasses
from typing import Any

import jax
import pytest

from lockstep.main.doctor.devices import check_devices, check_memory, check_mesh


@dataclasses.dataclass
class Device:
    device_kind: str = "TPU v5p"
    process_index: int = 0
    platform: str = "tpu"
    slice_index: int | None = None
    stats: Any = None

    def memory_stats(self) -> Any:
        return self.stats


def test_what_is_here_is_ok():
    (found,) = check_devices()
    assert found.text == f"{jax.device_count()} of cpu, {jax.device_count()} in each process"
    assert check_memory().text == "that of the host, which CPU devices share"


@pytest.mark.parametrize(
    ("devices", "outcome", "text"),
    [
        ([Device(), Device(process_index=1)], "ok", "2 of TPU v5p, 1 in each process"),
        ([Device(), Device(device_kind="TPU v4")], "fix", "the devices are of 2 kinds: 1 of TPU v5p, 1 of TPU v4."),
        (
            [Device(), Device(), Device(process_index=1)],
            "fix",
            "different numbers of devices (process 0: 2, process 1: 1)",
        ),
        ([Device(slice_index=0), Device(slice_index=1)], "warning", "in 2 slices"),
        ([Device(device_kind="TPU v9")], "warning", "those of TPU v5p stand in"),
    ],
    ids=["same", "kinds", "counts", "slices", "unknown"],
)
def test_devices_that_do_not_go_together_are_found(devices, outcome, text):
    (found,) = check_devices(devices)
    assert found.outcome == outcome and text in found.text


@pytest.mark.parametrize(
    ("stats", "outcome", "text"),
    [
        ({"bytes_limit": 95 << 30, "bytes_in_use": 1 << 20}, "ok", "95.00 GiB per device, 1.00 MiB in use"),
        ({"bytes_limit": 95 << 30, "bytes_in_use": 9 << 30}, "warning", "9.00 GiB in use before anything was done."),
        ({"bytes_limit": 40 << 30, "bytes_in_use": 0}, "warning", "40.00 GiB per device, 0 B in use; a TPU v5p has"),
        ({}, "fix", "a device does not report its memory"),
    ],
    ids=["free", "used", "small", "silent"],
)
def test_memory_is_judged_by_the_worst_device(stats, outcome, text):
    found = check_memory([Device(stats={"bytes_limit": 96 << 30, "bytes_in_use": 0}), Device(stats=stats)])
    assert found.outcome == outcome and text in found.text


def test_the_mesh_of_a_run():
    assert check_mesh("1,2,2", jax.devices()[:4]).text == (
        "mesh_shape 1,2,2: dp 1, fsdp 2, tp 2; layouts for decoding: training, tensor 1, 2, 4"
    )
    found = check_mesh("3,-1,1", jax.devices()[:4])
    assert found.outcome == "fix" and "there are 4 devices" in found.text
