"""The block: norms, rotary embeddings, activations and scales, as functions on plain arrays.

`lockstep.models.layers` computes a layer with these.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Final, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from lockstep.placement import matmul

ACTIVATIONS: Final[dict[str, Callable[[Array], Array]]] = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}
"""The activation of a gated MLP by `Variant.activation`."""

UNGATED: Final[dict[str, Callable[[Array], Array]]] = {"relu2": lambda x: jax.lax.square(jax.nn.relu(x))}
"""The activation of an MLP without a gate, but for `xielu`, which has parameters."""

type Fix = Callable[[Any], Any]
"""The identity, with which ``numerics: exact`` marks a number that no compiler may join with what is computed of it: a
product with the sum that it goes into (FMA), a rounding with the widening that follows (XLA drops both)."""

type Elementwise = Callable[[Callable[[Array], Array], Array], Array]
"""Applies a function of single numbers to an array."""


def document_starts(segment_ids: Int[Array, "... position"]) -> Int[Array, "... position"]:
    """Return for each token of packed rows the place in its row where its document begins."""
    index = jnp.arange(segment_ids.shape[-1])
    first = (segment_ids != jnp.roll(segment_ids, 1, axis=-1)) | (index == 0)
    return jax.lax.cummax(jnp.where(first, index, 0), axis=segment_ids.ndim - 1)


@dataclasses.dataclass(frozen=True)
class Norm:
    """RMSNorm in float32 (Zhang & Sennrich 2019, https://arxiv.org/abs/1910.07467, eq. 4), but for its weight.

    Args:
        epsilon: The number added to the mean square.
        offset: The number added to the weight, which is then multiplied in float32: 1 in Gemma.
        float32: Whether the weight is multiplied in float32 without one, too.
        centered: Whether the mean is subtracted first, as in LayerNorm (Ba et al. 2016,
            https://arxiv.org/abs/1607.06450), and the weight multiplied in float32.
    """

    epsilon: float | Array
    offset: float | Array = 0.0
    centered: bool = False
    float32: bool = False

    def with_epsilon(self, epsilon: float | Array | None) -> Self:
        """The norm with another number added to the mean square; None for the same."""
        return self if epsilon is None else dataclasses.replace(self, epsilon=epsilon)

    def __call__(
        self,
        x: Float[Array, "..."],
        weight: Float[Array, "..."] | None,
        *,
        mean: Callable[[Array], Array] | None = None,
        fix: Fix = lambda x: x,
    ) -> Float[Array, "..."]:
        """Apply the norm.

        Args:
            x: The input, whose last axes are those of the weight.
            weight: The weight; None for no norm.
            mean: The mean over the weight's axes, which are kept; None where they are all on this device.
        """
        if weight is None:
            return x
        if mean is None:
            mean = functools.partial(jnp.mean, axis=tuple(range(-weight.ndim, 0)), keepdims=True)
        wide = x.astype(jnp.float32)
        if self.centered:
            wide = fix(wide - mean(wide))
        squares = jax.lax.square(wide)  # a product would add up gradients in another order
        wide = wide * fix(jax.lax.rsqrt(mean(squares) + self.epsilon))
        if isinstance(self.offset, float) and self.offset == 0 and not (self.centered or self.float32):
            return fix(wide.astype(x.dtype)) * weight
        return (wide * (self.offset + weight.astype(jnp.float32))).astype(x.dtype)


def gated_norm(x: Float[Array, "*batch embed"], down: Any, up: Any) -> Float[Array, "*batch embed"]:
    """Return what a norm gave, times a gate of low rank that it makes itself (Levanter's Snowball).

    Args:
        down: The matrix ``[embed, rank]``; None for no gate.
        up: The matrix ``[rank, embed]``.
    """
    return x if down is None else x * jax.nn.sigmoid(matmul(jax.nn.silu(matmul(x, down)), up))


def unit_norm(x: Float[Array, "... head"], epsilon: float | None) -> Float[Array, "... head"]:
    """Apply an RMSNorm that has no weight; with ``epsilon`` None none."""
    return x if epsilon is None else Norm(epsilon)(x, jnp.ones(x.shape[-1], x.dtype))


def exclusive(attended: Float[Array, "... head"], v: Float[Array, "... head"]) -> Float[Array, "... head"]:
    """Return attention's output less its part along the value of the query's own position.

    Exclusive self attention (Zhai 2026, https://arxiv.org/abs/2603.09078).
    """
    along, square = (jnp.sum(vector * v, axis=-1, keepdims=True) for vector in (attended, v))
    return attended - along / (square + 1e-6) * v


def head_gates(logits: Array) -> Array:
    """Return the factors of heads: 1 where the logit is 0, and from 0 to 2."""
    return 2 * jax.nn.sigmoid(logits)


def rotate(
    x: Float[Array, "... head"],
    cos: Float[Array, "... pair"],
    sin: Float[Array, "... pair"],
    *,
    fix: Fix = lambda x: x,
) -> Float[Array, "... head"]:
    """Apply rotary position embeddings in float32, half-split as in Hugging Face's ``rotate_half``.

    RoFormer (Su et al. 2021, https://arxiv.org/abs/2104.09864, section 3.4.2).

    Args:
        x: The heads; where the angles are fewer than half of one, its last elements are not rotated.
    """
    pairs = cos.shape[-1]
    low, high, *rest = jnp.split(x.astype(jnp.float32), list(range(pairs, x.shape[-1], pairs)[:2]), axis=-1)
    low_cos, high_sin, high_cos, low_sin = fix((low * cos, high * sin, high * cos, low * sin))
    return jnp.concatenate([low_cos - high_sin, high_cos + low_sin, *rest], axis=-1).astype(x.dtype)


def even_first(x: Float[Array, "... head"], rotated: int) -> Float[Array, "... head"]:
    """Return heads with the even elements of the first ``rotated`` before the odd ones, for `rotate`.

    Scores are the same in any order that queries and keys have in common.
    """
    pairs = x[..., :rotated].reshape(*x.shape[:-1], -1, 2)
    return jnp.concatenate([pairs[..., 0], pairs[..., 1], x[..., rotated:]], axis=-1)


class Rotary(NamedTuple):
    """Cosines and sines of rotary angles; a row axis may have size 1, and the first ones may be left out."""

    cos: Float[Array, "... half_head"]
    sin: Float[Array, "... half_head"]
    factor: Float[Array, "... 1"] | None = None
    """The factor of queries; None for 1."""

    @property
    def of_queries(self) -> tuple[Array, Array]:
        """Cosines and sines that rotate queries and multiply them by their factor."""
        return (self.cos, self.sin) if self.factor is None else (self.cos * self.factor, self.sin * self.factor)


type QueryFactors = tuple[Float[np.ndarray, " entry"], int]
"""The factors of queries by their position, and the number of positions that each of them has."""


def rope_angles(
    positions: Array, frequencies: list[Any], factors: list[QueryFactors] | None = None
) -> Float[Array, "... half"]:
    """Return rotary angles in float32 radians, with an axis for the kinds in front where there are several.

    Args:
        frequencies: For each kind of layer the radians per token ``[half]``; those of smaller heads get zeros behind.
        factors: For each kind the factors of queries, which are the last column of the angles then.
    """
    widest = max(map(len, frequencies))
    padded = [rope if len(rope) == widest else np.pad(rope, (0, widest - len(rope))) for rope in frequencies]
    angles = [positions[..., None].astype(jnp.float32) * rope for rope in padded]
    if factors is not None:
        columns = [jnp.asarray(table)[positions // count][..., None] for table, count in factors]
        angles = [jnp.concatenate(parts, axis=-1) for parts in zip(angles, columns, strict=True)]
    return angles[0] if len(angles) == 1 else jnp.stack(angles)


def scale_queries(q: Float[Array, "... head"], scale: float | None) -> Float[Array, "... head"]:
    """Return queries for which attention, whose own factor is ``head ** -0.5``, has the given one.

    Args:
        scale: The factor of attention scores; None for attention's own.
    """
    return q if scale is None else q * jnp.asarray(scale * q.shape[-1] ** 0.5, q.dtype)


def scaled(x: Float[Array, "..."], scale: float | None) -> Float[Array, "..."]:
    """Return an array times a factor in the array's dtype.

    Args:
        scale: The factor; None for 1.
    """
    return x if scale is None else x * jnp.asarray(scale, x.dtype)


def hidden(
    activation: str,
    up: Array,
    gate: Array | None,
    xielu_parameters: tuple[Any, ...] = (),
    elementwise: Elementwise | None = None,
) -> Array:
    """Return the hidden activations of the MLP, before the down projection.

    A gated MLP is that of GLU variants (Shazeer 2020, https://arxiv.org/abs/2002.05202, eq. 6).

    Args:
        gate: The product with ``gate``; None where there is none, and for `clamped_swiglu`, where it is in ``up``.
        xielu_parameters: The arguments of `xielu` after the first.
        elementwise: Applies the activation, which is then computed in float32 and rounded once.
    """
    if activation == "clamped_swiglu":
        return clamped_swiglu(up, elementwise)
    if activation == "xielu":
        if elementwise is None:
            return xielu(up, *xielu_parameters)
        wide = [array.astype(jnp.float32) for array in (up, *xielu_parameters)]
        return xielu(*wide, elementwise=elementwise).astype(up.dtype)
    activate, x = (UNGATED[activation], up) if gate is None else (ACTIVATIONS[activation], gate)
    if elementwise is None:
        activated = activate(x)
    else:
        activated = elementwise(lambda x: activate(x.astype(jnp.float32)).astype(x.dtype), x)
    return activated if gate is None else activated * up


def clamped_swiglu(gate_up: Array, elementwise: Elementwise | None = None) -> Array:
    """Apply the gated activation of gpt-oss (https://arxiv.org/abs/2508.10925, section 2): SwiGLU, clamped, plus gate.

    Args:
        gate_up: The pre-activations, gate and up in turns: the result is half as wide.
        elementwise: Applies functions, which are then computed in float32; the product is rounded once.
    """
    alpha, limit = 1.702, 7.0
    gate = jnp.minimum(gate_up[..., ::2], jnp.asarray(limit, gate_up.dtype))
    up = jnp.clip(gate_up[..., 1::2], -limit, limit)
    if elementwise is None:
        return (up + 1) * gate * jax.nn.sigmoid(alpha * gate)
    gate = elementwise(lambda x: x * jax.nn.sigmoid(alpha * x), gate.astype(jnp.float32))
    return (elementwise(lambda x: x + 1, up.astype(jnp.float32)) * gate).astype(gate_up.dtype)


def xielu(
    x: Array,
    p: Array,
    n: Array,
    beta: Array,
    eps: Array,
    *,
    elementwise: Elementwise = lambda function, x: function(x),
) -> Array:
    """Apply xIELU, the activation of Apertus (Huang & Schlag 2024, https://arxiv.org/abs/2411.13010).

    Args:
        p: The scalar that sets the curvature for positive inputs, before softplus.
        n: The scalar that sets the curvature for negative inputs, before softplus and the addition of ``beta``.
        beta: The scalar slope at 0.
        eps: The scalar, a small negative number, that bounds the argument of expm1 from above.
        elementwise: Applies the function.
    """
    p, n = elementwise(jax.nn.softplus, p), beta + elementwise(jax.nn.softplus, n)

    def activate(x: Array) -> Array:
        negative = (jnp.expm1(jnp.minimum(x, eps)) - x) * n + beta * x
        return jnp.where(x > 0, p * x * x + beta * x, negative).astype(x.dtype)

    return elementwise(activate, x)


def soft_cap(x: Array, cap: float | Array | None) -> Array:
    """Return scores or logits within a soft cap: ``cap * tanh(x / cap)`` (Gemma 2).

    Args:
        cap: The cap; None for none.
    """
    return x if cap is None else cap * jnp.tanh(x / cap)
