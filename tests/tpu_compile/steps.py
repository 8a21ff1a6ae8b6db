"""A train step that is lowered for devices without there being any."""

import haliax as hax
import jax
import numpy as np

from lockstep.models import LlamaLMHeadModel
from lockstep.training import (
    OptimizerConfig,
    StepSettings,
    TrainStep,
    batch_structs,
    lm_loss,
    parse_precision,
    state_structs,
)


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
