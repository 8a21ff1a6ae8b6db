"""The floating-point operations of a train step."""

import dataclasses

import jax
import pytest

from lockstep.main.plan.step_flops import bubble, step_flops
from lockstep.models import LoraConfig
from lockstep.placement import make_mesh
from lockstep.training import TrainerConfig
from tests.unit.main.plan.test_train_step import workload_of


def test_operations_of_a_step_are_two_per_weight_and_token_three_times():
    # A layer: q and o 16 x 32 each, k and v 16 x 16 each, the MLP 3 x 16 x 24; and all pairs of 32 positions.
    weights = 2 * 16 * 32 + 2 * 16 * 16 + 3 * 16 * 24
    pairs = 2 * 2 * 4 * 8 * 32
    layers, output = 2 * (2 * weights + pairs), 2 * 16 * 40
    assert step_flops(workload_of(), vocab_blocks=False) == 3 * (layers + output) * 8 * 32


def test_frozen_weights_cost_two_operations_backward_and_adapters_four():
    lora = LoraConfig(r=4, target_modules=("q_proj", "down_proj"), base_dtype="float32")
    adapters = 2 * 4 * (16 + 32 + 24 + 16)
    whole, ours = (step_flops(workload_of(lora=one), vocab_blocks=False) for one in (None, lora))
    pairs = 2 * 2 * 4 * 8 * 32
    tokens = 8 * 32
    frozen = (whole - 2 * 3 * pairs * tokens) * 2 / 3 + 2 * 3 * pairs * tokens
    assert ours == pytest.approx(frozen + 2 * 3 * adapters * tokens)


def test_layers_that_are_computed_twice_cost_a_third_more_and_the_output_does_not():
    twice, once = (step_flops(workload_of(remat=remat), vocab_blocks=False) for remat in (True, False))
    output = 3 * 2 * 16 * 40 * 8 * 32
    assert (twice - output) / (once - output) == pytest.approx(4 / 3)


def test_a_row_of_two_sequences_costs_twice_as_much():
    one, two = (step_flops(workload_of(sequences_per_row=n), vocab_blocks=False) for n in (1, 2))
    assert two == 2 * one


def test_logits_in_blocks_are_computed_twice():
    blocks, whole = (step_flops(workload_of(), vocab_blocks=blocks) for blocks in (True, False))
    assert blocks - whole == 2 * 16 * 40 * 8 * 32


def test_a_stage_computes_in_the_bubble_too():
    """The bubble, (p - 1) / (v m + p - 1): layers are computed so much more often, the output layer is not."""
    trainer = TrainerConfig(train_batch_size=12, per_device_parallelism=2)
    idle = [bubble(trainer, make_mesh(shape, jax.devices()[:3])) for shape in ("1,3,1", "pp=3")]
    idle.append(bubble(dataclasses.replace(trainer, pipeline_repeats=3), make_mesh("pp=3", jax.devices()[:3])))
    assert idle == [0, 2 / 8, 2 / 20]
    output = 3 * 2 * 16 * 40 * 8 * 32
    whole, staged = (step_flops(workload_of(), vocab_blocks=False, idle=idle) for idle in (0.0, 0.25))
    assert staged - output == pytest.approx((whole - output) / 0.75)
