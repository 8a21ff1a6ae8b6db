"""Attention whose bits are the same in prefill, decode, verify and training (`lockstep.placement.device.exact`)."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from lockstep.errors import ConfigError
from lockstep.models.attention.contiguous_kv import chunk_reader
from lockstep.models.attention.softmax import ReadChunk, ScoreModifier
from lockstep.models.attention.xla import Cache, Rows, XlaAttention
from lockstep.placement.device import COLUMNS, TERMS, barrier, by_tile, elementwise, tree_sum

BLOCK = 128
"""Keys whose scores are computed together, from a multiple of it on."""


def attend_exact(
    q: Float[Array, "sequence query kv_head group head"],
    position: Int[Array, "sequence query"],
    read: ReadChunk,
    num_blocks: int,
    modifier: ScoreModifier,
    sinks: Float[Array, "kv_head group"] | None = None,
) -> Float[Array, "sequence query kv_head group value"]:
    """Attend each query to all positions up to and including its own; softmax in float32, block by block of keys.

    A block of which a query sees nothing adds exactly 0, so that the bits do not depend on the length of others.

    Args:
        read: Returns K and V of a block ``[sequence, kv_head, BLOCK, head]``; V that no query sees must be finite, and
            may be narrower.
        sinks: The score of each query head for nothing, which takes a part of its softmax.
    """
    sequences, queries, kv_heads, group, head = q.shape
    rows, value = queries * group, jax.eval_shape(read, 0)[1].shape[-1]

    def tiles(x: Array, axis: int, tile: int) -> Array:
        """Split an axis of rows into tiles, which come first."""
        x = jnp.pad(x, [(0, -rows % tile if i == axis else 0) for i in range(x.ndim)])
        x = x.reshape(*x.shape[:axis], -1, tile, *x.shape[axis + 1 :])
        return jnp.moveaxis(x, axis, 0)

    # Whose exponentials are there before any block: 1, with themselves as the maximum.
    lowest = jnp.full((kv_heads, group), jnp.finfo(jnp.float32).min) if sinks is None else sinks.astype(jnp.float32)
    sink_rows = jnp.tile(lowest, (1, queries))
    by_head = q.transpose(0, 2, 1, 3, 4).reshape(sequences, kv_heads, rows, head)

    def attend(inputs: tuple[Array, Array, Array]) -> Array:
        q, position, largest = inputs

        def add(index: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            running_max, sum_exp, out = state
            k, v = read(index)
            scores = _dot(q, k.astype(q.dtype), 3) * head**-0.5
            if modifier.soft_cap is not None:
                scores = modifier.soft_cap * elementwise(jnp.tanh, scores / modifier.soft_cap)
            distance = position[..., None] - (index * BLOCK + jnp.arange(BLOCK))
            visible = distance >= 0 if modifier.window is None else (distance >= 0) & (distance < modifier.window)
            scores = barrier(jnp.where(visible[:, None], scores, -jnp.inf))
            new_max = jnp.maximum(running_max, scores.max(axis=-1))
            rescale = elementwise(jnp.exp, running_max - new_max)
            weights = elementwise(jnp.exp, scores - new_max[..., None])
            added = _dot(weights.astype(q.dtype), v.astype(q.dtype), 2)
            old_sum, old_out = barrier((sum_exp * rescale, out * rescale[..., None]))
            return barrier((new_max, old_sum + tree_sum(weights), old_out + added))

        largest = jnp.broadcast_to(largest, q.shape[:3])
        empty = largest, jnp.full_like(largest, sinks is not None), jnp.zeros((*q.shape[:3], value), jnp.float32)
        count = jnp.minimum(jnp.max(position) // BLOCK + 1, num_blocks)
        _, sum_exp, out = jax.lax.fori_loop(0, count, add, empty)
        return barrier((out / sum_exp[..., None]).astype(q.dtype))

    def by(tile: int) -> Array:
        inputs = tiles(by_head, 2, tile), tiles(jnp.repeat(position, group, axis=1), 1, tile), tiles(sink_rows, 1, tile)
        out = jax.lax.map(attend, inputs) if len(inputs[0]) > 1 else attend(jax.tree.map(lambda x: x[0], inputs))[None]
        return jnp.moveaxis(out, 0, 2).reshape(sequences, kv_heads, -1, value)[:, :, :rows]

    out = by_tile(by, rows, q.dtype, max(head, BLOCK))
    return out.reshape(sequences, kv_heads, queries, group, value).transpose(0, 2, 1, 3, 4)


def attend_documents(
    q: Float[Array, "sequence query kv_head group head"],
    k: Float[Array, "sequence kv_head query head"],
    v: Float[Array, "sequence kv_head query value"],
    first: Int[Array, "sequence query"],
    modifier: ScoreModifier,
    sinks: Float[Array, "kv_head group"] | None = None,
) -> Float[Array, "sequence query kv_head group value"]:
    """`attend_exact` of packed rows: each document has the bits that it has alone, wherever it begins.

    Tiles of queries, and blocks of keys, are cut at the beginning of each document, tile after tile of all rows.

    Args:
        first: The place in its row where the document of each query begins.
    """
    length = q.shape[1]
    width = min(BLOCK, length)
    place = jnp.arange(length)
    # Behind the last tile of a row come some of nothing, while others have more.
    tiles = jnp.sort(jnp.where((place - first) % width == 0, place, length), axis=1)
    begins = jnp.pad(first, ((0, 0), (0, 1)), constant_values=length)
    slices = jax.vmap(jax.lax.dynamic_slice_in_dim, (0, 0, None, None))
    q, k, v = (
        jnp.pad(array, [(0, BLOCK if axis == at else 0) for axis in range(array.ndim)])
        for array, at in ((q, 1), (k, 2), (v, 2))
    )

    def attend(index: Array, out: Array) -> Array:
        at = tiles[:, index]
        begin = jnp.take_along_axis(begins, at[:, None], axis=1)[:, 0]

        def read(block: Array | int) -> tuple[Array, Array]:
            return barrier((slices(k, begin + block * BLOCK, BLOCK, 1), slices(v, begin + block * BLOCK, BLOCK, 1)))

        position = (at - begin)[:, None] + jnp.arange(width)
        attended = attend_exact(slices(q, at, width, 0), position, read, -(-length // BLOCK), modifier, sinks)
        # What a tile has beyond the end of its document is that of the next one, whose tile comes after.
        return jax.vmap(jax.lax.dynamic_update_slice_in_dim, (0, 0, 0, None))(out, attended, at, 0)

    empty = jnp.zeros((*q.shape[:4], v.shape[3]), q.dtype)
    out = jax.lax.fori_loop(0, jnp.max(jnp.sum(tiles < length, axis=1)), attend, empty)
    return out[:, :length]


def contiguous_blocks(k: Float[Array, "sequence kv_head position head"], v: Array) -> tuple[ReadChunk, int]:
    """Return a reader of blocks of whole sequences, and the number of blocks."""
    blocks = -(-k.shape[2] // BLOCK)
    padding = ((0, 0), (0, 0), (0, blocks * BLOCK - k.shape[2]), (0, 0))
    k, v = jnp.pad(k, padding), jnp.pad(v, padding)

    def read(index: Array | int) -> tuple[Array, Array]:
        block = [jax.lax.dynamic_slice_in_dim(array, index * BLOCK, BLOCK, axis=2) for array in (k, v)]
        return barrier((block[0], block[1]))

    return read, blocks


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExactAttention(XlaAttention):
    """`XlaAttention` by `attend_exact`.

    Raises:
        ConfigError: A block of keys is not made of whole pages.
    """

    page_size: int

    def __post_init__(self) -> None:
        if BLOCK % self.page_size:
            raise ConfigError(
                f"page_size is {self.page_size}; with numerics: exact it must divide {BLOCK}, the keys that attention "
                "reads together. Set page_size to a power of two up to it, or to null."
            )

    def decode(
        self, q: Array, cache: Cache, layer: Array, page_table: Array, position: Array, active: Array,
        sinks: Array | None = None,
    ) -> Array:  # fmt: skip
        context = cache[1]
        chunk, read_chunk = context.k.shape[4], chunk_reader(context, layer, self.heads.kept.value_size)

        def read(index: Array | int) -> tuple[Array, Array]:
            k, v = read_chunk(index)
            padding = ((0, 0), (0, 0), (0, BLOCK - chunk), (0, 0))
            return barrier((jnp.pad(k, padding), jnp.pad(v, padding)))

        last = context.k.shape[1] * chunk - 1
        positions = jnp.minimum(position[:, None] + jnp.arange(q.shape[1]), last)
        return attend_exact(q, positions, read, context.k.shape[1], self.heads.modifier_of(layer), sinks)

    def prefill(
        self, q: Array, pool: Array, layer: Array, first_page: Array, rows: Rows, sinks: Array | None = None
    ) -> Array:
        start, page_table = rows
        pages = BLOCK // self.page_size
        blocks = -(-page_table.shape[1] // pages)
        padded = jnp.pad(first_page + page_table, ((0, 0), (0, blocks * pages - page_table.shape[1])))

        def read(index: Array | int) -> tuple[Array, Array]:
            k, v = self._read_kv(pool, jax.lax.dynamic_slice_in_dim(padded, index * pages, pages, axis=1))
            written = index * BLOCK + jnp.arange(BLOCK) < (start + q.shape[1])[:, None]
            return barrier((k, jnp.where(written[:, None, :, None], v, 0)))

        positions = start[:, None] + jnp.arange(q.shape[1])
        return attend_exact(q, positions, read, blocks, self.heads.modifier_of(layer), sinks)


def _dot(a: Array, b: Array, axis: int) -> Array:
    """The product of each sequence and head in float32, over the last axis of ``a`` and an axis of ``b``."""
    axes = (((3,), (axis,)), ((0, 1), (0, 1)))
    more, count = (0, -a.shape[3] % TERMS), b.shape[5 - axis]
    if a.dtype == jnp.float32:  # for other columns XLA has kernels that add in another order
        b = jnp.pad(b, [(0, -count % COLUMNS if at == 5 - axis else 0) for at in range(4)])
    a, b = (jnp.pad(array, [more if at == of else (0, 0) for at in range(4)]) for array, of in ((a, 3), (b, axis)))
    a, b = barrier((a, b))
    product = jax.lax.dot_general(a, b, axes, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
    return jnp.asarray(barrier(product)[..., :count])
