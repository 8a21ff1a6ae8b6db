"""The train step of a plan, and its state."""

import dataclasses
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from lockstep.errors import ConfigError
from lockstep.models import LoraConfig, skeleton
from lockstep.placement import make_mesh
from lockstep.plan import train_step
from lockstep.plan.step_flops import step_flops
from lockstep.plan.train_step import compile_step, largest_that_works, make_state, peak, saved_bytes
from lockstep.plan.workload import Infeasibility, InfeasibleError, TrainingWorkload, Workload
from lockstep.training import OptimizerConfig, StepSettings, TrainerConfig, TrainStep, batch_structs, lm_loss
from tests.adapters import MLPS
from tests.unit.engine.models import FAMILIES, LLAMA


@pytest.mark.parametrize("limit", range(0, 18))
@pytest.mark.parametrize("guess", [1, 5, 16])
def test_the_search_finds_the_largest_in_few_questions(limit, guess):
    asked = []

    def works(value):
        assert value not in asked, "the compiler is slow: nothing is asked twice"
        asked.append(value)
        return value <= limit

    values = list(range(1, 17))
    assert largest_that_works(values, guess, works) == (min(limit, 16) or None)
    assert len(asked) <= 9


def test_a_good_guess_is_confirmed_with_two_questions():
    asked = []

    def works(value):
        asked.append(value)
        return value <= 4

    assert largest_that_works([1, 2, 4, 8, 16], 4, works) == 4
    assert asked == [4, 8]


def workload_of(**values):
    model = dataclasses.replace(
        values.pop("model", LLAMA),
        gradient_checkpointing=values.pop("remat", False),
        attn_backend=values.pop("attn_backend", "vanilla"),
    )
    training = TrainingWorkload(
        trainer=TrainerConfig(train_batch_size=8),
        optimizer=OptimizerConfig(),
        loss=lm_loss,
        columns={"tokens": jax.ShapeDtypeStruct((32,), np.int32), "loss_mask": jax.ShapeDtypeStruct((32,), bool)},
        **values,
    )
    return Workload(
        command="train-lm",
        model=model,
        model_key="model",
        vocab_size=40,
        mesh_shape="auto",
        dtype="float32",
        training=training,
        sampling=[],
    )


def test_what_the_backward_pass_needs_grows_with_the_rows_and_shrinks_with_rematerialisation():
    whole, half = saved_bytes(workload_of(), 4), saved_bytes(workload_of(), 2)
    assert whole == pytest.approx(2 * half, rel=0.05)
    assert saved_bytes(workload_of(remat=True), 4) < whole / 2


def test_the_worst_moment_is_the_compilers_and_the_code():
    memory = SimpleNamespace(peak_memory_in_bytes=700, temp_size_in_bytes=200, generated_code_size_in_bytes=10)
    assert peak(SimpleNamespace(memory=memory)) == 710


def workload(parallelism, limit=None):
    found = workload_of()
    trainer = dataclasses.replace(
        found.training.trainer, per_device_parallelism=parallelism, memory_bytes_per_device=limit
    )
    return dataclasses.replace(found, training=dataclasses.replace(found.training, trainer=trainer))


def plan(parallelism, monkeypatch, key="trainer.per_device_parallelism", largest=2):
    asked = []

    def plan_step(workload, *rest):
        asked.append(workload.training.trainer.per_device_parallelism)
        if asked[-1] in (8, "auto"):
            raise InfeasibleError(Infeasibility(key=key, value=asked[-1], largest=largest, text="too many"))
        return "plan"

    monkeypatch.setattr(train_step, "plan_step", plan_step)
    return train_step.plan_largest_step(workload(parallelism), None, None, None, 0), asked


def test_auto_plans_with_the_largest_that_works(monkeypatch):
    assert plan("auto", monkeypatch) == ("plan", ["auto", 2])


@pytest.mark.parametrize(
    ("parallelism", "key", "largest"), [(8, "trainer.per_device_parallelism", 2), ("auto", "data.max_seq_len", 128)]
)
def test_a_number_that_was_given_and_other_reasons_stand(monkeypatch, parallelism, key, largest):
    with pytest.raises(InfeasibleError, match="too many"):
        plan(parallelism, monkeypatch, key, largest)


NEEDED = {1: 80 << 20, 2: 50 << 20, 4: 30 << 20, 8: 20 << 20}
"""The bytes of a made-up step, by the number of microbatches."""


