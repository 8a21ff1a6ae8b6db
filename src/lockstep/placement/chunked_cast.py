"""Casts and moves a large weight piece by piece, so that the memory it takes beside its copy stays small."""

import jax
import jax.numpy as jnp

from lockstep.placement.leaf_layout import LeafLayout

PIECE_BYTES = 32 << 20
"""The most bytes that a piece of a moved weight has, once it is whole."""


def cast(array: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """``array.astype(dtype)``, written so that the compiler does not move it.

    XLA moves a conversion of a slice in front of the slice, and then out of the loop: a scan that casts a layer at a
    time begins with a copy of all layers in the other type. It does not move arithmetic. From float32 to bfloat16,
    rounding is a ``reduce_precision``, and the rest takes the upper half of each word.
    """
    if array.dtype != jnp.float32 or jnp.dtype(dtype) != jnp.bfloat16:
        return array.astype(dtype)
    words = jax.lax.bitcast_convert_type(jax.lax.reduce_precision(array, 8, 7), jnp.uint32)
    return jax.lax.bitcast_convert_type((words >> 16).astype(jnp.uint16), jnp.bfloat16)


def read_by_pieces(layout: LeafLayout, block: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """`LeafLayout.read` of a cast block, in a loop over pieces of its first axis.

    A device's block in the decode layout has the same bytes; beside it there is one piece, cast and being moved. What
    does not divide, or is split on the axis that decoding splits too, is read whole.

    Args:
        layout: The current layout of the weight.
        block: The block of this device, inside ``shard_map``.
        dtype: The dtype that the block is cast to before anything moves.
    """
    whole = jax.eval_shape(lambda array: layout.read(array.astype(dtype)), block)
    pieces = -(-whole.size * whole.dtype.itemsize // PIECE_BYTES)
    if layout == layout.decode or pieces < 2:
        return layout.read(cast(block, dtype))
    own = layout.decode_mesh.tensor if layout.tensor_dim == 0 else 1
    if layout.spec[0] and own > 1 or block.shape[0] % own:
        return layout.read(cast(block, dtype))
    # The first axis of the block is ``own`` parts, of which each device of the replica gets one; or that of the whole
    # is the blocks of several devices. A piece is some rows of every part, and ends up as some rows of every block.
    rows = block.shape[0] // own
    count = next((n for n in range(pieces, rows) if rows % n == 0), rows)  # a row at a time where there are too few
    size = rows // count
    others = whole.shape[0] // rows

    def move(index: jax.Array, out: jax.Array) -> jax.Array:
        taken = [jax.lax.dynamic_slice_in_dim(block, part * rows + index * size, size) for part in range(own)]
        piece = layout.read(cast(jnp.concatenate(taken) if own > 1 else taken[0], dtype))
        placed = piece.reshape(others, size, *whole.shape[1:])
        return jax.lax.dynamic_update_slice_in_dim(out, placed, index * size, axis=1)

    out = jnp.zeros((others, rows, *whole.shape[1:]), whole.dtype)
    return jax.lax.fori_loop(0, count, move, out).reshape(whole.shape)
