"""The collectives of a train step that the TPU compiler makes: weights gathered, gradients scattered, nothing else."""

import collections
import dataclasses

import haliax as hax
import jax
import numpy as np
import pytest

from lockstep.models import LlamaConfig, LlamaLMHeadModel
from lockstep.placement import make_mesh
from lockstep.plan.collectives import collectives
from lockstep.plan.fsdp import fsdp_bytes
from lockstep.plan.hlo import Hlo
from lockstep.plan.topology import topology
from lockstep.training import OptimizerConfig, TrainStep, batch_structs, lm_loss, parse_precision, state_structs

pytest.importorskip("libtpu", reason="the TPU compiler comes with the extra [plan]")

LAYERS, MICROBATCHES = 4, 2
WEIGHTS = 7
"""Matrices of a layer: q, k, v, o, gate, up, down."""


@pytest.mark.parametrize("width", [2048, 512])  # 512 on 8 devices: pieces of the embedding axis would be thin
def test_each_weight_is_gathered_twice_and_each_gradient_scattered_once_per_microbatch(width):
    config = LlamaConfig(
        max_seq_len=256, hidden_dim=width, intermediate_dim=4 * width, num_layers=LAYERS, num_heads=8, num_kv_heads=8
    )
    mesh, precision = make_mesh("auto", list(topology("v5p-16").devices)), parse_precision("p=f32,c=bf16")
    optimizer = OptimizerConfig().build(10)

    def init(key):
        return LlamaLMHeadModel.init(hax.Axis("vocab", 1024), config, key=key)

    state, shardings = state_structs(init, optimizer, mesh, precision)
    step = TrainStep(
        loss_fn=lm_loss, optimizer=optimizer, schedule=None, mesh=mesh, shardings=shardings, precision=precision,
        microbatches=MICROBATCHES,
    )  # fmt: skip
    row = jax.ShapeDtypeStruct((256,), np.int32)
    batch = batch_structs({"tokens": row, "loss_mask": row}, 8 * MICROBATCHES, mesh)
    hlo = Hlo(step.lower(state, batch).compile().as_text())
    found = collectives(hlo, mesh.size)
    each = LAYERS * MICROBATCHES
    in_layers = collections.Counter()
    for one in found:
        if one.times == each and one.bytes > 2 * width:  # norms are vectors
            in_layers[one.kind] += 1
    assert in_layers == {"all-gather": 2 * WEIGHTS, "reduce-scatter": WEIGHTS}
    moved = fsdp_bytes(state.model, mesh.shape, found, microbatches=MICROBATCHES, itemsize=2)
    assert 0.7 < moved.ratio < 1.15, dataclasses.asdict(moved)
