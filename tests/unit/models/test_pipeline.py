"""Layers in stages compute what all layers on every device do."""

import dataclasses

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from lockstep.errors import ConfigError
from lockstep.hosts import Ledger
from lockstep.models import LlamaConfig, LlamaLMHeadModel, LoraModel, pipelined
from lockstep.models.families.gemma3 import Gemma3Config
from lockstep.models.trainable import skeleton
from lockstep.placement import batch_spec, compute_axes, make_mesh
from lockstep.training import StepSettings, TrainStep, batch_structs, lm_loss, parameter_shardings, parse_precision
from lockstep.training.objectives import SimpoConfig
from lockstep.training.step.train_step import init_state
from tests.unit.engine.models import FAMILIES

ROWS, LENGTH, VOCAB = 16, 8, 32
SIZES = {"max_seq_len": 16, "hidden_dim": 16, "intermediate_dim": 32, "num_heads": 4, "num_kv_heads": 2}
CONFIG = LlamaConfig(**SIZES, num_layers=4)


def batch(sequences=(), packed=False):
    rng = np.random.default_rng(0)
    shape = (ROWS, *sequences, LENGTH)
    columns = {"tokens": rng.integers(0, VOCAB, shape, np.int32), "loss_mask": rng.random(shape) < 0.5}
    return columns | ({"segment_ids": np.sort(rng.integers(0, 4, shape, np.int32))[..., ::-1]} if packed else {})


def step_once(shape, devices, columns, microbatches=1, config=CONFIG, loss_fn=lm_loss, repeats=1):
    """Metrics and the model after one step of gradient descent."""
    mesh, precision, optimizer = make_mesh(shape, jax.devices()[:devices]), parse_precision("f32"), optax.sgd(1.0)
    model = LlamaLMHeadModel.init(hax.Axis("vocab", VOCAB), config, key=jax.random.key(0))
    model = jax.tree.map(lambda leaf: 10 * leaf if leaf.ndim > 2 else leaf, model)

    def launch(name, function, arguments, *, out_shardings, donate=()):
        return jax.jit(function, out_shardings=out_shardings)(*arguments)

    state, shardings = init_state(model, optimizer, mesh, precision, launch)
    step = TrainStep(
        loss_fn=loss_fn, optimizer=optimizer, schedule=None, mesh=mesh, shardings=shardings,
        settings=StepSettings(precision=precision, repeats=repeats), microbatches=microbatches,
    )  # fmt: skip
    structs = batch_structs({k: jax.ShapeDtypeStruct(v.shape[1:], v.dtype) for k, v in columns.items()}, ROWS, mesh)
    placed = {name: jax.device_put(column, structs[name].sharding) for name, column in columns.items()}
    stop = jax.device_put(np.zeros(devices, np.int32), NamedSharding(mesh, PartitionSpec(mesh.axis_names)))
    step.compile(state, placed, stop, ledger=Ledger())
    after, metrics = step(state, placed, stop)
    return step.read(metrics), jax.device_get(after.model)


def assert_same(one, other):
    (metrics, model), (staged, in_stages) = one, other
    assert staged.loss == pytest.approx(metrics.loss, rel=1e-5)
    assert staged.values["grad_norm"] == pytest.approx(metrics.values["grad_norm"], rel=1e-5)
    assert_close(in_stages, model)


def assert_close(tree, expected):
    for ours, theirs in zip(jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5 * np.abs(theirs).max())


def random_model(layers):
    """Layers that are not checkpointed; nothing is compiled."""
    rng, config = np.random.default_rng(1), LlamaConfig(**SIZES, num_layers=layers, gradient_checkpointing=False)
    return jax.tree.map(lambda leaf: 0.5 * rng.standard_normal(leaf.shape, np.float32), skeleton(VOCAB, config))


@pytest.mark.parametrize(
    ("stages", "layers", "repeats"),
    [(2, 2, 1), pytest.param(2, 8, 2, marks=pytest.mark.nightly), pytest.param(4, 16, 4, marks=pytest.mark.nightly)],
)
def test_losses_and_gradients_are_those_without_stages(stages, layers, repeats):
    model_on_host = random_model(layers)

    def found(shape, devices):
        mesh = make_mesh(shape, jax.devices()[:devices])
        columns = jax.device_put(batch(packed=True), NamedSharding(mesh, batch_spec(mesh)))

        def loss(model):
            with hax.axis_mapping(compute_axes(mesh)):
                return lm_loss(pipelined(model, 2, repeats if devices > 1 else 1), columns).total

        with jax.set_mesh(mesh):
            model = jax.device_put(model_on_host, parameter_shardings(model_on_host, mesh))
            return jax.device_get(jax.jit(jax.value_and_grad(loss))(model))

    (loss, gradients), (staged, in_stages) = found("1,1,1", 1), found(f"pp={stages}", stages)
    assert staged == pytest.approx(loss, rel=1e-5)
    assert_close(in_stages, gradients)


