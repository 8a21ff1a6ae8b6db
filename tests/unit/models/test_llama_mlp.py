"""Experts in the trainable model: a train step against one in which every expert is computed for every token."""

import dataclasses
import functools
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding

from lockstep.errors import ConfigError
from lockstep.hosts import Ledger
from lockstep.models import Experts, LlamaLMHeadModel, Qwen3MoeConfig
from lockstep.models import llama_mlp as module
from lockstep.models.llama_mlp import repeated_runs
from lockstep.models.trainable import skeleton
from lockstep.placement import batch_spec, make_mesh
from lockstep.training import StepSettings, TrainStep, lm_loss, parse_precision
from lockstep.training.objectives import GrpoConfig, SimpoConfig
from lockstep.training.objectives.logprobs import loss_with_routers
from lockstep.training.step.train_step import init_model, init_state
from tests.unit.models.test_expert_mlps import dense

EXPERTS = Experts(
    num_experts=5, num_experts_per_tok=2, intermediate_dim=12, load_balancing_coef=0.1, router_z_coef=0.01
)
CONFIG = Qwen3MoeConfig(
    max_seq_len=16, hidden_dim=16, intermediate_dim=24, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4,
    experts=EXPERTS, initializer_range=0.3,
)  # fmt: skip
UNBALANCED = Qwen3MoeConfig(**{**vars(CONFIG), "experts": dataclasses.replace(CONFIG.experts, load_balancing_coef=0.0)})


def stepped(shape: str, microbatches: int, config: Qwen3MoeConfig = CONFIG) -> tuple[Any, Any]:
    """The metrics of a step, and the parameters after it: those before it less the gradient."""
    mesh = make_mesh(shape, jax.devices()[: int(np.prod([int(n) for n in shape.split(",")]))])
    optimizer, precision = optax.sgd(1.0), parse_precision("f32")

    def init(key: jax.Array) -> LlamaLMHeadModel:
        return LlamaLMHeadModel.init(hax.Axis("vocab", 32), config, key=key)

    def launch(name: str, function: Any, arguments: Any, *, out_shardings: Any, donate: Any = ()) -> Any:
        return jax.jit(function, out_shardings=out_shardings, donate_argnums=donate)(*arguments)

    model = init_model(init, 0, mesh, precision, launch)
    state, shardings = init_state(model, optimizer, mesh, precision, launch)
    step = TrainStep(
        loss_fn=lm_loss, optimizer=optimizer, schedule=None, mesh=mesh, shardings=shardings,
        settings=StepSettings(precision=precision), microbatches=microbatches,
    )  # fmt: skip
    rows = np.random.default_rng(0)
    segments = np.repeat([[1] * 6 + [2] * 6 + [0] * 4], 8, axis=0)
    columns = {"tokens": rows.integers(0, 32, (8, 16)), "loss_mask": segments > 0, "segment_ids": segments}
    split = NamedSharding(mesh, batch_spec(mesh))
    batch = {
        name: jax.device_put(column.astype(bool if name == "loss_mask" else np.int32), split)
        for name, column in columns.items()
    }
    stop = jax.device_put(np.zeros(mesh.size, np.int32), split.update(spec=jax.sharding.PartitionSpec(mesh.axis_names)))
    step.compile(state, batch, stop, ledger=Ledger())
    after, metrics = step(state, batch, stop)
    return step.read(metrics), jax.device_get(after.model)


