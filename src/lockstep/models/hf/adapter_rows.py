"""Rows of a model with adapters as Hugging Face stores it, merged in a host's memory, without any device."""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from lockstep.models.hf.files import CheckpointFiles
from lockstep.models.hf.save_plan import SavedTensor
from lockstep.models.hf.save_writer import Read
from lockstep.models.lora import MODULES, LoraConfig

type ReadPair = Callable[[str, int], tuple[np.ndarray, np.ndarray]]
"""Returns the two factors of an adapter by the name of the linear layer and the number of the layer."""


def stored_factors(a: np.ndarray, b: np.ndarray) -> tuple[Float[np.ndarray, "rank in"], Float[np.ndarray, "out rank"]]:
    """Returns the factors of one layer's adapter as PEFT stores them, ``lora_A.weight`` and ``lora_B.weight``.

    Args:
        a: The first factor, its last axis the rank.
        b: The second factor, its first axis the rank.
    """
    rank = len(b)
    return a.reshape(-1, rank).T, b.reshape(rank, -1).T


def merged_rows(base: str, dtype: str, lora: LoraConfig, read_pair: ReadPair) -> Read:
    """Returns a function that reads rows of the base model's checkpoint and adds what the adapters add.

    Args:
        base: The directory or URL of the base model's checkpoint.
        dtype: The float type in which training had its weights.
        lora: The adapters.
        read_pair: Reads the factors of an adapter, in float32; threads may share it.

    Raises:
        ConfigError: The checkpoint cannot be read.
    """
    files = CheckpointFiles(base)
    adapted = {f"layers.stacked.{MODULES[name][0]}": name for name in lora.modules}

    def read(tensor: SavedTensor, start: int, stop: int) -> np.ndarray:
        inner = tensor.shape[0] // tensor.rows
        first, last = start * inner, stop * inner
        rows = files.read(tensor.name, first, last).astype(jnp.dtype(dtype))
        if tensor.parameter.path in adapted:
            assert tensor.layer is not None, "adapters are of layers"
            low, high = stored_factors(*read_pair(adapted[tensor.parameter.path], tensor.layer))
            rows = rows.astype(np.float32) + np.float32(lora.scale) * (high[first:last] @ low)
        return rows.astype(tensor.dtype)

    return read
