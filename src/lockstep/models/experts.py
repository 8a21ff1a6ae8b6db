"""Mixtures of experts on plain arrays: their configuration and the router; `lockstep.models.expert_mlps` has the MLPs.

The trainable model and the engine's decoder compute with these. Nothing has a capacity and no token is dropped: what a
token's experts answer does not depend on the other tokens.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
import scipy.special
from jaxtyping import Array, Bool, Float, Int

from lockstep.config_fields import check_fields
from lockstep.errors import ConfigError, check_at_least
from lockstep.limits import LAYERS
from lockstep.models.weights import MLP_WEIGHTS, SPARSE_WEIGHTS
from lockstep.placement.device import barrier, elementwise, product, tree_sum

Scoring = Literal["softmax", "sigmoid", "biased_sigmoid"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experts:
    """The experts that take the place of a layer's MLP.

    Raises:
        ConfigError: A value cannot work.

    Example:
        >>> lockstep.models.Experts(num_experts=128, num_experts_per_tok=8).expected_hits(1)
        8.0
    """

    num_experts: int = 8
    """The number of experts of each layer."""
    num_experts_per_tok: int = 2
    """The number of experts that a token is given to: those with its largest router scores, the lower number where
    two are equal."""
    intermediate_dim: int | None = None
    """The width of an expert's MLP. Null for the model's ``intermediate_dim``."""
    mlp_only_layers: tuple[int, ...] = ()
    """The numbers of the layers, from 0, that have an MLP of the model's ``intermediate_dim`` instead of experts."""
    shared_intermediate_dim: int | None = None
    """The width of a shared expert, an MLP that every token is given to beside its own experts. Null for none."""
    shared_router: bool = False
    """Whether the shared expert's answer is multiplied by the sigmoid of a logit of the token (Qwen2-MoE)."""
    norm_topk_prob: bool = True
    """Whether the weights of a token's experts are divided by their sum."""
    scoring: Scoring = "softmax"
    """The weights of experts, of the router's logits. But for ``softmax`` the router has a bias, which chooses experts
    and weighs none (https://arxiv.org/abs/2408.15664): with ``sigmoid`` it is added to the logits (Snowball), with
    ``biased_sigmoid`` to their sigmoid (DeepSeek V3, GLM-4.5)."""
    groups: int = 1
    """The number of groups of experts, of as many each: a token's experts are of the ``groups_per_tok`` whose two best
    scores have the largest sums (DeepSeek V3, https://arxiv.org/abs/2412.19437, section 2.1.2), or of a softmax the
    largest best (DeepSeek V2, https://arxiv.org/abs/2405.04434, section 2.2.2)."""
    groups_per_tok: int = 1
    """The number of groups that a token's experts are of."""
    routed_scaling_factor: float = 1.0
    """The factor of the weights."""
    own_norms: ClassVar[bool] = False
    """Whether the shared expert and the others have norms of their own, before and after, and the router a scale of its
    inputs and a factor of each expert (Gemma 4)."""
    load_balancing_coef: float = 0.001
    """The factor of the load-balancing loss (Switch Transformers, https://arxiv.org/abs/2101.03961, equation 4), summed
    over a token's experts as in transformers and Levanter: it is their number where all are used evenly. 0 for none."""
    router_z_coef: float = 0.0
    """The factor of the router z-loss (ST-MoE, https://arxiv.org/abs/2202.08906, equation 5). 0 for none."""

    def __post_init__(self) -> None:
        check_fields(self, "experts.")
        sizes = ("num_experts", "num_experts_per_tok", "intermediate_dim", "shared_intermediate_dim", "groups")
        check_at_least(self, 1, *sizes, "groups_per_tok", block="experts.")
        if self.num_experts > LAYERS:
            raise ConfigError(f"experts.num_experts is {self.num_experts}; at most {LAYERS} are possible. Correct it.")
        if self.num_experts_per_tok > self.num_experts:
            raise ConfigError(
                f"experts.num_experts_per_tok is {self.num_experts_per_tok} and experts.num_experts is "
                f"{self.num_experts}; a token has no more experts than there are. Lower num_experts_per_tok."
            )
        self._check_groups()
        if self.shared_router and self.shared_intermediate_dim is None:
            raise ConfigError(
                "experts.shared_router is true and experts.shared_intermediate_dim is null: there is no shared expert. "
                "Set its width, or shared_router to false."
            )
        only = self.mlp_only_layers
        if list(only) != sorted(set(only)) or any(layer < 0 for layer in only):
            raise ConfigError(
                f"experts.mlp_only_layers is {list(only)}; it must be numbers of layers from 0, each once, in order. "
                "Correct it."
            )
        factors = ("load_balancing_coef", "router_z_coef", "routed_scaling_factor")
        check_at_least(self, 0, *factors, block="experts.", fix=". Use 0 for none.")

    def _check_groups(self) -> None:
        size = self.num_experts // self.groups
        if self.groups > 1 and (self.num_experts % self.groups or size < 2):
            raise ConfigError(
                f"experts.groups is {self.groups} and experts.num_experts is {self.num_experts}; groups have the same "
                "number of experts, two or more. Set groups to a divisor of num_experts, or to 1 for none."
            )
        if self.groups_per_tok > self.groups or self.num_experts_per_tok > self.groups_per_tok * size:
            raise ConfigError(
                f"experts.groups_per_tok is {self.groups_per_tok}, of {self.groups} groups of {size} experts, and "
                f"experts.num_experts_per_tok is {self.num_experts_per_tok}; a token's experts are of so many groups. "
                "Set groups_per_tok to a number of groups that has enough experts."
            )

    def check_layers(self, num_layers: int) -> None:
        """Refuse ``mlp_only_layers`` that are not layers of a model, or all of them."""
        only = self.mlp_only_layers
        if only and (only[-1] >= num_layers or len(only) == num_layers):
            raise ConfigError(
                f"experts.mlp_only_layers is {list(only)} and num_layers is {num_layers}, counted from 0; a layer must "
                "be left that has experts. Correct it, or set experts to null."
            )

    def layers_of(self, weight: str, layers: Sequence[int]) -> Sequence[int]:
        """The layers that have a weight, of those of a model."""
        only = self.mlp_only_layers
        if only and weight in MLP_WEIGHTS:
            return only
        if only and weight in SPARSE_WEIGHTS:
            return tuple(layer for layer in layers if layer not in only)
        return layers

    def places(self, num_layers: int) -> tuple[np.ndarray, np.ndarray]:
        """Whether each layer has an MLP instead of experts, and its place among the layers of its kind."""
        dense = np.isin(range(num_layers), self.mlp_only_layers)
        return dense, np.where(dense, np.cumsum(dense), np.cumsum(~dense)) - 1

    def expected_hits(self, tokens: float) -> float:
        """The expected number of distinct experts that some tokens are given to, where experts are used evenly.

        ``E (1 - (1 - k / E) ** tokens)``, with k of E experts for a token.
        """
        missed = 1 - self.num_experts_per_tok / self.num_experts
        return float(self.num_experts * (1 - missed**tokens))

    def unevenness(self, tokens: float, devices: int) -> tuple[float, float]:
        """The factors of the mean by which the busiest of ``devices`` with whole experts reads and multiplies more.

        Each of n devices has ``Binomial(E / n, expected_hits / E)`` experts that are hit and ``Binomial(k tokens, 1 /
        n)`` rows: the expected maxima of n such numbers, over their means.
        """
        own, rows = self.num_experts // devices, max(1, round(self.num_experts_per_tok * tokens))
        hit = self.expected_hits(tokens) / self.num_experts
        read = _maximum(own, hit, devices) / (own * hit)
        return read, _maximum(rows, 1 / devices, devices) * devices / rows


