"""A train step, and a gradient alone, for devices without there being any."""

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from lockstep.models import LlamaLMHeadModel
from lockstep.placement import COMPUTE_AXES, make_mesh
from lockstep.training import (
    OptimizerConfig,
    StepSettings,
    TrainStep,
    batch_structs,
    lm_loss,
    parse_precision,
    state_structs,
)
from lockstep.xla import topology


def lowered_step(config, vocab, mesh, batch, *, length=256, optimizer=None, microbatches=1, **settings):
    """The structs of a training state, and a step of ``batch`` rows for it."""
    optimizer, precision = (optimizer or OptimizerConfig()).build(8), parse_precision("p=f32,c=bf16")
    state, shardings = state_structs(
        lambda key: LlamaLMHeadModel.init(hax.Axis("vocab", vocab), config, key=key), optimizer, mesh, precision
    )
    step = TrainStep(
        loss_fn=lm_loss, optimizer=optimizer, schedule=None, mesh=mesh, shardings=shardings,
        settings=StepSettings(precision=precision, **settings), microbatches=microbatches,
    )  # fmt: skip
    columns = {"tokens": jax.ShapeDtypeStruct((length,), np.int32), "loss_mask": jax.ShapeDtypeStruct((length,), bool)}
    return state, step.lower(state, batch_structs(columns, batch, mesh))


def compiled_gradient(config, slice_, rows=4):
    """The text of the program with the gradient of a sum over logits, rows of the model's length split over a slice."""
    mesh = make_mesh("1,2,-1", topology(slice_).devices)
    everywhere = NamedSharding(mesh, PartitionSpec())
    model = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16, sharding=everywhere),
        eqx.filter_eval_shape(LlamaLMHeadModel.init, hax.Axis("vocab", 1024), config, key=jax.random.key(0)),
    )
    over_rows = NamedSharding(mesh, PartitionSpec("fsdp"))
    tokens = jax.ShapeDtypeStruct((rows, config.max_seq_len), jnp.int32, sharding=over_rows)

    def loss(model, tokens):
        with hax.axis_mapping(COMPUTE_AXES):
            logits = model(hax.named(tokens, ("batch", "position"))).array
        return jnp.mean(jnp.square(logits.astype(jnp.float32)))

    with jax.set_mesh(mesh):
        return jax.jit(jax.grad(loss)).lower(model, tokens).compile().as_text()
