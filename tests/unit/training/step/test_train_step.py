"""Where the parameters of a train step are placed."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from lockstep.errors import ConfigError
from lockstep.hosts import Ledger
from lockstep.placement import make_mesh
from lockstep.placement.device import slice_index
from lockstep.training import (
    OptimizerConfig,
    StepSettings,
    TrainStep,
    batch_structs,
    lm_loss,
    parameter_shardings,
    parse_precision,
    state_structs,
)
from lockstep.training.step.train_step import init_state
from lockstep.xla import Hlo, collectives
from tests.unit.training.bigrams import Bigrams


def test_a_parameter_that_the_mesh_does_not_divide_is_named():
    class Mesh:
        shape = {"dp": 1, "fsdp": 3, "tp": 1}

    with pytest.raises(ConfigError, match=r"parameter .*embed.*'embed' has size 16.*'fsdp' of size 3"):
        parameter_shardings(jax.eval_shape(lambda: Bigrams.init(jax.random.key(0))), Mesh())


def shapes():
    return jax.eval_shape(lambda: Bigrams.init(jax.random.key(0)))


def test_a_parameter_is_split_by_the_axes_that_training_splits():
    shardings = parameter_shardings(shapes(), make_mesh("1,2,2"))
    assert shardings.embed.array.spec == PartitionSpec("tp", "fsdp")
    assert shardings.norm.array.spec == PartitionSpec("fsdp")


def test_an_array_without_axes_is_on_every_device():
    assert parameter_shardings(jax.ShapeDtypeStruct((3, 5), np.float32), make_mesh("1,2,2")).spec == PartitionSpec()


def test_rows_of_a_batch_are_split_over_data_axes_alone():
    columns = {"tokens": jax.ShapeDtypeStruct((2, 7), np.int32)}
    tokens = batch_structs(columns, 8, make_mesh("1,2,2"))["tokens"]
    assert (tokens.shape, tokens.dtype) == ((8, 2, 7), np.int32)
    assert tokens.sharding.shard_shape(tokens.shape) == (4, 2, 7)


def test_shapes_of_a_state_are_in_the_parameter_type_with_the_optimizers_beside_them():
    mesh, optimizer = make_mesh("1,2,2"), OptimizerConfig().build(3)
    state, shardings = state_structs(Bigrams.init, optimizer, mesh, parse_precision("p=bf16"))
    assert state.model.embed.array.dtype == jnp.bfloat16 and state.step.shape == ()
    for leaf, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(shardings), strict=True):
        assert leaf.sharding == sharding
    moments = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.shape == state.model.embed.array.shape]
    assert moments and all(leaf.sharding == state.model.embed.array.sharding for leaf in moments)


def test_the_memory_of_the_state_before_is_that_of_the_state_after():
    mesh, optimizer, precision = make_mesh("1,2,2"), OptimizerConfig().build(3), parse_precision("f32")
    state, shardings = state_structs(Bigrams.init, optimizer, mesh, precision)
    step = TrainStep(
        loss_fn=lm_loss, optimizer=optimizer, schedule=None, mesh=mesh, shardings=shardings,
        settings=StepSettings(precision=precision), microbatches=1,
    )  # fmt: skip
    row = {name: jax.ShapeDtypeStruct((9,), dtype) for name, dtype in (("tokens", np.int32), ("loss_mask", np.bool_))}
    text = step.lower(state, batch_structs(row, 8, mesh)).as_text()
    assert text.count("jax.buffer_donor") + text.count("tf.aliasing_output") == len(jax.tree.leaves(state))


def step_once(shape, microbatches, reduce_dtype=None, optimizer=None, schedule=None, before=0, policy="f32", rows=8):
    """Mesh, metrics, the model after one step of gradient descent, and the collectives of the program.

    Args:
        before: The number of steps before it, of which none was an update.
    """
    mesh, precision = make_mesh(shape, jax.devices()[:4]), parse_precision(policy)
    optimizer = optax.sgd(1.0) if optimizer is None else optimizer
    model = Bigrams.init(jax.random.key(0))

    def launch(name, function, arguments, *, out_shardings, donate=()):
        return jax.jit(function, out_shardings=out_shardings)(*arguments)

    state, shardings = init_state(model, optimizer, mesh, precision, launch)
    state = dataclasses.replace(state, step=state.step + before)
    step = TrainStep(
        loss_fn=lm_loss, optimizer=optimizer, schedule=schedule, mesh=mesh, shardings=shardings,
        settings=StepSettings(precision=precision, reduce_dtype=reduce_dtype), microbatches=microbatches,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    columns = {"tokens": rng.integers(0, 16, (rows, 9), np.int32), "loss_mask": rng.random((rows, 9)) < 0.5}
    structs = batch_structs({k: jax.ShapeDtypeStruct(v.shape[1:], v.dtype) for k, v in columns.items()}, rows, mesh)
    batch = {name: jax.device_put(column, structs[name].sharding) for name, column in columns.items()}
    stop = jax.device_put(np.zeros(4, np.int32), NamedSharding(mesh, PartitionSpec(mesh.axis_names)))
    found = collectives(Hlo(step.lower(state, batch).compile().as_text()), mesh.size)
    step.compile(state, batch, stop, ledger=Ledger())
    after, metrics = step(state, batch, stop)
    return mesh, step.read(metrics), jax.device_get(after.model), found


@pytest.mark.parametrize(("counts", "expected"), [(True, 0.5), (False, 0.75)])
def test_the_learning_rate_is_that_of_the_updates_that_the_optimizer_has_counted(counts, expected):
    """Steps that were skipped before are no updates, also where the run skips no more."""

    def schedule(count):
        return 1 - 0.5 ** (count + 1)

    optimizer = optax.sgd(schedule if counts else 1.0)
    _, metrics, *_ = step_once("1,4,1", 1, optimizer=optimizer, schedule=schedule, before=1)
    assert metrics.values["learning_rate"] == expected


@pytest.mark.parametrize("slices", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_gradients_of_microbatches_are_added_in_float32_whatever_the_parameters_are(monkeypatch, slices):
    """A sum of 512 in bfloat16 stops growing at 256 times what is added."""
    expected = step_once("1,4,1", 1, policy="p=f32,c=bf16", rows=2048)[1]
    monkeypatch.setenv("MEGASCALE_NUM_SLICES", str(slices))
    _, metrics, model, _ = step_once("auto", 512, policy="bf16", rows=2048)
    assert model.embed.array.dtype == jnp.bfloat16, "they are stored as they were"
    assert metrics.values["grad_norm"] == pytest.approx(expected.values["grad_norm"], rel=0.01)


@functools.cache
def step_of_one_slice(microbatches):
    return step_once("1,4,1", microbatches)


@pytest.mark.parametrize(
    ("microbatches", "dtype", "gap"),
    [
        pytest.param(1, None, 1e-6, marks=pytest.mark.slow),
        pytest.param(2, None, 1e-6, marks=pytest.mark.slow),
        (2, "bfloat16", 1e-2),
    ],
)
def test_slices_meet_once_a_step_and_take_the_step_of_one_slice(monkeypatch, microbatches, dtype, gap):
    _, one, expected, _ = step_of_one_slice(microbatches)
    monkeypatch.setenv("MEGASCALE_NUM_SLICES", "2")
    mesh, two, model, found = step_once("auto", microbatches, None if dtype is None else jnp.dtype(dtype))
    assert dict(mesh.shape) == {"dcn": 2, "dp": 1, "fsdp": 2, "tp": 1}
    assert model.embed.array.shape == (16, 16)
    assert two.loss == pytest.approx(one.loss, rel=1e-6)
    assert two.values["grad_norm"] == pytest.approx(one.values["grad_norm"], rel=gap)
    for ours, theirs in zip(jax.tree.leaves(model), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=gap, atol=gap)
    owners = [slice_index(device) for device in mesh.devices.flat]
    between = [each for each in found if each.crosses(owners)]
    assert between and all(each.kind == "all-reduce" and each.times == 1 for each in between)
    assert sum(each.bytes for each in between) < 2 * (16 * 16 + 16 + 16) * 4, "each gradient once, split inside a slice"
