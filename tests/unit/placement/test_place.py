import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from lockstep.errors import ConfigError
from lockstep.placement import host_rows, make_mesh, place, place_argument, place_local


def aligned(values: np.ndarray) -> np.ndarray:
    """A copy that starts at a multiple of 64 bytes: the CPU backend would use such a buffer as it is."""
    buffer = np.empty(values.nbytes + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    copy = buffer[start : start + values.nbytes].view(values.dtype).reshape(values.shape)
    copy[:] = values
    return copy


def test_place_without_a_launch_and_without_an_alias() -> None:
    mesh = make_mesh()
    values = aligned(np.arange(24, dtype=np.float32).reshape(4, 6))
    expected = values.copy()
    with jax.no_execution(True):
        sharded = place(values, NamedSharding(mesh, P(None, None)))
        tree = {"a": place(values, NamedSharding(mesh, P())), "b": place(np.int32(3), NamedSharding(mesh, P()))}
    values[:] = -1
    np.testing.assert_array_equal(np.asarray(sharded), expected)
    np.testing.assert_array_equal(np.asarray(tree["a"]), expected)
    assert tree["b"].shape == () and int(tree["b"]) == 3


def test_an_argument_of_a_launch_is_placed_without_a_launch() -> None:
    mesh = make_mesh()
    values = aligned(np.arange(mesh.size * 6, dtype=np.int32).reshape(mesh.size, 6))
    with jax.no_execution(True):
        placed = [place_argument(values, NamedSharding(mesh, spec)) for spec in (P(), P(("dp", "fsdp", "tp")))]
    for array in placed:
        np.testing.assert_array_equal(np.asarray(array), values)
        for shard in array.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), values[shard.index])
    if mesh.size == 1:
        return  # every size divides on one device
    with pytest.raises(ConfigError, match="cannot be placed"):
        place_argument(np.zeros((mesh.size + 1, 2), np.int32), NamedSharding(mesh, P(("dp", "fsdp", "tp"))))


def test_one_host_holds_all_rows() -> None:
    sharding = NamedSharding(make_mesh(), P(("dp", "fsdp")))
    n_rows = 4 * jax.device_count()
    assert host_rows(sharding, n_rows) == slice(0, n_rows)
    rows = np.arange(n_rows * 3, dtype=np.int32).reshape(n_rows, 3)
    np.testing.assert_array_equal(np.asarray(place_local(rows, sharding, n_rows)), rows)


def test_wrong_number_of_local_rows() -> None:
    sharding = NamedSharding(make_mesh(), P(("dp", "fsdp")))
    n_rows = 4 * jax.device_count()
    with pytest.raises(ConfigError, match=rf"3 local rows .* rows 0 to {n_rows}"):
        place_local(np.zeros((3, 2)), sharding, n_rows)


def test_indivisible_rows_name_the_mesh() -> None:
    mesh = make_mesh()
    if mesh.shape["fsdp"] == 1:
        pytest.skip("every size divides on one device")
    with pytest.raises(ConfigError, match=r"shape \(1,\).*fsdp.*mesh_shape"):
        place(np.zeros(1), NamedSharding(mesh, P("fsdp")))
