"""How numbers of K and V are stored, and how attention multiplies with them as they are stored."""

import dataclasses
from typing import Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped


@runtime_checkable
class KvFormat(Protocol):
    """A number format of the KV cache. It is static: two formats are equal when they compute the same."""

    def stored_head_size(self, head_size: int) -> int:
        """The size in elements of a stored head whose K or V has ``head_size`` elements."""

    def pack(self, kv: Float[Array, "*batch head"]) -> Shaped[Array, "*batch stored_head"]:
        """Converts K or V to the format."""

    def scores(
        self,
        q: Float[Array, "sequence kv_head query head"],
        k: Shaped[Array, "sequence kv_head position stored_head"],
        scale: float,
    ) -> Float[Array, "sequence kv_head query position"]:
        """Computes ``scale * q @ k`` in float32."""

    def weigh(
        self,
        weights: Float[Array, "sequence kv_head query position"],
        v: Shaped[Array, "sequence kv_head position stored_head"],
        dtype: jnp.dtype,
    ) -> tuple[Float[Array, "sequence kv_head query position"], Float[Array, "sequence kv_head position head"]]:
        """Returns two factors of one dtype whose product over positions is the weighted sum of V.

        Args:
            weights: The softmax weights, or a multiple of them, in float32.
            v: The stored V.
            dtype: The dtype of the queries.
        """


@dataclasses.dataclass(frozen=True)
class FloatKv:
    """K and V unchanged, in the floating-point dtype of the pool."""

    def stored_head_size(self, head_size: int) -> int:
        """The head size itself."""
        return head_size

    def pack(self, kv: Array) -> Array:
        """K or V unchanged."""
        return kv

    def scores(self, q: Array, k: Array, scale: float) -> Array:
        """One matrix product, accumulated in float32."""
        return jnp.einsum("skqh,skth->skqt", q, k, preferred_element_type=jnp.float32) * scale

    def weigh(self, weights: Array, v: Array, dtype: jnp.dtype) -> tuple[Array, Array]:
        """The weights in the dtype of V, and V."""
        return weights.astype(v.dtype), v
