"""What a train step is compiled for."""

import jax
import jax.numpy as jnp
import numpy as np

from lockstep.placement import make_mesh
from lockstep.training import OptimizerConfig, batch_structs, parse_precision, state_structs
from tests.unit.training.bigrams import Bigrams


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
