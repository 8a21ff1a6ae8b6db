"""Kinds of what a layer keeps of the past: K and V of heads or a latent of them, in pages of a pool, or a fixed state.

Allocator, sizing, shared prefixes, drafts, layouts and `lockstep plan` ask a `KvSpec`, and assume nothing else.
"""

import abc
import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Num

from lockstep.printable import bytes_text


class KvSpec(abc.ABC):
    """The past of a sequence as one layer keeps it, on one device of a replica."""

    shareable: ClassVar[bool] = True
    """Whether sequences can read what one of them has of a prefix that they have in common."""
    revocable: ClassVar[bool] = True
    """Whether the last positions can be taken back, as a draft that was wrong needs."""

    def position_bytes(self, dtype: jnp.dtype) -> int:
        """Bytes of each position.

        Args:
            dtype: That of the pool.
        """
        return 0

    def sequence_bytes(self, dtype: jnp.dtype) -> int:
        """Bytes of a sequence beside those of its positions, however long it is."""
        return 0

    @abc.abstractmethod
    def step_bytes(self, context: float, dtype: jnp.dtype) -> float:
        """Bytes that a step of decode moves for a token that has ``context`` positions behind it."""

    @abc.abstractmethod
    def describe(self) -> str:
        """Name it in a few words, without bytes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedKv(KvSpec):
    """A `KvSpec` of rows for each position in pages of the pool, whose last two axes are ``shape``.

    Args:
        kv_heads: The number of key/value heads. A kernel may need more and wider heads than the model has, padded with
            zeros.
        head_size: The size of a head in elements.
        value_size: The first elements of K that are V too, where K is a latent of both (DeepSeek-AI 2024,
            https://arxiv.org/abs/2405.04434, section 2.1); None where V has a row of its own, as large as K.
        window: The positions that a query attends to; None for all. Those before it keep their pages.
        stored: The numbers of a position that the pool has for it, where these are more than its own.
    """

    kv_heads: int
    head_size: int
    value_size: int | None = None
    window: int | None = None
    stored: int | None = None

    @property
    def parts(self) -> int:
        """The rows of a head at a position: K and V, or the latent alone."""
        return 2 if self.value_size is None else 1

    @property
    def shape(self) -> tuple[int, int]:
        """The rows of a position, and their size: K of head ``h`` is row ``2 * h``, V the next; one latent a row."""
        return self.parts * self.kv_heads, self.head_size

    def holding(self, kept: "PagedKv") -> "PagedKv":
        """The rows of a layer with other heads, whose numbers are the first of as many as these have."""
        return dataclasses.replace(kept, stored=None if kept.shape == self.shape else math.prod(self.shape))

    def position_bytes(self, dtype: jnp.dtype) -> int:
        return (self.stored or math.prod(self.shape)) * dtype.itemsize

    def step_bytes(self, context: float, dtype: jnp.dtype) -> float:
        positions = context if self.window is None else min(context, float(self.window))
        return math.prod(self.shape) * dtype.itemsize * positions

    def describe(self) -> str:
        kind = "K and V of {} heads of {}" if self.value_size is None else "{} latent of {}"
        text, own = kind.format(self.kv_heads, self.head_size), math.prod(self.shape)
        stored = self.stored or own
        return text if stored == own else f"{text} (in pages of which {1 - own / stored:.0%} is unused)"

    def join(self, k: Num[Array, "*batch kv_head head"], v: Array) -> Num[Array, "*batch row head"]:
        """Return the rows of K and V; of a latent K, which V is a part of."""
        if self.value_size is not None:
            return k
        return jnp.stack([k, v], axis=-2).reshape(*k.shape[:-2], -1, k.shape[-1])

    def split(self, rows: Num[Array, "*batch row head"]) -> tuple[Array, Array]:
        """Return K and V ``[*batch, kv_head, head]`` of their rows."""
        if self.value_size is not None:
            return rows, rows[..., : self.value_size]
        return rows[..., 0::2, :], rows[..., 1::2, :]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FixedState(KvSpec):
    """A `KvSpec` of a state that is as large after a million positions as after one: linear attention.

    Args:
        name: The state in a few words.
        bytes: Its bytes, whatever type the pool of pages has.
    """

    # It is that of the last position alone, which cannot be taken out of a sum that has decayed.
    shareable = revocable = False
    name: str
    bytes: int

    def sequence_bytes(self, dtype: jnp.dtype) -> int:
        return self.bytes

    def step_bytes(self, context: float, dtype: jnp.dtype) -> float:
        return 2.0 * self.bytes  # read and written

    def describe(self) -> str:
        return self.name


def shareable(layers: Iterable[KvSpec]) -> bool:
    """Whether sequences of a model with these layers can share prefixes."""
    return all(layer.shareable for layer in layers)


def revocable(layers: Iterable[KvSpec]) -> bool:
    """Whether drafts can be verified in a model with these layers."""
    return all(layer.revocable for layer in layers)


def describe_kept(layers: Sequence[KvSpec], dtype: jnp.dtype) -> str:
    """Say what the layers of a model keep, its bytes, and what it rules out, for the report of the chosen sizes."""
    counts = dict[str, int]()
    for layer in layers:
        counts[layer.describe()] = counts.get(layer.describe(), 0) + 1
    kinds = ", ".join(f"{kind} in {count} layers" for kind, count in counts.items())
    sizes = {
        "position": sum(layer.position_bytes(dtype) for layer in layers),
        "sequence": sum(layer.sequence_bytes(dtype) for layer in layers),
    }
    text = f"{kinds}: " + " and ".join(f"{bytes_text(size)} a {of}" for of, size in sizes.items() if size)
    ruled_out = {"prefixes are not shared": shareable(layers), "drafts are not verified": revocable(layers)}
    return "; ".join([text, *(consequence for consequence, possible in ruled_out.items() if not possible)])