@functools.cache
def reference(microbatches: int, config: Qwen3MoeConfig = CONFIG) -> tuple[Any, Any]:
    """A step on one device in which all experts are computed for all tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "mixture", lambda x, routing, weights, activation: dense(x, routing, weights))
        return stepped("1,1,1", microbatches, config)


@pytest.mark.nightly  # in make slow: gradients in families/test_families.py
@pytest.mark.parametrize(
    ("shape", "microbatches"),
    [("1,2,2", 2), ("1,2,2", 1), ("1,1,1", 2), ("1,1,1", 1), ("1,2,1", 1), ("1,1,2", 1), ("1,2,1", 2)],
)
def test_a_step_is_that_of_all_experts_computed(shape: str, microbatches: int) -> None:
    # Several devices put other rows into a microbatch than one does, and each microbatch has a balance of its own.
    same_rows = microbatches == 1 or shape == "1,1,1"
    config = CONFIG if same_rows else UNBALANCED
    (got, model), (want, expected) = stepped(shape, microbatches, config), reference(microbatches, config)
    assert got.loss == pytest.approx(want.loss, rel=1e-5)
    for name in ("router/loss", "grad_norm", *(("router/load_entropy", "router/busiest_share") if same_rows else ())):
        assert got.values[name] == pytest.approx(want.values[name], rel=1e-5), name
    for ours, theirs in zip(jax.tree.leaves(model), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_the_losses_of_routers_are_in_the_loss() -> None:
    metrics, _ = stepped("1,1,1", 1)
    without = Experts(num_experts=5, num_experts_per_tok=2, intermediate_dim=12, load_balancing_coef=0.0)
    bare, _ = stepped("1,1,1", 1, Qwen3MoeConfig(**{**vars(CONFIG), "experts": without}))
    assert bare.values["router/loss"] == 0 and metrics.values["router/loss"] > 0.1
    assert metrics.loss - bare.loss == pytest.approx(metrics.values["router/loss"], rel=1e-4)


def test_padding_is_not_in_the_losses_of_routers() -> None:
    rng = np.random.default_rng(0)
    model = jax.tree.map(lambda leaf: 0.3 * rng.standard_normal(leaf.shape, np.float32), skeleton(32, CONFIG))
    ids = hax.named(jnp.arange(16)[None] % 32, ("batch", "position"))
    segments = hax.named(jnp.array([[1] * 10 + [0] * 6]), ("batch", "position"))
    _, sums = jax.jit(lambda model: model.activations_and_router(ids, segments))(model)
    assert sums is not None and sums.tokens.tolist() == [10, 10]
    assert sums.counts.sum(axis=-1).tolist() == [20, 20]


class CountedError(Exception):
    """What the routers of a model were told of the tokens that count."""


class Telling:
    """A model with experts that computes nothing."""

    config, logit_soft_cap = CONFIG, None
    lm_head_array = logits = None

    def activations_and_router(self, *_: Any, counted: hax.NamedArray | None = None) -> Any:
        raise CountedError(None if counted is None else counted.array.astype(int).tolist())


def test_tokens_count_up_to_the_last_target_of_their_sequence() -> None:
    masks = jnp.array([[[0, 1, 0, 0], [0, 1, 0, 1]], [[0, 1, 1, 0], [0, 0, 0, 0]]], bool)
    up_to = [[1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 0], [0, 0, 0, 0]]
    pairs = {"tokens": jnp.zeros((2, 2, 4), jnp.int32), "loss_mask": masks}
    answers = {name: column.reshape(4, 4) for name, column in pairs.items()}
    answers |= {"rollout_logprobs": jnp.zeros((4, 4)), "advantage": jnp.ones(4)}
    packed = {**answers, "segment_ids": jnp.ones((4, 4), jnp.int32)}
    for objective, batch, expected in (
        (SimpoConfig(), pairs, up_to),
        (GrpoConfig(), answers, up_to),
        (lm_loss, answers, up_to),
        (lm_loss, packed, None),
    ):
        with pytest.raises(CountedError) as told:
            loss_with_routers(objective, Telling(), batch)
        assert told.value.args == (expected,), objective


@pytest.mark.slow
@pytest.mark.parametrize(
    "values",
    [
        {"mlp_only_layers": (0,)},
        pytest.param({}, marks=pytest.mark.nightly),
        pytest.param({"numerics": "exact"}, marks=pytest.mark.nightly),
    ],
)
def test_padding_of_rows_without_documents_changes_no_loss_of_routers(values: dict[str, Any]) -> None:
    rng, only = np.random.default_rng(0), values.pop("mlp_only_layers", ())
    config = dataclasses.replace(CONFIG, experts=dataclasses.replace(EXPERTS, mlp_only_layers=only), **values)
    model = jax.tree.map(lambda leaf: 0.3 * rng.standard_normal(leaf.shape, np.float32), skeleton(32, config))
    tokens, mask = rng.integers(0, 32, (2, 8)).astype(np.int32), np.array([[False] + [True] * 7] * 2)

    def metrics(extra: int, empty: int) -> dict[str, Any]:
        """Those of the rows with more padding, and of rows without targets beside them."""
        added = ((0, empty), (0, extra))
        batch = {"tokens": jnp.pad(tokens, added), "loss_mask": jnp.pad(mask, added)}
        parts = jax.jit(lambda model: loss_with_routers(lm_loss, model, batch))(model)
        return {name: float(value / parts.weight) for name, value in {**parts.metrics, "loss": parts.total}.items()}

    assert metrics(8, 2) == pytest.approx(metrics(0, 0), rel=1e-4)


@pytest.mark.parametrize(
    ("kinds", "units"),
    [
        ("dsdsdsdd", [("ds", 3), ("dd", 1)]),
        ("dsssss", [("dsssss", 1)]),
        ("ddsddsdds", [("dds", 3)]),
        ("dddsdsds", [("ddds", 1), ("ds", 2)]),
        ("sdsd", [("sd", 2)]),
    ],
)
def test_runs_of_layers_that_repeat_are_found(kinds: str, units: list[tuple[str, int]]) -> None:
    found = repeated_runs([kind == "d" for kind in kinds])
    text = [("".join(("d" if dense else "s") * count for dense, count in unit), repeats) for unit, repeats in found]
    assert text == units


def test_the_program_of_mixed_layers_does_not_grow_with_their_number() -> None:
    def lines(layers: int) -> int:
        experts = dataclasses.replace(EXPERTS, mlp_only_layers=tuple(range(0, layers, 2)))
        model = skeleton(32, dataclasses.replace(CONFIG, num_layers=layers, experts=experts))
        ids = hax.named(np.zeros((1, 4), np.int32), ("batch", "position"))
        return len(str(jax.make_jaxpr(lambda model: model(ids).array)(model)).splitlines())

    assert lines(4) == lines(12)


def test_the_router_has_sums_of_the_layers_with_experts_alone() -> None:
    experts = dataclasses.replace(EXPERTS, mlp_only_layers=(0, 2, 5))
    model = skeleton(32, dataclasses.replace(CONFIG, num_layers=6, experts=experts))
    ids = hax.named(np.zeros((1, 4), np.int32), ("batch", "position"))
    _, sums = jax.eval_shape(lambda model: model.activations_and_router(ids), model)
    assert sums.counts.shape == (3, EXPERTS.num_experts)


def test_a_layer_must_be_left_that_has_experts() -> None:
    only = dataclasses.replace(EXPERTS, mlp_only_layers=(0, 1))
    with pytest.raises(ConfigError, match=r"mlp_only_layers is \[0, 1\] and num_layers is 2.*set experts to null"):
        dataclasses.replace(CONFIG, experts=only)
