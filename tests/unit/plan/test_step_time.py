"""The time of a train step, at best and as it is to be expected."""

import dataclasses
from types import SimpleNamespace

import jax
import pytest

from lockstep.models import LlamaConfig, LoraConfig
from lockstep.plan.step_time import EXPOSED_BYTES, StepTime, _exact_forward_s, _exact_merge, least_time
from lockstep.training import TrainerConfig
from tests.unit.engine.models import FAMILIES
from tests.unit.plan.test_train_step import workload_of


def test_what_is_exposed_is_no_part_of_the_time_at_best():
    time = StepTime(compute_s=3.0, memory_s=1.0, collectives_s=4.0, tokens=1, exposed_s=0.5)
    assert (time.step_s, time.expected_s) == (4.0, 4.5)


def test_by_sizes_alone_each_device_receives_its_weights_twice_and_gradients_once():
    """Two layers on 4 CPU devices: the numbers of `step_flops` and `fsdp_floor`, by those of the chip."""

    workload = workload_of(remat=True)
    time = least_time(workload, SimpleNamespace(devices=tuple(jax.devices()[:4])))
    assert time.tokens == 8 * 32
    assert time.exposed_s / time.compute_s == pytest.approx(EXPOSED_BYTES * 200e9 / 15e9), "those of a CPU"
    layers = 2 * (2 * 16 * 32 + 2 * 16 * 16 + 3 * 16 * 24 + 2 * 16)
    outside = 16 * 40 + 16
    assert time.collectives_s == pytest.approx(4 * 3 / 4 * (3 * layers + 2 * outside) / 2e9, rel=1e-6)


def plan_of(batch, gradient_checkpointing=False, **chip):
    """A plan for four devices, two of which split weights; of exact numerics."""
    config = LlamaConfig(
        hidden_dim=16, intermediate_dim=32, num_layers=2, num_heads=4, num_kv_heads=4,
        gradient_checkpointing=gradient_checkpointing,
    )  # fmt: skip
    trainer = TrainerConfig(mp="p=f32,c=bfloat16", train_batch_size=batch)
    workload = SimpleNamespace(
        model=dataclasses.replace(config, numerics="exact"), vocab_size=50, training=SimpleNamespace(trainer=trainer)
    )
    topology = SimpleNamespace(devices=[SimpleNamespace(platform="tpu")])
    sizes = {"dp": 1, "fsdp": 2, "tp": 2}
    return SimpleNamespace(workload=workload, mesh_shape=sizes, topology=topology, chip=SimpleNamespace(**chip))


LAYERS = 2 * (4 * 16 * 16 + 3 * 16 * 32)
WEIGHTS = LAYERS + 16 * 50
"""The numbers of all weights that are multiplied with."""


def test_the_forward_pass_of_exact_numerics_reads_weights_for_each_16_rows():
    assert _exact_forward_s(plan_of(8, flops=1e30, bandwidth=1.0), 68) == 3 * 2 * WEIGHTS / 2, "34 rows, 2 bytes"
    assert _exact_forward_s(plan_of(8, flops=1.0, bandwidth=1e30), 68) == 2 * WEIGHTS * 68 / 4
    again = plan_of(8, gradient_checkpointing=True, flops=1.0, bandwidth=1e30)
    assert _exact_forward_s(again, 68) == 2 * (WEIGHTS - LAYERS) * 68 / 4, "layers are computed again, but not first"


def test_merging_adapters_reads_and_writes_the_blocks_of_a_device():
    """Two weights have 256 and 512 numbers in each of two layers; the rank is 12, two times 8 at most."""
    plan = plan_of(8, flops=1e30, bandwidth=10.0)
    lora = LoraConfig(r=12, target_modules=("q_proj", "down_proj"))
    plan.workload.training.lora, plan.training = lora, SimpleNamespace(microbatches=3)
    own = 3 * 2 * (256 + 512) // 4
    assert _exact_merge(plan) == (own * (2 + 2 + 2 * 8) / 10, own * 20)
    plan.topology.devices[0].platform, plan.chip = "cpu", SimpleNamespace(flops=1.0, bandwidth=1e30)
    assert _exact_merge(plan) == (2 * 12 * own, own * 12)
    experts = FAMILIES["experts"]
    plan.workload.model, plan.mesh_shape = dataclasses.replace(experts, numerics="exact"), {"dp": 2, "fsdp": 2, "tp": 1}
    plan.workload.training.lora = LoraConfig(r=2, target_modules=("up_proj",))
    assert _exact_merge(plan)[1] == 3 * 2 * 6 * 16 * 12 // 2 * 12, "each replica its own"
    plan.workload.model = experts
    assert _exact_merge(plan) == (0.0, 0)
