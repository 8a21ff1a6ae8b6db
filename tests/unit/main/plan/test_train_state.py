"""The state of a run as shapes, and the step that takes it."""

import dataclasses

import jax
import pytest

from lockstep.main.plan.train_state import make_state
from lockstep.main.plan.train_step import saved_bytes
from lockstep.models import LoraConfig, skeleton
from lockstep.placement import make_mesh
from lockstep.training import OptimizerConfig, TrainerConfig, TrainStep, batch_structs, lm_loss
from tests.unit.main.plan.test_train_step import workload_of


@pytest.mark.slow
def test_state_and_step_of_adapters_are_planned():
    lora = LoraConfig(r=4, base_dtype="bfloat16")
    workload = dataclasses.replace(workload_of(lora=lora), dtype="bfloat16", mesh_shape="1,4,1")
    mesh = make_mesh("1,4,1", jax.devices()[:4])
    state = make_state(workload, mesh)
    base = sum(leaf.size for leaf in jax.tree.leaves(skeleton(40, workload.model)))
    assert state.parameters - state.trained == 2 * base // 4
    assert 2 * state.trained <= state.optimizer <= 2 * state.trained + 64, "two moments of the adapters alone"
    changing = jax.tree.leaves(state.structs.split()[0])
    assert state.checkpoint == sum(leaf.size * leaf.dtype.itemsize for leaf in changing), "by the one host there is"
    assert saved_bytes(workload, 2) > 0
    step = TrainStep(
        loss_fn=lm_loss, optimizer=OptimizerConfig().build(1000), schedule=None, mesh=mesh, shardings=state.shardings,
        precision=TrainerConfig().precision, microbatches=1,
    )  # fmt: skip
    compiled = step.lower(state.structs, batch_structs(workload.training.columns, 8, mesh)).compile()
    resident = state.parameters + state.optimizer
    assert resident <= compiled.memory_analysis().argument_size_in_bytes <= resident + 4096
    outputs = compiled.memory_analysis().output_size_in_bytes
    assert state.trained + state.optimizer <= outputs <= state.trained + state.optimizer + 1024, (
        "the base is not copied"
    )
