"""Estimates of a Kullback-Leibler divergence from samples (Schulman 2020, http://joschu.net/blog/kl-approx.html)."""

from collections.abc import Callable, Mapping
from typing import Final

import jax.numpy as jnp
from jaxtyping import Array, Float


def k1(log_ratio: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Return the negative log-ratio: unbiased, of high variance, negative for half of the samples.

    Args:
        log_ratio: For each sample of ``p``, the log of ``q / p``, where the divergence is that of ``p`` from ``q``.
    """
    return -log_ratio


def k2(log_ratio: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Return half the squared log-ratio: of low variance, biased.

    Args:
        log_ratio: As for `k1`.
    """
    return jnp.square(log_ratio) / 2


def k3(log_ratio: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Return the ratio less 1 less the log-ratio: unbiased, never negative (equation 4 of arXiv 2402.03300).

    Args:
        log_ratio: As for `k1`.
    """
    return jnp.expm1(log_ratio) - log_ratio


KL_ESTIMATORS: Final[Mapping[str, Callable[[Float[Array, "*shape"]], Float[Array, "*shape"]]]] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
}
"""The estimators by their names."""
