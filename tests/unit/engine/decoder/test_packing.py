"""A launch's arrays and results as one array each."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.engine.decoder.packing import pack_results, unpack
from lockstep.engine.schedule import CopyPagesBatch, DecodeBatch, DecodeResults, PrefillBatch, PromptLogprobsBatch
from lockstep.placement import make_decode_mesh
from tests.unit.engine.models import mesh_of
from tests.unit.engine.schedule.test_scheduler import capacity_of

EVERYTHING = {"penalties": 1, "min_tokens": 1, "bias_ids": 8, "allowed_ids": 8}


def filled(batch: Any) -> Any:
    """The batch with numbers of every sign and size in all arrays."""
    rng = np.random.default_rng(0)
    arrays = batch.arrays() if isinstance(batch, DecodeBatch) else dataclasses.asdict(batch)
    for array in arrays.values():
        array[...] = rng.integers(-(2**31), 2**31, array.shape, np.int64).astype(np.int32).view(array.dtype)
    return batch


@pytest.mark.parametrize(
    ("kind", "features"),
    [
        (PrefillBatch, {}),
        (CopyPagesBatch, {}),
        (PromptLogprobsBatch, {}),
        (DecodeBatch, {}),
        (DecodeBatch, EVERYTHING),
        (DecodeBatch, {"stop_ids": 0}),
    ],
)
def test_each_replica_gets_its_part_to_the_last_bit(kind: Any, features: dict[str, int]) -> None:
    capacity = capacity_of(replicas=3, slots=2, **features)
    options = (7,) if kind is DecodeBatch else ()
    batch = filled(kind.empty(capacity, *options))
    packed = batch.packed()
    assert packed.dtype == np.int32 and packed.shape[0] == 3
    arrays = batch.arrays() if kind is DecodeBatch else dataclasses.asdict(batch)
    for replica in range(3):
        found = jax.jit(lambda row: unpack(row, kind.empty(capacity, *options)))(packed[replica])
        if kind is DecodeBatch:
            assert found.pop("num_steps") == 7
        assert found.keys() == arrays.keys()
        for name, array in arrays.items():
            assert found[name].dtype == array.dtype
            np.testing.assert_array_equal(np.asarray(found[name]).view(np.int32), array[replica].view(np.int32))


@pytest.mark.parametrize("mesh", ["1,1,1", "4,1,1"])
def test_results_of_all_replicas_are_on_every_device(mesh: str) -> None:
    decode_mesh = make_decode_mesh(mesh_of(mesh), 1)
    rng = np.random.default_rng(0)
    count = decode_mesh.replicas
    tokens, top_ids = (rng.integers(0, 9, (count, 2, 3, *more), np.int32) for more in ((), (2,)))
    logprobs, top_logprobs = (rng.normal(size=each.shape).astype(np.float32) for each in (tokens, top_ids))
    given = (tokens, logprobs, 2 * logprobs, top_ids, top_logprobs)

    def program(*parts: Any) -> Any:
        return pack_results([jnp.asarray(part[0]) for part in parts], decode_mesh)

    spec = jax.sharding.PartitionSpec(decode_mesh.replica_axes or None)
    mapped = jax.shard_map(
        program,
        mesh=decode_mesh.mesh,
        in_specs=(spec,) * len(given),
        out_specs=jax.sharding.PartitionSpec(),
        check_vma=False,
    )
    packed = np.asarray(jax.jit(mapped)(*given))
    np.testing.assert_array_equal(packed, DecodeResults.of(*given).packed)
