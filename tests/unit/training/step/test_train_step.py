"""Where the parameters of a train step are placed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from lockstep.errors import ConfigError
from lockstep.placement import make_mesh
from lockstep.training import (
    OptimizerConfig,
    TrainStep,
    batch_structs,
    lm_loss,
    parameter_shardings,
    parse_precision,
    state_structs,
)
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
        loss_fn=lm_loss, optimizer=optimizer, schedule=None, mesh=mesh, shardings=shardings, precision=precision,
        microbatches=1,
    )  # fmt: skip
    row = {name: jax.ShapeDtypeStruct((9,), dtype) for name, dtype in (("tokens", np.int32), ("loss_mask", np.bool_))}
    text = step.lower(state, batch_structs(row, 8, mesh)).as_text()
    assert text.count("jax.buffer_donor") + text.count("tf.aliasing_output") == len(jax.tree.leaves(state))
