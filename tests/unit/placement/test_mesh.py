import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from lockstep.errors import ConfigError
from lockstep.placement import batch_spec, compute_axes, data_shards, fsdp_spans_hosts, fsdp_warning, make_mesh


@dataclasses.dataclass(frozen=True)
class FakeDevice:
    process_index: int
    id: int
    platform: str = "cpu"
    slice_index: int = 0


def fake_pod(processes: int, per_process: int, platform: str = "cpu", slices: int = 1) -> list[Any]:
    # Ids of one host are not consecutive, as on v5p:8x8x4; the list comes in id order.
    devices = [
        FakeDevice(
            process_index=i % processes, id=i, platform=platform, slice_index=i % processes * slices // processes
        )
        for i in range(processes * per_process)
    ]
    return list(devices)


def test_auto_is_fsdp_over_all_devices_grouped_by_host() -> None:
    mesh = make_mesh("auto", fake_pod(4, 2))
    assert dict(mesh.shape) == {"dp": 1, "fsdp": 8, "tp": 1}
    assert [d.process_index for d in mesh.devices.flat] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert fsdp_spans_hosts(mesh)


def test_host_local_keeps_fsdp_inside_a_host_though_ids_interleave() -> None:
    mesh = make_mesh("host_local", fake_pod(4, 2))
    assert dict(mesh.shape) == {"dp": 4, "fsdp": 2, "tp": 1}
    for row in mesh.devices[:, :, 0]:
        assert len({d.process_index for d in row}) == 1
    assert not fsdp_spans_hosts(mesh)
    assert fsdp_warning(mesh) is None


def test_sizes_and_the_wildcard() -> None:
    assert make_mesh("2,-1,2", fake_pod(4, 2)).devices.shape == (2, 2, 2)
    assert make_mesh("1,4,2", fake_pod(4, 2)).devices.shape == (1, 4, 2)
    assert make_mesh("8,1,1", fake_pod(4, 2)).devices.shape == (8, 1, 1)


def test_slices_are_data_parallel_and_none_shares_parameters_with_another() -> None:
    """Devices are ordered by slice first, though processes of two slices may take turns."""
    pod = fake_pod(4, 2, "tpu", slices=2)
    pod = [dataclasses.replace(device, slice_index=device.process_index % 2) for device in pod]
    for shape, sizes in {"auto": (2, 1, 4, 1), "host_local": (2, 2, 2, 1), "1,-1,2": (2, 1, 2, 2)}.items():
        mesh = make_mesh(shape, pod)
        assert mesh.axis_names == ("dcn", "dp", "fsdp", "tp") and mesh.devices.shape == sizes
        assert [d.process_index for d in mesh.devices.flat] == [0, 0, 2, 2, 1, 1, 3, 3]
        assert batch_spec(mesh) == PartitionSpec(("dcn", "dp", "fsdp")) and data_shards(mesh) == 8 // sizes[-1]
    with pytest.raises(ConfigError, match=r"4 devices in each of the 2 slices, over which parameters are not split"):
        make_mesh("1,8,1", pod)
    with pytest.raises(ConfigError, match=r"different numbers of devices: \{0: 4, 1: 2\} \(slice"):
        make_mesh("auto", [device for device in pod if device.process_index < 3])


