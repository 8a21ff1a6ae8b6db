"""The output layer of the trainable models."""

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import NamedArray


@jax.custom_vjp
def float32_logits(x: NamedArray, head: NamedArray) -> NamedArray:
    """Returns logits in float32, whose gradient is rounded to the dtype of ``x``.

    A gradient in float32 would double what devices exchange of the output layer's gradient.

    Args:
        x: The hidden states ``[..., embed]``.
        head: The output layer, with the axes ``embed`` and ``vocab`` in any order.

    Returns:
        The logits ``[..., vocab]``.
    """
    return hax.dot(x, head, axis="embed", preferred_element_type=jnp.float32)


def _forward(x: NamedArray, head: NamedArray) -> tuple[NamedArray, tuple[NamedArray, NamedArray]]:
    return float32_logits(x, head), (x, head)


def _backward(factors: tuple[NamedArray, NamedArray], gradient: NamedArray) -> tuple[NamedArray, NamedArray]:
    x, head = factors
    gradient = gradient.astype(jnp.result_type(x.array, head.array))
    of_x = hax.dot(gradient, head, axis="vocab").astype(x.dtype)
    # The hidden states first: the rule of JAX's own product has the gradient first, and XLA for CPUs turned it over in
    # memory, and then the result.
    of_head = hax.dot(x, gradient, axis=[axis for axis in x.axes if axis.name != "embed"]).astype(head.dtype)
    return of_x.rearrange(x.axes), of_head.rearrange(head.axes)


float32_logits.defvjp(_forward, _backward)