def _maximum(trials: int, chance: float, devices: int) -> float:
    """The expected maximum of ``devices`` independent binomial numbers."""
    return float(np.sum(1 - scipy.special.bdtr(np.arange(trials), trials, chance) ** devices))


class Routing(NamedTuple):
    """The experts of tokens."""

    experts: Int[Array, "token choice"]
    """Their numbers, that with the largest score first."""
    weights: Float[Array, "token choice"]
    """The factors of what they answer, float32."""
    logits: Float[Array, "token expert"]
    """The router's logits, float32, with its bias where that is added to them."""
    scores: Float[Array, "token expert"]
    """The numbers by which experts are chosen, the largest first."""


class RouterSums(NamedTuple):
    """Sums over tokens of what losses and metrics of a router are made of; those of several devices add up."""

    tokens: Float[Array, "..."]
    """The number of tokens."""
    counts: Float[Array, "... expert"]
    """The number of tokens that each expert was given."""
    probabilities: Float[Array, "... expert"]
    """The router's probabilities."""
    squares: Float[Array, "..."]
    """The squares of the logits' log-sum-exp."""
    compared: Float[Array, "..."]
    """The number of tokens whose experts an engine chose too."""
    differing: Float[Array, "..."]
    """The number of those whose experts are others by the largest scores."""

    @classmethod
    def of(
        cls, routing: Routing, valid: Bool[Array, " token"], engine: Int[Array, "token choice"] | None = None
    ) -> Self:
        """The sums of the tokens that are ``valid``.

        Args:
            engine: The experts that an engine chose, -1 where it chose none; None for no comparison.
        """
        compared = differing = jnp.float32(0)
        if engine is not None:
            _, own = jax.lax.top_k(routing.scores, engine.shape[-1])
            known, same = engine[:, 0] >= 0, jnp.all(jnp.sort(own) == jnp.sort(engine), axis=-1)
            compared, differing = (jnp.sum(flag, dtype=jnp.float32) for flag in (known, known & ~same))
        counted = jnp.where(valid, 1.0, 0.0)
        chosen = jax.nn.one_hot(routing.experts, routing.logits.shape[-1], dtype=jnp.float32).sum(axis=1)
        return cls(
            tokens=counted.sum(),
            counts=counted @ chosen,
            probabilities=counted @ jax.nn.softmax(routing.logits, axis=-1),
            squares=counted @ jax.nn.logsumexp(routing.logits, axis=-1) ** 2,
            compared=compared,
            differing=differing,
        )

    def loss(self, experts: Experts) -> Float[Array, "..."]:
        """The load-balancing loss and the router z-loss of each layer, with their factors."""
        tokens = jnp.maximum(self.tokens, 1.0)
        shares, probabilities = self.counts / tokens[..., None], self.probabilities / tokens[..., None]
        even = experts.num_experts * jnp.sum(shares * probabilities, axis=-1)
        return experts.load_balancing_coef * even + experts.router_z_coef * self.squares / tokens

    def metrics(self) -> dict[str, Float[Array, ""]]:
        """The entropy of the experts' load, 1 where it is even, and the share of the busiest; means over layers."""
        shares = self.counts / jnp.maximum(self.counts.sum(axis=-1, keepdims=True), 1.0)
        entropy = -jnp.sum(jax.scipy.special.xlogy(shares, shares), axis=-1) / jnp.log(max(shares.shape[-1], 2))
        return {"router/load_entropy": entropy.mean(), "router/busiest_share": shares.max(axis=-1).mean()}


