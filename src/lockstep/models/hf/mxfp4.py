"""Weights in MXFP4, as gpt-oss is published: 4-bit floats in blocks of 32 that share a power of two.

Source: OCP Microscaling Formats (MX) Specification 1.0, sections 5.3.3 (E2M1), 5.4.1 (E8M0) and 6.
"""

from collections.abc import Iterable
from typing import Final

import ml_dtypes
import numpy as np

BLOCKS: Final = "_blocks"
"""The end of the name of a tensor of packed numbers ``[expert, output, block, 16]``."""
SCALES: Final = "_scales"
"""The end of the name of the tensor of their exponents ``[expert, output, block]``."""
BLOCK: Final = 32
"""The numbers of a block."""
_E2M1: Final = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
_VALUES: Final = np.concatenate([_E2M1, -_E2M1])
_BIAS: Final = 127
_NAN: Final = 255


def packed_names(names: Iterable[str]) -> set[str]:
    """The names of weights that a checkpoint has packed, without the ends of their two tensors."""
    stored = set(names)
    stems = {name.removesuffix(BLOCKS) for name in stored if name.endswith(BLOCKS)}
    return {stem for stem in stems if stem + SCALES in stored}


def unpack(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The numbers of packed weights, exact in bfloat16: ``[expert, input, output]``.

    Args:
        blocks: uint8 ``[expert, output, block, 16]``: two numbers in each byte, the first in its low bits.
        scales: uint8 ``[expert, output, block]``: exponents of 2, plus 127; 255 makes a block NaN.
    """
    pairs = np.stack([blocks & 0xF, blocks >> 4], axis=-1).reshape(*scales.shape, BLOCK)
    powers = np.where(scales == _NAN, np.nan, np.ldexp(np.float32(1), np.minimum(scales, 254).astype(np.int32) - _BIAS))
    numbers = _VALUES[pairs] * powers[..., None].astype(np.float32)
    outputs = numbers.reshape(*scales.shape[:2], -1).astype(ml_dtypes.bfloat16)
    return np.ascontiguousarray(outputs.transpose(0, 2, 1))
