"""Logits in float32, and their gradient in the dtype of the model."""

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.models.named_block import float32_logits

BATCH, EMBED, VOCAB = hax.Axis("batch", 4), hax.Axis("embed", 16), hax.Axis("vocab", 24)


@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 1e-5), (jnp.bfloat16, 2.0**-6)])
def test_the_gradient_is_that_of_the_logits(dtype, tolerance):
    draw = np.random.default_rng(0)
    x, weights, head = (
        hax.named(draw.standard_normal([axis.size for axis in axes]).astype(np.float32), axes)
        for axes in ((BATCH, EMBED), (BATCH, VOCAB), (EMBED, VOCAB))
    )

    def loss(head, x):
        logits = float32_logits(x, head)
        assert logits.dtype == jnp.float32
        return hax.sum(logits * weights).scalar()

    found = jax.grad(loss, argnums=(0, 1))(head.astype(dtype), x.astype(dtype))
    for got, want in zip(found, (x.array.T @ weights.array, weights.array @ head.array.T), strict=True):
        assert got.dtype == dtype
        np.testing.assert_allclose(got.array.astype(np.float32), want, atol=tolerance * np.abs(want).max())
