"""Two slices, by the TPU compiler: a slice sends to another when the microbatches are done, and no weight to decode."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("libtpu", reason="the extra [plan] brings the TPU compiler")

from benchmarks.tpu_programs import weights_on
from lockstep.engine import Engine, EngineConfig
from lockstep.engine.decode_model import DecodeModels
from lockstep.engine.sizing.cost_model import from_other_slices
from lockstep.models import LlamaConfig, read_decoder
from lockstep.models.families.family import ModelPreset
from lockstep.placement import data_shards, make_mesh, reshard_function
from lockstep.types import Request, SamplingParams
from lockstep.xla import Hlo, collectives, topology
from tests.tpu_compile.steps import lowered_step

pytestmark = pytest.mark.slow

CONFIG = LlamaConfig(
    max_seq_len=512, hidden_dim=256, intermediate_dim=512, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=128
)

MICROBATCHES = 2


def sent(text):
    """How often each transfer to another slice runs, and the bytes that it sends."""
    runs = [run for run in Hlo(text).runs if run.op.kind == "send"]
    assert len(runs) == sum(one.slices == 2 for one in collectives(Hlo(text), 1)), "all of them are between two slices"
    return [(run.computation, run.times, run.op.arrays[0].bytes) for run in runs]


@pytest.mark.nightly  # in make slow: test_two_slices_are_planned of test_planner.py
@pytest.mark.parametrize(("shape", "dtype"), [("1,4,1", "bfloat16"), ("1,4,1", None), ("1,2,2", None)])
def test_slices_exchange_each_gradient_once_a_step_and_nothing_between_microbatches(shape, dtype):
    mesh = make_mesh(shape, topology("2xv6e-4").devices)
    reduce_dtype = None if dtype is None else jnp.dtype(dtype)
    batch = 4 * data_shards(mesh)
    state, step = lowered_step(CONFIG, 1024, mesh, batch, microbatches=MICROBATCHES, reduce_dtype=reduce_dtype)
    hlo = Hlo(text := step.compile().as_text())
    loops = {name for run in hlo.runs for name in run.op.called().get("body", ())}
    found = sent(text)
    assert loops and not loops & {computation for computation, _, _ in found}
    assert {times for _, times, _ in found} == {1}
    gradients = [leaf.sharding.shard_shape(leaf.shape) for leaf in jax.tree.leaves(state.model)]
    numbers = sum(map(math.prod, gradients))
    size = 4 if dtype is None else 2
    assert numbers * size <= sum(count for _, _, count in found) < 1.1 * numbers * size

    # From microbatch to microbatch a device keeps its parts of the gradients; those of a table that is looked up are
    # never whole, all others are summed once in a microbatch among the devices that the parameter is split over.
    (loop,) = (run.op for run in hlo.runs if run.op.kind == "while" and run.computation == hlo.entry)
    kept = [array.dims for array in loop.arrays if array.dtype == "f32" and len(array.dims) > 1]
    assert sorted(kept) == sorted(shape for shape in gradients if len(shape) > 1)
    fsdp, tp = mesh.shape["fsdp"], mesh.shape["tp"]
    inside = [one for one in collectives(hlo, mesh.size) if one.times > 1]
    assert all(group[-1] < fsdp * tp for one in inside for group in one.groups), "devices of one slice"
    over_fsdp = {tuple(range(first, fsdp * tp, tp)) for first in range(tp)}
    whole = {"all-reduce": 1, "reduce-scatter": fsdp}
    summed = sum(
        one.times // MICROBATCHES * one.bytes * whole[one.kind]
        for one in inside
        if one.kind in whole and set(one.groups) == over_fsdp
    )
    weights = 2 * (numbers - math.prod(gradients[0])) * fsdp
    assert weights <= summed < 1.1 * weights


@pytest.mark.nightly  # in make slow: two slices in test_planner.py
@pytest.mark.parametrize("repeats", [1, 2])
def test_stages_hand_on_one_microbatch_at_a_time_and_add_up_what_both_have_once_a_step(repeats):
    mesh = make_mesh("pp=2,fsdp=-1", topology("2xv6e-4").devices)
    config, batch = dataclasses.replace(CONFIG, num_layers=4), 4 * data_shards(mesh)
    state, step = lowered_step(config, 1024, mesh, batch, microbatches=2, repeats=repeats)
    transfers = sent(step.compile().as_text())
    # 2 * 2 microbatches of 2 rows to a device, there and back around the ring, forward and backward, in bfloat16.
    passed = [(times, size) for _, times, size in transfers if times > 1]
    assert passed == [(4 * repeats + 1, 2 * 256 * CONFIG.hidden_dim * 2)] * 4
    whole = sum(leaf.array.size for leaf in (state.model.embed, state.model.lm_head)) // 4
    # A stage has half of the layers, of which it gives away a half, and gets its gradient back.
    whole += sum(leaf.size for leaf in jax.tree.leaves(state.model.layers)) // 4 // 2 * (repeats > 1)
    assert whole * 2 <= sum(size for _, times, size in transfers if times == 1) < 1.1 * whole * 2


def test_decoding_takes_the_layers_of_the_other_stage_once_as_predicted():
    mesh = make_mesh("pp=2,fsdp=-1", topology("2xv6e-4").devices)
    state, _ = lowered_step(CONFIG, 1024, mesh, 4 * data_shards(mesh))
    for options in ({"dtype": "bfloat16"}, {"weight_dtype": "int8"}):
        model = DecodeModels(EngineConfig(**options), *read_decoder(state.model), mesh)[{"tensor": 2}]
        move, _ = reshard_function(model.layouts, model.dtype, gather=True)
        with jax.set_mesh(model.decode_mesh.mesh):
            found = sent(jax.jit(move).lower(model.weights).compile().as_text())
        assert from_other_slices(model) == sum(times * size for _, times, size in found) > 0


@pytest.mark.nightly  # in make slow: test_two_slices_are_planned of test_planner.py
@pytest.mark.parametrize("name", ["2xv5p-16", "2xv6e-16"])
def test_decoding_takes_no_weight_from_another_slice(name):
    mesh = make_mesh("auto", topology(name).devices)
    weights = weights_on(mesh, ModelPreset(config=CONFIG, vocab_size=1024), "float32")
    params = SamplingParams(max_new_tokens=64, temperature=0.7)
    requests = [Request(prompt_id=i, prompt_tokens=tuple(range(64)), params=params) for i in range(16)]
    config = EngineConfig(layout={"tensor": 2}, max_seqs=8, dtype="bfloat16", memory_bytes_per_device=20 << 30)
    engine = Engine(config, mesh)
    engine.prepare((CONFIG, weights), requests)
    assert "reshard" in engine.programs
    for program, compiled in engine.programs.items():
        between = sent(compiled.text())
        assert sum(count for _, _, count in between) < 64 << 10, (program, between)
        assert program == "decode" or not between
