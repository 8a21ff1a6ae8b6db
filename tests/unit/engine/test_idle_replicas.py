"""Replicas that are given no sequences."""

import pytest

from lockstep.engine.idle_replicas import count_active, layout_with_idle_replicas
from lockstep.errors import ConfigError
from lockstep.xla import topology
from tests.unit.engine.models import mesh_of


def test_all_replicas_decode_unless_the_layout_says_how_many_and_that_many_divide_them() -> None:
    assert count_active("training", 4) == count_active({"tensor": 1}, 4) == 4
    assert count_active({"tensor": 1, "replicas": 2}, 4) == 2
    with pytest.raises(ConfigError, match=r"4 replicas, which 3 does not divide\. Set replicas to one of \[1, 2, 4\]"):
        count_active({"tensor": 1, "replicas": 3}, 4)


def test_devices_with_memory_of_their_own_all_decode() -> None:
    pytest.importorskip("libtpu", reason="the extra [plan] brings the TPU compiler")
    assert layout_with_idle_replicas(list(mesh_of("1,2,2").devices.flat)) == {"tensor": 1, "replicas": 1}
    assert layout_with_idle_replicas(list(topology("v5p-8").devices)) is None
    assert layout_with_idle_replicas(list(mesh_of("1,1,1").devices.flat)) is None, "one device alone is not idle"