def compiled(*rest, microbatches, length=None):
    """Stands in for the compiler."""
    memory = SimpleNamespace(
        peak_memory_in_bytes=NEEDED[microbatches],
        argument_size_in_bytes=0,
        temp_size_in_bytes=0,
        generated_code_size_in_bytes=0,
    )
    return SimpleNamespace(memory=memory)


def limited(limit, monkeypatch, reference=0, memory=100 << 20):
    """The microbatches of the plan on a device with so much memory, of which a reference model takes a part."""
    monkeypatch.setattr(train_step, "compile_step", compiled)
    monkeypatch.setattr(train_step, "saved_bytes", lambda *rest: 0)
    asked = dataclasses.replace(workload("auto", limit), mesh_shape="1,1,1")
    mesh = make_mesh("1,1,1", jax.devices()[:1])
    state = dataclasses.replace(make_state(asked, mesh), reference=reference)
    return train_step.plan_largest_step(asked, mesh, state, None, memory).microbatches


def test_auto_takes_the_rows_that_a_run_takes_with_its_limit(monkeypatch):
    assert limited(None, monkeypatch) == 1 and limited(None, monkeypatch, reference=30 << 20) == 2
    assert limited(50 << 20, monkeypatch) == 2 and limited((50 << 20) - 1, monkeypatch) == 4
    # The run's limit is for the train step and its state: a reference model is beside it.
    assert limited(50 << 20, monkeypatch, reference=40 << 20) == 2
    assert limited(30 << 20, monkeypatch, reference=60 << 20) == 4


@pytest.mark.parametrize(
    ("limit", "key", "largest", "text"),
    [
        (90 << 20, "trainer.memory_bytes_per_device", 60 << 20, "needs 83886080 bytes per device, of which there are"),
        (55 << 20, "trainer.memory_bytes_per_device", 40 << 20, "Set it to at most 41943040, or to null"),
        (1000, "trainer.memory_bytes_per_device", None, "is 1000.: no batch is small enough. Raise trainer.memory_by"),
    ],
)
def test_a_limit_beyond_the_device_or_below_the_state_is_refused(limit, key, largest, text, monkeypatch):
    with pytest.raises(InfeasibleError, match=text) as refused:
        limited(limit, monkeypatch, reference=(100 << 20) - (largest or 0))
    assert (refused.value.infeasibility.key, refused.value.infeasibility.largest) == (key, largest)


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
        settings=StepSettings(precision=TrainerConfig().precision), microbatches=1,
    )  # fmt: skip
    compiled = step.lower(state.structs, batch_structs(workload.training.columns, 8, mesh)).compile()
    resident = state.parameters + state.optimizer
    assert resident <= compiled.memory_analysis().argument_size_in_bytes <= resident + 4096
    outputs = compiled.memory_analysis().output_size_in_bytes
    assert state.trained + state.optimizer <= outputs <= state.trained + state.optimizer + 1024, (
        "the base is not copied"
    )


def test_all_experts_adapters_are_stored_and_a_tokens_are_multiplied():
    lora = dataclasses.replace(MLPS, base_dtype="float32")
    workload = dataclasses.replace(workload_of(model=FAMILIES["experts"], lora=lora), mesh_shape="1,4,1")
    state = make_state(workload, make_mesh("1,4,1", jax.devices()[:4]))
    # 2 layers of 6 experts: three factors of rank 3 on the embedding, 16 over 4 devices, three on the width of 12.
    assert state.trained == 4 * 2 * 6 * 3 * 3 * (16 // 4 + 12)
    assert 2 * state.trained <= state.optimizer <= 2 * state.trained + 64
    bare, ours = (workload_of(model=FAMILIES["experts"], lora=dataclasses.replace(lora, r=rank)) for rank in (1, 3))
    # A token has 3 of them, and is multiplied with 2 more ranks forward and twice backward.
    more = step_flops(ours, vocab_blocks=False) - step_flops(bare, vocab_blocks=False)
    assert more == 2 * 3 * 2 * 3 * 2 * 3 * (16 + 12) * 8 * 32


def test_the_step_is_planned_with_the_repeats_of_the_configuration():
    found, mesh = workload_of(), make_mesh("1,1,1", jax.devices()[:1])
    trainer = dataclasses.replace(found.training.trainer, pipeline_repeats=2)
    found = dataclasses.replace(found, training=dataclasses.replace(found.training, trainer=trainer))
    with pytest.raises(ConfigError, match="pipeline_repeats is 2, for 2 layers in 1 stages"):
        compile_step(found, mesh, make_state(found, mesh), None, microbatches=1)
