"""Layers with and without a window in one model, through the TPU compiler: in its kernels the window is a constant."""

import dataclasses
from typing import Any

import pytest

pytest.importorskip("libtpu", reason="the extra [plan] brings the TPU compiler")


from benchmarks.tpu_programs import weights_on
from lockstep.engine import Engine, EngineConfig
from lockstep.engine.sizing.memory_model import MemoryModel
from lockstep.models import LlamaConfig, RotaryConfig, Variant, find_preset
from lockstep.models.families.family import ModelPreset
from lockstep.models.families.gemma4 import Gemma4Config, Gemma4Variant, NormedExperts, WideHeads
from lockstep.models.families.olmo3 import Olmo3Config, Olmo3Variant
from lockstep.placement import make_mesh
from lockstep.plan.traffic import copies
from lockstep.types import Request, SamplingParams
from lockstep.xla import Hlo, topology
from tests.tpu_compile.steps import compiled_gradient

LENGTH = 2048
SIZES: dict[str, Any] = {
    "max_seq_len": LENGTH,
    "hidden_dim": 1024,
    "intermediate_dim": 1024,
    "num_layers": 6,
    "num_heads": 8,
    "num_kv_heads": 4,
    "head_dim": 128,
    "qk_norm": True,
}
GEMMA3 = LlamaConfig(
    **SIZES,
    rope=RotaryConfig(theta=1e6, linear_factor=8.0),
    variant=Variant(
        sliding_window=512,
        layer_types=("sliding_attention",) * 5 + ("full_attention",),
        sliding_rope=RotaryConfig(theta=1e4),
    ),
)
# The layers of a kind have a factor of scores, too, and norms are over all heads together.
OLMO3 = Olmo3Config(
    **SIZES, rope=find_preset("olmo-3-7b").config.rope, variant=Olmo3Variant(sliding_window=512, full_attention_every=3)
)


def kernels(text: str) -> int:
    return text.count('custom_call_target="tpu_custom_call"')


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "slice_"),
    [
        (GEMMA3, "v5p-8"),
        pytest.param(GEMMA3, "v6e-4", marks=pytest.mark.nightly),
        pytest.param(OLMO3, "v5p-8", marks=pytest.mark.nightly),
    ],
)
def test_decoding_chooses_between_two_calls_of_the_kernel(config, slice_):
    mesh = make_mesh("auto", list(topology(slice_).devices))
    weights = weights_on(mesh, ModelPreset(config=config, vocab_size=1024), "bfloat16")
    params = SamplingParams(max_new_tokens=64, temperature=0.7)
    requests = [Request(prompt_id=i, prompt_tokens=tuple(range(960)), params=params) for i in range(64)]
    engine = Engine(EngineConfig(layout={"tensor": 2}, max_seq_len=1024, memory_bytes_per_device=1 << 30), mesh)
    engine.prepare((config, weights), requests)
    assert "attention: TPU kernel" in engine.sizing.describe()
    sizes, predicted = engine.sizes, MemoryModel(engine.decode_model).temporaries(engine.sizes)
    pool = (config.num_layers * sizes.pages, sizes.page_size, 2 * config.num_kv_heads // 2, config.head_size)
    for name in ("prefill", "decode"):
        memory, hlo = engine.programs[name].memory(), Hlo(engine.programs[name].text(), ())
        assert not copies(hlo, pool), name
        assert memory.alias_size_in_bytes == sizes.pages * sizes.page_size * engine.decode_model.kv_bytes
        assert memory.temp_size_in_bytes <= predicted[name], name
        # One writes, and of the two that attend each layer runs one. The last layer of a prefill only writes.
        assert kernels(engine.programs[name].text()) == (3 if name == "decode" else 4), name


@pytest.mark.nightly
@pytest.mark.parametrize(("config", "slice_"), [(GEMMA3, "v5p-8"), (GEMMA3, "v6e-4"), (OLMO3, "v5p-8")])
def test_training_chooses_between_two_kernels_forward_and_backward(config, slice_):
    # One kernel forward for each window, one more when layers are recomputed, and two backward.
    assert kernels(compiled_gradient(config, slice_)) == 2 * (2 + 2)


GEMMA4 = Gemma4Config(
    **SIZES | {"num_heads": 16, "num_kv_heads": 8, "head_dim": 256},
    variant=Gemma4Variant(sliding_window=512, full_attention_every=3),
    wide=WideHeads(num_kv_heads=2, head_dim=512),
)
EXPERTS = NormedExperts(num_experts=16, num_experts_per_tok=4, intermediate_dim=256, shared_intermediate_dim=1024)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "slice_"),
    [
        (GEMMA4, "v5p-8"),
        pytest.param(GEMMA4, "v6e-4", marks=pytest.mark.nightly),
        pytest.param(dataclasses.replace(GEMMA4, experts=EXPERTS), "v5p-8", marks=pytest.mark.nightly),
    ],
)
def test_heads_of_two_sizes_are_read_from_one_pool_in_place(config, slice_):
    mesh = make_mesh("auto", list(topology(slice_).devices))
    weights = weights_on(mesh, ModelPreset(config=config, vocab_size=1024), "bfloat16")
    params = SamplingParams(max_new_tokens=64, temperature=0.7)
    requests = [Request(prompt_id=i, prompt_tokens=tuple(range(400)), params=params) for i in range(32)]
    engine = Engine(EngineConfig(layout={"tensor": 2}, max_seq_len=512, memory_bytes_per_device=1 << 30), mesh)
    engine.prepare((config, weights), requests)
    text = engine.sizing.describe()
    assert "which takes heads of one shape, and layers here have heads of 256 and 512 numbers" in text
    assert "K and V of 1 heads of 512 (in pages of which 50% is unused) in 2 layers" in text
    sizes, predicted = engine.sizes, MemoryModel(engine.decode_model).temporaries(engine.sizes)
    for name in ("prefill", "decode"):
        memory, hlo = engine.programs[name].memory(), Hlo(engine.programs[name].text(), ())
        assert not copies(hlo, (config.num_layers * sizes.pages, sizes.page_size, 8, 256)), name
        assert memory.alias_size_in_bytes == sizes.pages * sizes.page_size * engine.decode_model.kv_bytes
        assert memory.temp_size_in_bytes <= predicted[name], name
