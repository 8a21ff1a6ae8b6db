"""Low-rank adapters of the weights of linear layers (LoRA, Hu et al. 2021, https://arxiv.org/abs/2106.09685)."""

import dataclasses
from collections.abc import Callable
from typing import Final

import equinox as eqx
import haliax as hax
import jax.numpy as jnp
from haliax import NamedArray
from haliax.axis import AxisSelection
from jaxtyping import Array

RANK: Final = "lora_rank"
"""The name of the axis between the two factors of an adapter; no mesh axis splits it."""


class LowRankPair(eqx.Module):
    """The two factors of an adapter."""

    a: NamedArray
    """From the inputs of the layer to the rank."""
    b: NamedArray
    """From the rank to the outputs of the layer."""


class AdaptedWeight(eqx.Module):
    """A weight with an adapter beside it: the layer computes ``x W + scale (x A) B``, and never makes ``A B``."""

    weight: NamedArray
    pair: LowRankPair
    scale: float = eqx.field(static=True)


type Weight = NamedArray | AdaptedWeight
"""What a linear layer multiplies with."""


def linear(x: NamedArray, weight: Weight, axis: AxisSelection) -> NamedArray:
    """Returns the product of an input and a weight.

    Args:
        x: The input.
        weight: The weight, with or without an adapter.
        axis: The axes that the two have in common.
    """
    if isinstance(weight, NamedArray):
        return hax.dot(x, weight, axis=axis)
    # Sharded as the rows are, so that XLA gathers A, which is small, and not x.
    low = hax.auto_sharded(hax.dot(x, weight.pair.a, axis=axis) * weight.scale)
    return hax.dot(x, weight.weight, axis=axis) + hax.dot(low, weight.pair.b, axis=RANK)


def unchanged(block: Array) -> Array:
    """Returns its argument."""
    return block


@dataclasses.dataclass(frozen=True)
class MergeLora:
    """Assembles a weight with a low-rank adapter (https://arxiv.org/abs/2106.09685, eq. 3), summed in float32.

    Args:
        equation: The einsum of the two factors that gives the axes of the weight.
        scale: The factor of their product.
        then: What is done to the sum.
    """

    equation: str
    scale: float
    then: Callable[[Array], Array] = unchanged

    def __call__(self, weight: Array, a: Array, b: Array) -> Array:
        """The merged weight, float32."""
        delta = jnp.einsum(self.equation, a.astype(jnp.float32), b.astype(jnp.float32))
        return self.then(weight.astype(jnp.float32) + self.scale * delta)
