"""The states of linear attention through the TPU compiler: written in place beside the pool, and predicted."""

import math

import pytest

pytest.importorskip("libtpu", reason="the extra [plan] brings the TPU compiler")

from benchmarks.tpu_programs import weights_on
from lockstep.engine import Engine, EngineConfig
from lockstep.engine.sizing.memory_model import MemoryModel
from lockstep.models import LinearAttention
from lockstep.models.families.family import ModelPreset
from lockstep.models.families.qwen3_next import Qwen3NextConfig
from lockstep.placement import make_mesh
from lockstep.plan.traffic import copies
from lockstep.types import Request, SamplingParams
from lockstep.xla import Hlo, topology

CONFIG = Qwen3NextConfig(
    max_seq_len=2048,
    hidden_dim=1024,
    intermediate_dim=1024,
    num_layers=8,
    num_heads=8,
    num_kv_heads=2,
    linear_attention=LinearAttention(key_heads=4, value_heads=8),
    experts=None,
)


@pytest.mark.nightly  # in make slow: unit/engine/decoder/test_states.py
@pytest.mark.parametrize("slice_", ["v5p-8", "v6e-4"])
def test_states_are_written_in_place(slice_):
    mesh = make_mesh("auto", list(topology(slice_).devices))
    weights = weights_on(mesh, ModelPreset(config=CONFIG, vocab_size=1024), "bfloat16")
    params = SamplingParams(max_new_tokens=64, temperature=0.7)
    requests = [Request(prompt_id=i, prompt_tokens=tuple(range(960)), params=params) for i in range(64)]
    engine = Engine(EngineConfig(layout={"tensor": 2}, max_seq_len=1024, memory_bytes_per_device=1 << 30), mesh)
    engine.prepare((CONFIG, weights), requests)
    sizes, model = engine.sizes, engine.decode_model
    predicted, footprint = MemoryModel(model).temporaries(sizes), MemoryModel(model).footprint(sizes)
    memory = (6 * sizes.slots, 2, 2, 128, 128)
    assert model.sequence_bytes == 6 * 2 * (4 * math.prod(memory[2:]) + 2 * 3 * (2 * 128 + 2 * 128))
    for name in ("prefill", "decode"):
        program, hlo = engine.programs[name].memory(), Hlo(engine.programs[name].text(), ())
        assert not copies(hlo, memory), name
        assert program.alias_size_in_bytes >= footprint.pool, name
        assert program.temp_size_in_bytes <= predicted[name], name
