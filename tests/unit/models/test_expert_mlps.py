"""Experts against every expert computed for every token: answers and gradients."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.models.expert_mlps import ExactSum, ExpertWeights, _tiling, mixture
from lockstep.models.experts import Experts, Routing, route
from lockstep.models.families.registry import PRESETS


def drawn(experts: int, tokens: int, embed: int, width: int) -> tuple[jax.Array, jax.Array, ExpertWeights]:
    draw = np.random.default_rng(experts)  # each shape of jax.random is a program of its own

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(draw.standard_normal(shape, np.float32))

    shapes = ((experts, embed, width), (experts, embed, width), (experts, width, embed))
    weights = ExpertWeights(*(0.3 * normal(*shape) for shape in shapes))
    return normal(tokens, embed), normal(embed, experts), weights


@functools.partial(jax.jit, static_argnums=2)
def routed(x: jax.Array, router: jax.Array, experts: Experts) -> Routing:
    return route(x, router, None, experts)


@jax.jit
def dense(x: jax.Array, routing: Routing, weights: ExpertWeights) -> jax.Array:
    """All experts for all tokens."""
    inner = jax.nn.silu(jnp.einsum("nd,edf->nef", x, weights.gate)) * jnp.einsum("nd,edf->nef", x, weights.up)
    every = jnp.einsum("nef,efd->ned", inner, weights.down)
    factors = jnp.zeros(every.shape[:2]).at[jnp.arange(len(x))[:, None], routing.experts].add(routing.weights)
    return jnp.einsum("ned,ne->nd", every, factors)


@pytest.mark.parametrize(
    ("shape", "norm"),  # experts, choices, tokens, embed, width
    [
        ((5, 3, 37, 12, 7), True),
        pytest.param((128, 8, 12, 16, 8), False, marks=pytest.mark.slow),  # a row at a time
        *(
            pytest.param(shape, True, marks=pytest.mark.slow)
            for shape in [(8, 2, 1, 16, 8), (16, 4, 20, 16, 8), (3, 2, 300, 8, 8)]
        ),
    ],
    ids=str,
)
def test_answers_and_gradients_are_those_of_all_experts_computed(shape: tuple[int, ...], norm: bool) -> None:
    count, choices, *rest = shape
    experts = Experts(num_experts=count, num_experts_per_tok=choices, norm_topk_prob=norm)
    x, router, weights = drawn(count, *rest)

    def total(compute: Callable[..., jax.Array], x: jax.Array, router: jax.Array, weights: ExpertWeights) -> jax.Array:
        return jnp.sum(jnp.sin(compute(x, route(x, router, None, experts), weights)))

    def ours(x: jax.Array, routing: Routing, weights: ExpertWeights) -> jax.Array:
        return mixture(x, routing, weights, "silu")

    both = [jax.jit(jax.value_and_grad(functools.partial(total, f), argnums=(0, 1, 2))) for f in (ours, dense)]
    (value, got), (expected, want) = (each(x, router, weights) for each in both)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for ours_, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(ours_, theirs, rtol=1e-4, atol=1e-5 * float(np.abs(theirs).max()))


def test_parts_of_the_experts_add_up_and_tokens_that_do_not_matter_are_zero() -> None:
    experts = Experts(num_experts=6, num_experts_per_tok=3)
    x, router, weights = drawn(6, 20, 8, 4)
    routing, valid = routed(x, router, experts), np.arange(20) % 3 != 0
    whole = np.asarray(dense(x, routing, weights)) * valid[:, None]
    part = jax.jit(lambda weights, first: mixture(x, routing, weights, "silu", first=first, valid=valid))
    weights = jax.tree.map(np.asarray, weights)
    by_expert = [part(jax.tree.map(lambda w, i=i: w[i : i + 2], weights), i) for i in (0, 2, 4)]
    np.testing.assert_allclose(sum(by_expert), whole, rtol=1e-5, atol=1e-5)
    slices = (np.s_[:2], np.s_[2:])
    halves = [ExpertWeights(weights.gate[..., s], weights.up[..., s], weights.down[:, s]) for s in slices]
    np.testing.assert_allclose(sum(part(half, 0) for half in halves), whole, rtol=1e-5, atol=1e-5)


@functools.cache
def alone() -> tuple[Callable[[np.ndarray], jax.Array], np.ndarray]:
    """What seven experts answer, compiled once, and 64 tokens for them."""
    experts = Experts(num_experts=7, num_experts_per_tok=2)
    x, router, weights = drawn(7, 64, 8, 4)
    return jax.jit(lambda x: mixture(x, route(x, router, None, experts), weights, "silu")), np.asarray(x)


@settings(max_examples=25)
@given(st.data())
def test_a_token_is_answered_as_if_it_were_alone(data: st.DataObject) -> None:
    answers, x = alone()
    rows = np.array(data.draw(st.lists(st.integers(0, 63), min_size=1, max_size=64)))
    padded = np.resize(rows, 64)  # one program
    np.testing.assert_allclose(answers(x[padded]), np.asarray(answers(x))[padded], rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_exact_a_token_has_the_same_bits_beside_any_others_and_on_any_devices(dtype: str) -> None:
    """On two devices by the width of experts, and by experts."""
    experts = Experts(num_experts=4, num_experts_per_tok=3, norm_topk_prob=False)
    x, router, weights = jax.tree.map(lambda leaf: leaf.astype(dtype), drawn(4, 40, 64, 48))
    weights = weights._replace(down_bias=weights.down[:, 0])
    spec = jax.P(None, None, "tp")
    by_width = ExpertWeights(spec, spec, jax.P(None, "tp"), None, jax.P())
    by_expert = jax.tree.map(lambda _: jax.P("tp"), weights)

    def compute(x: jax.Array, weights: ExpertWeights, exact: ExactSum) -> jax.Array:
        routing = route(x, router, None, experts, exact=True)
        first = jax.lax.axis_index("tp") * len(weights.down) if exact.whole else 0
        return mixture(x, routing, weights, "silu", first=first, exact=exact)

    alone = jax.jit(functools.partial(compute, exact=ExactSum(8)))
    found = np.asarray(alone(x, weights))
    routing = routed(x, router, experts)
    bias = jnp.sum(weights.down_bias[routing.experts] * routing.weights[..., None], axis=1)
    expected = np.asarray(dense(x, routing, weights) + bias, np.float32)
    tolerance = 1e-5 if dtype == "float32" else 0.02  # of the largest; roundings to 8 bits are of 0.4 % each
    np.testing.assert_allclose(found, expected, atol=tolerance * np.abs(expected).max())
    np.testing.assert_array_equal(alone(x[7:9], weights), found[7:9])
    mesh = jax.sharding.Mesh(jax.devices()[:2], ("tp",))
    for specs, exact in ((by_width, ExactSum(4, ("tp",))), (by_expert, ExactSum(8, ("tp",), whole=True))):
        split = functools.partial(compute, exact=exact)
        mapped = jax.shard_map(split, mesh=mesh, in_specs=(jax.P(), specs), out_specs=jax.P(), check_vma=False)
        np.testing.assert_array_equal(jax.jit(mapped)(x, weights), found)


def test_a_tile_of_the_tpu_kernel_multiplies_little_more_than_a_width_has() -> None:
    configs = [preset.config for preset in PRESETS.values() if preset.config.experts is not None]
    widths = {config.experts.intermediate_dim or config.intermediate_dim for config in configs if config.experts}
    assert {768, 1408, 1536, 2048} <= widths
    for side in widths | {config.hidden_dim for config in configs} | {32}:
        _, *tile = _tiling(4096, side, side)
        tiles = -(-side // tile[0])
        assert tile == [tile[0]] * 2 and tile[0] <= 1024 and (tile[0] % 128 == 0 or tiles == 1)
        assert tiles * tile[0] - side < 128 * tiles, (side, tile)
