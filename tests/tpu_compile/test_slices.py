"""Two slices, by the TPU compiler: a slice sends to another when the microbatches are done, and no weight to decode."""

import functools
import math

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("libtpu", reason="the extra [plan] brings the TPU compiler")

from benchmarks.tpu_programs import weights_on
from lockstep.engine import Engine, EngineConfig
from lockstep.main.plan.collectives import collectives
from lockstep.main.plan.compiler import topology
from lockstep.main.plan.hlo import Hlo
from lockstep.models import LlamaConfig, LlamaLMHeadModel
from lockstep.models.families.family import ModelPreset
from lockstep.placement import data_shards, make_mesh
from lockstep.training import OptimizerConfig, TrainStep, batch_structs, lm_loss, parse_precision, state_structs
from lockstep.types import Request, SamplingParams

pytestmark = pytest.mark.slow

CONFIG = LlamaConfig(
    max_seq_len=512, hidden_dim=256, intermediate_dim=512, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=128
)


@pytest.fixture(autouse=True)
def libtpu(monkeypatch):
    for name in ("ALLOW_MULTIPLE_LIBTPU_LOAD", "TPU_SKIP_MDS_QUERY"):
        monkeypatch.setenv(name, "1")


def sent(text):
    """How often each transfer to another slice runs, and the bytes that it sends."""
    runs = [run for run in Hlo(text).runs if run.op.kind == "send"]
    assert len(runs) == sum(one.slices == 2 for one in collectives(Hlo(text), 1)), "all of them are between two slices"
    return [(run.computation, run.times, run.op.arrays[0].bytes) for run in runs]


@pytest.mark.parametrize(("shape", "dtype"), [("1,4,1", None), ("1,4,1", "bfloat16"), ("1,2,2", None)])
def test_slices_exchange_each_gradient_once_a_step_and_nothing_between_microbatches(shape, dtype):
    mesh = make_mesh(shape, topology("2xv6e-4").devices)
    optimizer, precision = OptimizerConfig().build(8), parse_precision("p=f32,c=bf16")
    init = functools.partial(_init, hax.Axis("vocab", 1024))
    state, shardings = state_structs(init, optimizer, mesh, precision)
    step = TrainStep(
        loss_fn=lm_loss, optimizer=optimizer, schedule=None, mesh=mesh, shardings=shardings, precision=precision,
        microbatches=2, reduce_dtype=None if dtype is None else jnp.dtype(dtype),
    )  # fmt: skip
    columns = {"tokens": jax.ShapeDtypeStruct((256,), np.int32), "loss_mask": jax.ShapeDtypeStruct((256,), bool)}
    hlo = Hlo(text := step.lower(state, batch_structs(columns, 4 * data_shards(mesh), mesh)).compile().as_text())
    loops = {name for run in hlo.runs for name in run.op.called().get("body", ())}
    found = sent(text)
    assert loops and not loops & {computation for computation, _, _ in found}
    assert {times for _, times, _ in found} == {1}
    gradients = sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in jax.tree.leaves(state.model))
    size = 4 if dtype is None else 2
    assert gradients * size <= sum(count for _, _, count in found) < 1.1 * gradients * size


def _init(vocab, key):
    return LlamaLMHeadModel.init(vocab, CONFIG, key=key)


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
