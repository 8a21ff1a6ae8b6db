"""What ``plan --json`` writes."""

import dataclasses
from types import SimpleNamespace
from unittest import mock

from lockstep.engine.sizing.cost_model import Estimate
from lockstep.main.plan import summary, table
from lockstep.main.plan.summary import _exact_forward_s, _exact_merge, _renamed, rollout_step
from lockstep.main.plan.table import _exact, _split
from lockstep.models import LlamaConfig, LoraConfig
from lockstep.training import TrainerConfig
from tests.unit.engine.models import FAMILIES


def test_keys_stay_when_the_code_has_another_name():
    sizes = {"page_copies": 1, "idle_replicas": 2, "slots": 3}
    assert _renamed(sizes) == {"forks": 1, "resting": 2, "slots": 3}
    assert list(_renamed({"reshard": "a", "prefill": "b", "copy_pages": "c"})) == ["relay", "prefill", "fork"]


def sampling(steps, total_s):
    workload = SimpleNamespace(steps=steps)
    return SimpleNamespace(workload=workload, sizing=SimpleNamespace(estimate=SimpleNamespace(total_s=total_s)))


def test_a_step_has_its_share_of_the_rollout_and_none_of_what_training_does_not_wait_for():
    plan = SimpleNamespace(sampling=[sampling(None, 50.0), sampling(4, 12.0)])
    with mock.patch.object(summary, "train_time", lambda plan: SimpleNamespace(step_s=1.0)):
        split = rollout_step(plan)
        assert split is not None and (split.rollout_s, split.update_s, split.step_s) == (3.0, 1.0, 4.0)
        assert rollout_step(SimpleNamespace(sampling=[sampling(None, 50.0)])) is None
    assert _split(split) == "a step: 4 s, of which rollout 3 s (75%, without prefill) and update 1 s\n"


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


def test_what_exact_numerics_cost_is_told():
    estimate = Estimate(
        reshard_s=0.0, memory_s=3.0, compute_s=0.5, collectives_s=1.0, steps=1.0, active=1.0, reread_s=1.0
    )
    one = SimpleNamespace(workload=SimpleNamespace(name="rollout"), sizing=SimpleNamespace(estimate=estimate))
    with mock.patch.object(table, "train_time", lambda plan: SimpleNamespace(exact_s=2.0, merge_s=0.0)):
        text = _exact(SimpleNamespace(sampling=[one]))
    assert "16 rows at a time: a train step 2 s more; rollout: decode steps of 4 s, 3 s with numerics fast" in text
    with mock.patch.object(
        table, "train_time", lambda plan: SimpleNamespace(exact_s=2.0, merge_s=1.0, merge_bytes=1 << 30)
    ):
        assert "a train step 2 s more, 1 s of them merging adapters (1.00 GiB read and written)" in _exact(
            SimpleNamespace(sampling=[])
        )