def route(
    x: Float[Array, "token embed"],
    router: Float[Array, "embed expert"],
    bias: Array | None,
    experts: Experts,
    replayed: Int[Array, "token choice"] | None = None,
    *,
    factors: Float[Array, " expert"] | None = None,
    exact: bool = False,
) -> Routing:
    """Return the experts of tokens. Logits are products in float32 on every backend, for a tie decides by rounding.

    Args:
        factors: Those of the weights of experts; None for 1.
        exact: Whether the bits of a token depend on no other (``numerics: exact``).
        replayed: The experts to take, whose weights are those of these logits (R3, https://arxiv.org/abs/2510.11370,
            equation 5); -1 for those with the largest scores. None for these alone.
    """
    if exact:
        unbiased = product(x, router)
    else:
        unbiased = jnp.matmul(x.astype(jnp.float32), router.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
    added = 0.0 if bias is None else bias.astype(jnp.float32)
    sigmoid = functools.partial(elementwise, jax.nn.sigmoid) if exact else jax.nn.sigmoid
    if experts.scoring == "biased_sigmoid":
        logits, scores = unbiased, sigmoid(unbiased) + added
    else:
        logits = scores = unbiased if bias is None else unbiased + added
    scores = _in_best_groups(scores, experts)
    largest, chosen = jax.lax.top_k(scores, experts.num_experts_per_tok)
    if replayed is not None:
        chosen = jnp.where(replayed < 0, chosen, replayed)
        largest = jnp.take_along_axis(logits, chosen, axis=-1)
    if experts.scoring != "softmax":
        weights = sigmoid(jnp.take_along_axis(unbiased, chosen, axis=-1))
        if experts.norm_topk_prob:
            total = tree_sum(weights)[..., None] if exact else jnp.sum(weights, axis=-1, keepdims=True)
            weights /= total + 1e-9
    elif exact:
        weights = _exact_softmax(largest, largest if experts.norm_topk_prob else logits)
    elif experts.norm_topk_prob:
        weights = jax.nn.softmax(largest, axis=-1)
    else:
        weights = jnp.exp(largest - jax.nn.logsumexp(logits, axis=-1, keepdims=True))
    if experts.routed_scaling_factor != 1:
        weights *= experts.routed_scaling_factor
    if factors is not None:
        weights *= factors.astype(jnp.float32)[chosen]
    if exact:
        weights = barrier(weights)
    return Routing(chosen, weights, logits, scores)


def _in_best_groups(scores: Float[Array, "token expert"], experts: Experts) -> Float[Array, "token expert"]:
    """The scores by which experts are chosen, with -inf in groups that a token has no experts of."""
    if experts.groups_per_tok == experts.groups:
        return scores
    by_group = scores.reshape(len(scores), experts.groups, -1)
    counted, _ = jax.lax.top_k(by_group, 1 if experts.scoring == "softmax" else 2)
    _, best = jax.lax.top_k(counted.sum(axis=-1), experts.groups_per_tok)
    chosen = jax.nn.one_hot(best, experts.groups, dtype=jnp.bool_).any(axis=1)
    return jnp.where(chosen[..., None], by_group, -jnp.inf).reshape(scores.shape)


def _exact_softmax(chosen: Float[Array, "token choice"], every: Float[Array, "token expert"]) -> Array:
    """The softmax of some logits among all."""
    highest = jnp.max(every, axis=-1, keepdims=True)
    total = tree_sum(elementwise(jnp.exp, every - highest))
    return jnp.asarray(barrier(elementwise(jnp.exp, chosen - highest) / total[..., None]))


def packed_experts(experts: Int[Array, "layer choices"], tokens: int) -> Int[Array, "token word"]:
    """Return experts, those of all tokens of a layer one after the other in int8 or int16, as words of 32 bits."""
    flat = experts.reshape(len(experts), tokens, -1).swapaxes(0, 1).reshape(tokens, -1)
    per_word = 4 // flat.dtype.itemsize
    flat = jnp.pad(flat, ((0, 0), (0, -flat.shape[1] % per_word)))
    return jax.lax.bitcast_convert_type(flat.reshape(tokens, -1, per_word), jnp.int32)


def unpacked_experts(words: Int[Array, "*batch word"], dtype: Any, layers: int, choices: int) -> Int[Array, "..."]:
    """Return the experts ``[..., layer, choice]`` of `packed_experts`, which had a dtype."""
    flat = jax.lax.bitcast_convert_type(words, dtype).reshape(*words.shape[:-1], -1)
    return flat[..., : layers * choices].reshape(*words.shape[:-1], layers, choices)
