"""What doctor times on a TPU is what it says: the compiler leaves no loop empty and copies no matrix."""

import pytest

pytest.importorskip("libtpu", reason="the extra [plan] brings the TPU compiler")

from lockstep.doctor import collectives, device_speed
from lockstep.hosts import Hosts, MemoryClient
from lockstep.placement import make_mesh
from lockstep.plan import topology

pytestmark = pytest.mark.slow


@pytest.fixture
def pod():
    return make_mesh("1,4,2", topology("v5p-16").devices)


def test_matrices_are_read_and_multiplied_in_every_turn(pod):
    hosts, sizes = Hosts(MemoryClient.hub(1)[0]), device_speed.sizes_for("tpu")
    read, multiply = device_speed.build_loops(hosts, list(pod.devices.flat), sizes)
    matrix, product = sizes.read**2 * 2, sizes.product**2 * 2
    assert read.run.memory().argument_size_in_bytes > matrix > 100 * read.run.memory().temp_size_in_bytes
    assert multiply.run.memory().temp_size_in_bytes < 1.1 * product, "what goes from turn to turn, twice"
    for loop in (read, multiply):
        assert " while(" in loop.run.text() and " convolution(" in loop.run.text()


def test_collectives_stay_in_their_loops(pod):
    groups = collectives.find_groups(pod)
    assert [(group.name, group.members, group.crosses_hosts) for group in groups] == [
        ("fsdp", 4, True),
        ("tp", 2, False),
        ("all devices", 8, True),
        ("the devices of a host", 4, False),
        ("one device of each host", 2, True),
    ]
    wanted = [(groups[0], kind, size) for kind in ("all-reduce", "all-gather") for size in (4096, 64 << 20)]
    for loop, (_, kind, _) in zip(collectives.build_loops(Hosts(MemoryClient.hub(1)[0]), wanted), wanted, strict=True):
        assert " while(" in loop.run.text() and f" {kind}" in loop.run.text()
