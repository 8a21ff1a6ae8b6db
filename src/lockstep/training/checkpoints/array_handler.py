"""The writing of arrays with a checksum of each chunk, which orbax has no setting for."""

import os
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from lockstep.training.checkpoints.writers import Part, chunks_of, share_writing

OCDBT_CONFIG = {"max_inline_value_bytes": 1024, "max_decoded_node_bytes": 100_000_000, "manifest_kind": "single"}
"""As orbax has it. Shapes and codecs of an array are inline, so in the nodes of the tree, which have checksums too."""


class CheckedArrayHandler(ocp.type_handlers.ArrayHandler):
    """Arrays in zarr 3 with zstd's checksum of each chunk, which tensorstore compares whenever it reads the chunk."""

    async def serialize(self, values: Any, infos: Any, args: Any = None) -> Any:
        """Copy this process's part to its memory; what is returned writes it when it is asked for its result.

        Args:
            values: Global arrays, all that the checkpoint has; `share_writing` says who writes what of them.
            infos: Name and directory of each.
            args: Not used.
        """
        mine = [
            [(part, _shard(array, part)) for part in parts if part.process == jax.process_index()]
            for array, parts in zip(values, share_writing(values), strict=True)
        ]
        for _, shard in (each for parts in mine for each in parts):
            shard.copy_to_host_async()
        writes = []
        for array, info, parts in zip(values, infos, mine, strict=True):
            copies = [(part.of_array(), part.of_shard(np.asarray(shard))) for part, shard in parts]
            writes.append((ts.Spec(_spec(info, array, chunks_of(array))), copies))
        return [_Write(writes, infos[0].ts_context)] if writes else []


class _Write:
    """The write of a process's part, as orbax expects it: a future.

    Args:
        arrays: Specification of each array, and the indices and numbers to write of it.
    """

    def __init__(self, arrays: Sequence[tuple[Any, list[tuple[Any, np.ndarray]]]], context: Any) -> None:
        self._arrays, self._context = list(arrays), context

    def result(self, timeout: float | None = None) -> None:
        """Write, in the calling thread.

        Args:
            timeout: Not used: who waits gives the save up, see `Checkpointer`.
        """
        arrays, self._arrays = self._arrays, []
        transaction = ts.Transaction(atomic=True)
        for spec, copies in arrays:
            options: dict[str, Any] = {"context": self._context, "transaction": transaction}
            if jax.process_index() == 0:
                ts.open(spec, create=True, open=True, **options).result()
            store = ts.open(spec, open=True, assume_metadata=True, **options).result()
            for index, data in copies:
                # The copy changes no more, so the chunks may refer to it.
                store[index].write(data, can_reference_source_data_indefinitely=True).result()
        transaction.commit_sync()


def _shard(array: jax.Array, part: Part) -> jax.Array:
    """The shard of this process that has a part; a slice of it here would be a device program."""
    return next(each.data for each in array.addressable_shards if each.index == part.shard)


def _spec(info: Any, array: jax.Array, chunk: tuple[int, ...]) -> dict[str, Any]:
    """The specification of an array in tensorstore, https://google.github.io/tensorstore/driver/zarr3."""
    directory = os.fspath(info.parent_dir)
    base = directory if "://" in directory else f"file://{directory}"
    return {
        "driver": "zarr3",
        "kvstore": {
            "driver": "ocdbt",
            "base": f"{base}/ocdbt.process_{jax.process_index()}/",  # where orbax looks when it merges
            "path": f"{info.name}/",
            "config": OCDBT_CONFIG,
            "assume_config": True,
        },
        "recheck_cached_data": False,
        "recheck_cached_metadata": False,
        "store_data_equal_to_fill_value": True,  # so a chunk that is not there is damage, and no zeros
        "dtype": array.dtype.name,
        "metadata": {
            "shape": array.shape,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
            "codecs": [
                {"name": "bytes", "configuration": {"endian": "little"}},
                {"name": "zstd", "configuration": {"level": 1, "checksum": True}},
            ],
        },
    }
