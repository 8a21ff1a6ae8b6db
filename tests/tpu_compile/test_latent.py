"""Multi-head latent attention through the TPU compiler, with the sizes of DeepSeek V3's heads."""

import pytest

pytest.importorskip("libtpu", reason="the extra [plan] brings the TPU compiler")


from benchmarks.tpu_programs import weights_on
from lockstep.engine import Engine, EngineConfig
from lockstep.engine.sizing.memory_model import MemoryModel
from lockstep.models import Experts, RotaryConfig, YarnScaling
from lockstep.models.families.deepseek_v3 import DeepseekV3Config
from lockstep.models.families.family import ModelPreset
from lockstep.placement import make_mesh
from lockstep.plan.traffic import copies
from lockstep.types import Request, SamplingParams
from lockstep.xla import Hlo, topology
from tests.tpu_compile.steps import compiled_gradient
from tests.tpu_compile.test_experts import kernels

LENGTH = 1024
CONFIG = DeepseekV3Config(
    max_seq_len=LENGTH,
    hidden_dim=512,
    intermediate_dim=512,
    num_layers=3,
    num_heads=16,
    num_kv_heads=16,
    rope=RotaryConfig(yarn=YarnScaling(factor=40.0)),
    experts=Experts(
        num_experts=16,
        num_experts_per_tok=4,
        intermediate_dim=256,
        shared_intermediate_dim=256,
        mlp_only_layers=(0,),
        scoring="biased_sigmoid",
        groups=4,
        groups_per_tok=2,
    ),
)
SLICES = ["v5p-8", pytest.param("v6e-4", marks=pytest.mark.nightly)]


@pytest.mark.slow
@pytest.mark.parametrize("slice_", SLICES)
def test_decoding_keeps_the_latent_in_place_and_within_what_is_predicted(slice_):
    mesh = make_mesh("auto", list(topology(slice_).devices))
    weights = weights_on(mesh, ModelPreset(config=CONFIG, vocab_size=1024), "bfloat16")
    params = SamplingParams(max_new_tokens=64, temperature=0.7)
    requests = [Request(prompt_id=i, prompt_tokens=tuple(range(400)), params=params) for i in range(32)]
    engine = Engine(EngineConfig(layout={"tensor": 2}, max_seq_len=512, memory_bytes_per_device=1 << 30), mesh)
    engine.prepare((CONFIG, weights), requests)
    assert "takes K and V, and here is a latent of both, of 576 numbers" in engine.sizing.describe()
    sizes, predicted = engine.sizes, MemoryModel(engine.decode_model).temporaries(engine.sizes)
    assert engine.decode_model.kv_bytes == CONFIG.num_layers * 576 * 2
    for name in ("prefill", "decode"):
        memory, hlo = engine.programs[name].memory(), Hlo(engine.programs[name].text(), ())
        assert not copies(hlo, (CONFIG.num_layers * sizes.pages, sizes.page_size, 1, 576)), name
        assert memory.temp_size_in_bytes <= predicted[name], name
        assert kernels(engine.programs[name].text()) == 3, "gate, up and down of the experts that are hit"


@pytest.mark.nightly
@pytest.mark.parametrize("slice_", ["v5p-8", "v6e-4"])
def test_training_attends_by_the_kernel_with_values_narrower_than_keys(slice_):
    assert "splash" in compiled_gradient(CONFIG, slice_)
