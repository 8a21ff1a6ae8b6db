"""The train step of a plan, and its state."""

import dataclasses
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from lockstep.errors import ConfigError
from lockstep.main.plan import train_step
from lockstep.main.plan.train_step import (
    bubble,
    compile_step,
    largest_that_works,
    make_state,
    peak,
    saved_bytes,
    step_flops,
)
from lockstep.main.plan.workload import Infeasibility, InfeasibleError, TrainingWorkload, Workload
from lockstep.models import LoraConfig, skeleton
from lockstep.placement import make_mesh
from lockstep.training import OptimizerConfig, TrainerConfig, TrainStep, batch_structs, lm_loss
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


def test_what_the_backward_pass_needs_grows_with_the_rows_and_shrinks_with_rematerialisation():
    whole, half = saved_bytes(workload_of(), 4), saved_bytes(workload_of(), 2)
    assert whole == pytest.approx(2 * half, rel=0.05)
    assert saved_bytes(workload_of(remat=True), 4) < whole / 2


@pytest.mark.parametrize(("measured", "total"), [(700, 710), (0, 310)])
def test_the_worst_moment_is_the_compilers_or_arguments_and_temporaries_and_the_code(measured, total):
    memory = SimpleNamespace(
        peak_memory_in_bytes=measured,
        argument_size_in_bytes=100,
        temp_size_in_bytes=200,
        generated_code_size_in_bytes=10,
    )
    assert peak(SimpleNamespace(memory=memory)) == total


def workload(parallelism):
    found = workload_of()
    trainer = dataclasses.replace(found.training.trainer, per_device_parallelism=parallelism)
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
    ("parallelism", "key", "largest"),
    [(8, "trainer.per_device_parallelism", 2), ("auto", "data.max_seq_len", 128)],
)
def test_a_number_that_was_given_and_other_reasons_stand(monkeypatch, parallelism, key, largest):
    with pytest.raises(InfeasibleError, match="too many"):
        plan(parallelism, monkeypatch, key, largest)


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


def test_a_stage_computes_in_the_bubble_too():
    """The bubble, (p - 1) / (v m + p - 1): layers are computed so much more often, the output layer is not."""
    trainer = TrainerConfig(train_batch_size=12, per_device_parallelism=2)
    idle = [bubble(trainer, make_mesh(shape, jax.devices()[:3])) for shape in ("1,3,1", "pp=3")]
    idle.append(bubble(dataclasses.replace(trainer, pipeline_repeats=3), make_mesh("pp=3", jax.devices()[:3])))
    assert idle == [0, 2 / 8, 2 / 20]
    output = 3 * 2 * 16 * 40 * 8 * 32
    whole, staged = (step_flops(workload_of(), vocab_blocks=False, idle=idle) for idle in (0.0, 0.25))
    assert staged - output == pytest.approx((whole - output) / 0.75)
