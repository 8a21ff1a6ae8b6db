"""The configuration of experts, the router, and its losses."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.errors import ConfigError
from lockstep.models.experts import Experts, RouterSums, route
from tests.numpy_forward import in_best_groups


def test_the_lower_number_wins_a_tie() -> None:
    x = jnp.ones((1, 2))
    routing = route(x, jnp.array([[1.0, 3, 3, 0, 3], [0.0, 0, 0, 0, 0]]), None, Experts(num_experts=5))
    assert routing.experts.tolist() == [[1, 2]] and routing.weights.tolist() == [[0.5, 0.5]]
    biased = route(x, jnp.zeros((2, 5)), jnp.array([0.0, 0, 0, 2, 1]), Experts(num_experts=5))
    assert biased.experts.tolist() == [[3, 4]]


def test_a_bias_of_a_sigmoid_router_chooses_and_weighs_nothing() -> None:
    """The definition in Levanter's Snowball, and DeepSeek-V3's: the weights of the chosen sum up to the factor."""
    logits, bias = np.array([[0.5, 0.1, -0.3, -4.0]], np.float32), jnp.array([0.0, -9, 0, 5])
    experts = Experts(num_experts=4, num_experts_per_tok=2, scoring="sigmoid", routed_scaling_factor=2.5)
    routing = route(jnp.asarray(logits), jnp.eye(4), bias, experts)
    assert routing.experts.tolist() == [[3, 0]]
    chosen = 1 / (1 + np.exp(-logits[0, [3, 0]]))
    np.testing.assert_allclose(routing.weights[0], 2.5 * chosen / chosen.sum(), rtol=1e-5)
    plain = dataclasses.replace(experts, norm_topk_prob=False)
    np.testing.assert_allclose(route(jnp.asarray(logits), jnp.eye(4), bias, plain).weights[0], 2.5 * chosen, rtol=1e-5)
    replayed = route(jnp.asarray(logits), jnp.eye(4), bias, plain, jnp.array([[1, -1]]))
    assert replayed.experts.tolist() == [[1, 0]]
    assert float(replayed.weights[0, 0]) == pytest.approx(2.5 / (1 + np.exp(-0.1)), rel=1e-4)

    # The sigmoids are 0.62, 0.52, 0.43 and 0.02.
    beside = dataclasses.replace(plain, scoring="biased_sigmoid")
    for bias, chosen in ((jnp.array([0.0, -9, 0, 5]), [3, 0]), (jnp.array([0.0, 0.2, 0, 0.3]), [1, 0])):
        routing = route(jnp.asarray(logits), jnp.eye(4), bias, beside)
        assert routing.experts.tolist() == [chosen]
        np.testing.assert_allclose(routing.weights[0], 2.5 / (1 + np.exp(-logits[0, chosen])), rtol=1e-5)
    sums = RouterSums.of(routing, jnp.ones(1, bool), jnp.array([[0, 1]]))
    assert sums.compared == 1 and sums.differing == 0


@pytest.mark.parametrize("bias", [None, 0.4])
def test_experts_are_of_the_groups_whose_two_best_have_the_largest_sums(bias: float | None) -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(40, 12)).astype(np.float32)
    added = None if bias is None else (bias * rng.normal(size=12)).astype(np.float32)
    experts = Experts(num_experts=12, num_experts_per_tok=3, groups=4, groups_per_tok=2, scoring="biased_sigmoid")
    routing = route(jnp.asarray(logits), jnp.eye(12), added, experts)
    every = 0
    for row, chosen in zip(logits, routing.experts, strict=True):
        scores = 1 / (1 + np.exp(-row)) + (0 if added is None else added)
        allowed = in_best_groups(scores, {"n_group": 4, "topk_group": 2})
        assert chosen.tolist() == np.argsort(-allowed, kind="stable")[:3].tolist()
        every += sorted(chosen.tolist()) == sorted(np.argsort(-scores)[:3].tolist())
    assert 0 < every < 40, "the groups make a difference"


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"groups": 3}, r"experts.groups is 3 and experts.num_experts is 8; .*Set groups to a divisor"),
        ({"groups": 8, "groups_per_tok": 8}, r"experts.groups is 8 and .*two or more"),
        ({"groups": 2, "groups_per_tok": 3}, r"experts.groups_per_tok is 3, of 2 groups of 4 experts"),
        ({"groups": 4}, r"experts.groups_per_tok is 1, of 4 groups of 2 .*num_experts_per_tok is 3"),
    ],
)
def test_groups_that_cannot_be_are_refused(fields: dict[str, int], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Experts(num_experts=8, num_experts_per_tok=3, **fields)


def test_losses_are_those_of_the_papers() -> None:
    experts = Experts(num_experts=4, num_experts_per_tok=2, load_balancing_coef=0.1, router_z_coef=0.01)
    logits = np.random.default_rng(0).normal(size=(9, 4)).astype(np.float32)
    valid = np.arange(9) < 7
    routing = route(jnp.asarray(logits), jnp.eye(4), None, experts)
    sums = RouterSums.of(routing, jnp.asarray(valid))
    probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    share = np.zeros(4)
    for row in np.argsort(-logits, axis=-1)[valid, :2]:
        share[row] += 1 / (7 * 2)
    balance = 4 * np.sum(2 * share * probabilities[valid].mean(0))
    z = np.mean(np.log(np.exp(logits[valid]).sum(-1)) ** 2)
    np.testing.assert_allclose(sums.loss(experts), 0.1 * balance + 0.01 * z, rtol=1e-5)
    metrics = sums.metrics()
    np.testing.assert_allclose(metrics["router/busiest_share"], share.max(), rtol=1e-6)
    entropy = -np.sum(share[share > 0] * np.log(share[share > 0])) / np.log(4)
    np.testing.assert_allclose(metrics["router/load_entropy"], entropy, rtol=1e-5)


def test_the_expected_number_of_experts_is_that_of_even_draws() -> None:
    experts = Experts(num_experts=10, num_experts_per_tok=3)
    draws = np.random.default_rng(0).random((2000, 5, 10)).argsort(-1)[..., :3].reshape(2000, -1)
    # The standard deviation of the mean of 2,000 draws is about 0.02.
    assert experts.expected_hits(5) == pytest.approx(np.mean([len(set(row)) for row in draws]), abs=0.06)
    assert (
        experts.expected_hits(1) == pytest.approx(3)
        and Experts(num_experts=1, num_experts_per_tok=1).expected_hits(9) == 1
    )


@pytest.mark.parametrize(("tokens", "devices"), [(1, 4), (6, 4), (40, 8)])
def test_the_busiest_device_is_that_of_even_draws(tokens: int, devices: int) -> None:
    experts = Experts(num_experts=32, num_experts_per_tok=4)
    draws = np.random.default_rng(0).random((500, tokens, 32)).argsort(-1)[..., :4].reshape(500, -1)
    rows = np.stack([np.bincount(row, minlength=32) for row in draws]).reshape(500, devices, -1)
    hits = (rows > 0).sum(-1)
    seen = [each.max(1).mean() / each.mean() for each in (hits, rows.sum(-1))]
    # Independent devices are a little further apart than these, whose sum is given.
    np.testing.assert_allclose(experts.unevenness(tokens, devices), seen, rtol=0.1)
    assert experts.unevenness(10_000, devices)[0] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"scoring": "relu"}, "experts.scoring is 'relu'; it must be one of softmax, sigmoid"),
        ({"num_experts": 0}, "experts.num_experts is 0; it must be at least 1"),
        ({"num_experts_per_tok": 9}, "is 9 and experts.num_experts is 8; a token has no more experts than there are"),
        ({"mlp_only_layers": (2, 1)}, "mlp_only_layers is [2, 1]; it must be numbers of layers from 0, each once"),
        ({"shared_router": True}, "experts.shared_intermediate_dim is null: there is no shared expert"),
        ({"router_z_coef": -1.0}, "experts.router_z_coef is -1.0; it must be at least 0"),
    ],
)
def test_a_value_that_cannot_work_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        Experts(**fields)


def test_experts_that_are_replayed_have_the_weights_of_the_routers_own_logits() -> None:
    experts = Experts(num_experts=6, num_experts_per_tok=2)
    rng = np.random.default_rng(6)
    x, router = (jnp.asarray(rng.standard_normal(shape, np.float32)) for shape in ((12, 8), (8, 6)))
    own = route(x, router, None, experts)
    np.testing.assert_array_equal(route(x, router, None, experts, own.experts).weights, own.weights)
    chosen = jnp.where(jnp.arange(12)[:, None] % 3 == 0, -1, (own.experts + 1) % 6)

    @jax.jit
    def weights(router: jax.Array) -> jax.Array:
        return route(x, router, None, experts, chosen).weights

    @jax.jit
    def masked(router: jax.Array) -> jax.Array:
        """Equation 5 of the paper: the softmax of these logits over the experts that an engine chose."""
        taken = jnp.where(chosen < 0, own.experts, chosen)
        exps = jnp.exp(x @ router) * jax.nn.one_hot(taken, 6).sum(axis=1)
        return jnp.take_along_axis(exps / exps.sum(axis=1, keepdims=True), taken, axis=1)

    np.testing.assert_allclose(weights(router), masked(router), rtol=1e-5)
    got, want = (jax.jit(jax.grad(lambda r, f=f: jnp.sum(jnp.sin(f(r)))))(router) for f in (weights, masked))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    sums = RouterSums.of(own, jnp.ones(12, bool), chosen.at[1].set(own.experts[1, ::-1]))
    assert sums.compared == 8 and sums.differing == 7