def scans(jaxpr):
    """All scans of a program."""
    for equation in jaxpr.eqns:
        yield from [equation] if equation.primitive.name == "scan" else []
        for inner in jax.tree.leaves(list(equation.params.values())):
            inner = getattr(inner, "jaxpr", inner)
            yield from scans(inner) if hasattr(inner, "eqns") else ()


def test_repeats_keep_the_states_of_a_step_and_no_weights():
    def loss(model):
        with hax.axis_mapping(compute_axes(mesh)):
            return lm_loss(pipelined(model, 2, 2), batch()).total

    with jax.set_mesh(mesh := make_mesh("pp=2", jax.devices()[:2])):
        found = jax.make_jaxpr(jax.grad(loss))(skeleton(VOCAB, CONFIG))
    schedule = [one for one in scans(found.jaxpr) if one.params["length"] == 2 * 4 + 1]
    kept = [out.aval for one in schedule for out in one.outvars if out.aval.shape[:1] == (9,)]
    assert [each.shape for each in kept if each.dtype == jnp.float32] == [(9, 1, ROWS // 4, LENGTH, 16)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "devices", "microbatches", "slices", "repeats"),
    [
        pytest.param("pp=2", 2, 1, 1, 2, marks=pytest.mark.nightly),
        pytest.param("pp=4", 4, 4, 1, 1, marks=pytest.mark.nightly),
        ("pp=2,fsdp=2", 4, 2, 1, 2),
        ("pp=2,tp=2", 4, 4, 2, 1),
        pytest.param("pp=2,dp=2", 4, 1, 2, 1, marks=pytest.mark.nightly),
        ("pp=2", 4, 2, 4, 1),
    ],
)
def test_stages_of_any_mesh(monkeypatch, shape, devices, microbatches, slices, repeats):
    """Stages are slices, parts of them, or copies of the model have two slices each."""
    expected = step_once("1,1,1", 1, batch())
    monkeypatch.setenv("MEGASCALE_NUM_SLICES", str(slices))
    assert_same(expected, step_once(shape, devices, batch(), microbatches, repeats=repeats))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pairs", "layers that differ", "dots"])
def test_stages_of_other_objectives_and_models(name):
    columns, options = batch(packed=True), {}
    if name == "pairs":
        columns, options = batch((2,)), {"loss_fn": SimpoConfig(beta=2.0, gamma_beta_ratio=0.5)}
    elif name == "dots":
        options = {"config": dataclasses.replace(CONFIG, gradient_checkpointing="dots")}
    else:
        options = {"config": Gemma3Config(**SIZES, num_layers=8)}
    assert_same(step_once("1,1,1", 1, columns, **options), step_once("pp=4", 4, columns, 2, **options))


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (skeleton(VOCAB, FAMILIES["experts"]), "a model with experts"),
        (skeleton(VOCAB, dataclasses.replace(CONFIG, numerics="exact")), "model.numerics exact"),
        (LoraModel(base=skeleton(VOCAB, CONFIG), adapters={}, scale=1.0), "a LoraModel"),
        (jnp.zeros(()), "a ArrayImpl"),
    ],
)
def test_models_that_have_no_stages_are_refused(model, text):
    with jax.set_mesh(make_mesh("1,2,1", jax.devices()[:2])):
        assert pipelined(model) is model
    refused = pytest.raises(ConfigError, match=f"{text}, .*Leave pp out")
    with jax.set_mesh(make_mesh("pp=2", jax.devices()[:2])), refused:
        pipelined(model)


@pytest.mark.parametrize(("shape", "repeats"), [("pp=2", 3), ("pp=2", 4), ("1,2,1", 2)])
def test_repeats_that_do_not_fit_stages_and_layers_are_refused(shape, repeats):
    refused = pytest.raises(ConfigError, match=rf"pipeline_repeats is {repeats}, for 4 layers in [12] stages .*Use 1,")
    with jax.set_mesh(make_mesh(shape, jax.devices()[:2])), refused:
        pipelined(skeleton(VOCAB, CONFIG), repeats=repeats)


def test_stages_that_do_not_divide_the_layers_are_named():
    with pytest.raises(ConfigError, match=r"'layer' has size 4, which the mesh axis 'pp' of size 3"):
        parameter_shardings(skeleton(VOCAB, CONFIG), make_mesh("pp=3", jax.devices()[:3]))
