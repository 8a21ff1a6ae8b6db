"""Weights in 8 bits (E4M3) with a factor for each block of 128 rows and columns, as DeepSeek V3 is published.

DeepSeek-AI 2024, https://arxiv.org/abs/2412.19437, section 3.3.2.
"""

from collections.abc import Iterable
from typing import Final

import ml_dtypes
import numpy as np
from jaxtyping import Float

FACTORS: Final = "_scale_inv"
"""The end of the name of the tensor of factors, behind that of the weight."""
BLOCK: Final = 128
"""The rows, and the columns, of a block."""


def scaled_names(names: Iterable[str]) -> set[str]:
    """The names of weights that a checkpoint has with factors."""
    stored = set(names)
    return {name for name in stored if name + FACTORS in stored}


def scaled(
    numbers: Float[np.ndarray, "row column"], factors: Float[np.ndarray, "block column_block"], first: int
) -> Float[np.ndarray, "row column"]:
    """The weights of some rows, rounded to bfloat16.

    Args:
        factors: Those of the blocks that the rows are in.
        first: The place of the first row in its block.
    """
    rows, columns = numbers.shape
    by_row = np.repeat(factors, BLOCK, axis=0)[first : first + rows]
    by_number = np.repeat(by_row, BLOCK, axis=1)[:, :columns]
    return (numbers.astype(np.float32) * by_number.astype(np.float32)).astype(ml_dtypes.bfloat16)
