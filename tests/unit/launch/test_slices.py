"""The table of slices: names, chips, hosts. The compiler counts them too, in tests/unit/xla/test_topology.py."""

import pytest

from lockstep.launch.slices import CHIPS_PER_HOST, FAMILIES, slices, unpublished


@pytest.mark.parametrize(
    ("name", "topology", "chips", "hosts"),
    [
        ("v4-8", "2x2x1", 4, 1),
        ("v5p-8", "2x2x1", 4, 1),
        ("v5p-64", "2x4x4", 32, 8),
        ("v5litepod-8", "2x4", 8, 1),
        ("v5litepod-16", "4x4", 16, 4),
        ("v6e-1", "1x1", 1, 1),
        ("v6e-256", "16x16", 256, 64),
        ("tpu7x-8", "2x2x1", 4, 1),
        ("tpu7x-128", "4x4x4", 64, 16),
    ],
)
def test_a_name_says_how_many_chips_and_hosts(name, topology, chips, hosts):
    found = slices()[name]
    assert (found.topology, found.chips, found.hosts) == (topology, chips, hosts)


@pytest.mark.parametrize(
    ("name", "generation"),
    [
        ("tpu8t-16", "TPU 8t"), ("8i", "TPU 8i"), ("TPU 8t", "TPU 8t"), ("v8i-8", "TPU 8i"),
        ("tpu8txt", None), ("v5p-8", None), ("tpu7x-8", None), ("8x8", None),
    ],
)  # fmt: skip
def test_generations_without_published_slices_are_known_by_name(name, generation):
    assert unpublished(name) == generation


def test_no_two_slices_have_one_name_and_every_machine_exists():
    assert len(slices()) == sum(len(family.grids) for family in FAMILIES)
    for found in slices().values():
        machines = dict(found.family.machine_types)
        assert found.family.single_host <= set(found.family.grids)
        assert bool(machines) == bool(found.family.image_family) and (machines or found.family.runtime_version)
        if machines:
            assert found.chips // found.hosts in machines, found.name
        if found.hosts > 1:
            assert found.chips == found.hosts * CHIPS_PER_HOST