def test_a_job_of_cpus_is_told_its_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGASCALE_NUM_SLICES", "2")
    devices = jax.devices()
    mesh = make_mesh()
    assert mesh.shape["dcn"] == 2 and list(mesh.devices.flat) == devices
    assert make_mesh("auto", devices[: len(devices) // 2]).axis_names == ("dp", "fsdp", "tp")
    monkeypatch.setenv("MEGASCALE_NUM_SLICES", "5")
    with pytest.raises(ConfigError, match=rf"'5', but the job has {len(devices)} devices"):
        make_mesh()


def test_on_tpus_only_slices_are_joined_by_a_network() -> None:
    """Inside a slice FSDP over all hosts is right, and no healthy pod is warned about it."""
    pod: Any = fake_pod(4, 2, "tpu", slices=2)
    assert fsdp_warning(make_mesh("auto", pod)) is None
    own = Mesh(np.array(sorted(pod, key=lambda d: d.slice_index)), ("fsdp",))
    warning = fsdp_warning(own)
    assert warning is not None and "2 slices" in warning and "make_mesh" in warning


def test_processes_with_cpus_stand_for_a_slice() -> None:
    assert fsdp_spans_hosts(mesh := make_mesh("auto", fake_pod(4, 2, "cpu"))) and fsdp_warning(mesh) is None


def test_warning_names_hosts_and_fix() -> None:
    warning = fsdp_warning(make_mesh("auto", fake_pod(4, 2, "gpu")))
    assert warning is not None and "4 hosts" in warning and "host_local" in warning


def test_sizes_may_be_named() -> None:
    pod: Any = fake_pod(4, 2)
    assert dict(make_mesh("tp=2,fsdp=-1", pod).shape) == {"dp": 1, "fsdp": 4, "tp": 2}
    mesh = make_mesh("fsdp=-1,cp=4", pod)
    assert dict(mesh.shape) == {"dp": 1, "fsdp": 2, "cp": 4, "tp": 1}
    assert data_shards(mesh) == 2 and compute_axes(mesh)["position"] == "cp"
    assert make_mesh("pp=1,cp=1,fsdp=8", pod).axis_names == ("dp", "fsdp", "tp")
    with pytest.raises(ConfigError, match=r"with 2 slices; cp splits rows inside one slice"):
        make_mesh("cp=2,fsdp=-1", fake_pod(4, 2, "tpu", slices=2))


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ("3,-1,1", r"mesh_shape is '3,-1,1'.*multiply to 3.*8 devices.*product is 8"),
        ("2,2,1", r"multiply to 4.*8 devices"),
        ("-1,-1,1", r"at most one may be -1"),
        ("0,8,1", r"at least 1"),
        ("8", r"1 sizes where 3 are needed.*host_local"),
        ("fsdp", r"not a mesh shape.*auto"),
        ("fsdp=4,sp=2", r"does not name each size once.*of pp, dp, fsdp, cp and tp"),
        ("fsdp=4,fsdp=2", r"does not name each size once"),
        ("fsdp=4,2", r"does not name each size once"),
        ("cp=3", r"multiply to 3.*8 devices"),
        ("pp=2,cp=2,fsdp=-1", r"with pp; cp splits rows inside one slice, without stages. Use one slice without pp"),
    ],
)
def test_wrong_shapes_say_what_was_given_and_the_fix(shape: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make_mesh(shape, fake_pod(4, 2))


def test_host_local_refuses_uneven_hosts() -> None:
    with pytest.raises(ConfigError, match=r"\{0: 2, 1: 1\}.*same number of devices"):
        make_mesh("host_local", [FakeDevice(0, 0), FakeDevice(0, 1), FakeDevice(1, 2)])  # type: ignore[list-item] (has what is read of a device)


def test_real_devices() -> None:
    mesh = make_mesh()
    assert mesh.devices.size == mesh.shape["fsdp"] >= 1
    assert isinstance(mesh.devices, np.ndarray)


def test_stages_are_slices_parts_of_a_slice_or_a_copy_over_some_slices() -> None:
    pod = fake_pod(4, 2, "tpu", slices=2)
    for devices, shape, sizes in (
        (fake_pod(4, 2), "pp=2,fsdp=-1", {"pp": 2, "dp": 1, "fsdp": 4, "tp": 1}),
        (pod, "pp=2,fsdp=-1,tp=2", {"pp": 2, "dp": 1, "fsdp": 2, "tp": 2}),
        (pod, "fsdp=-1,pp=4", {"pp": 4, "dp": 1, "fsdp": 2, "tp": 1}),
        (fake_pod(4, 2, "tpu", slices=4), "pp=2,fsdp=-1", {"dcn": 2, "pp": 2, "dp": 1, "fsdp": 2, "tp": 1}),
        (pod, "pp=1,fsdp=-1", {"dcn": 2, "dp": 1, "fsdp": 4, "tp": 1}),
    ):
        mesh = make_mesh(shape, devices)
        assert dict(mesh.shape) == sizes
        assert [d.process_index for d in mesh.devices.flat] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert batch_spec(make_mesh("pp=2,fsdp=-1", pod)) == PartitionSpec(("pp", "dp", "fsdp"))
    assert data_shards(make_mesh("pp=2,fsdp=-1", pod)) == 8
    with pytest.raises(ConfigError, match=r"'pp=3,fsdp=-1' on 2 slices.*a pp that divides 2, or a multiple"):
        make_mesh("pp=3,fsdp=-1", pod)
