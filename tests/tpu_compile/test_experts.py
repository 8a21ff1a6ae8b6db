"""Programs with experts, compiled for TPUs: the kernel that reads the experts that were hit, forward and backward."""

import dataclasses
import re
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import pytest

from benchmarks.tpu_programs import weights_on
from lockstep.engine import Engine, EngineConfig
from lockstep.models import Experts, Qwen3MoeConfig, find_preset
from lockstep.models.expert_mlps import AdaptedMatrices, ExpertWeights, mixture
from lockstep.models.experts import route
from lockstep.models.families.family import ModelPreset
from lockstep.models.trainable import skeleton
from lockstep.placement import COMPUTE_AXES, batch_spec, make_mesh
from lockstep.plan.fsdp import fsdp_bytes
from lockstep.plan.traffic import copies
from lockstep.training import parameter_shardings
from lockstep.types import Request, SamplingParams
from lockstep.xla import Hlo, collectives, topology

pytest.importorskip("libtpu", reason="the TPU compiler comes with the extra [plan]")

pytestmark = pytest.mark.nightly  # in make slow: the experts of test_latent.py

# A layer of Qwen3-30B-A3B, twice.
CONFIG = Qwen3MoeConfig(
    max_seq_len=1024, hidden_dim=2048, intermediate_dim=6144, num_layers=2, num_heads=32, num_kv_heads=4, head_dim=128,
    experts=Experts(num_experts=128, num_experts_per_tok=8, intermediate_dim=768),
)  # fmt: skip
# A layer of gpt-oss-20b with a window, and one without; gate and up are one product.
GPT_OSS = dataclasses.replace(find_preset("gpt-oss-20b").config, num_layers=2, max_seq_len=1024)
# Megablox's operands begin with the number of tiles, and for each group and tile three tables and the group's offset.
GMM = re.compile(r"tpu_custom_call.*constraints=\{s32\[\], " + r"s32\[\d+\]\{0\}, " * 3 + r"s32\[1\]\{0\}")


def kernels(text: str) -> int:
    return sum(bool(GMM.search(line)) for line in text.splitlines())


@pytest.mark.parametrize(("slice_name", "expert"), [("v5p-8", 4), ("v6e-8", 1), ("v6e-8", 4), ("tpu7x-8", 4)])
def test_decode_and_prefill_multiply_by_the_kernel(slice_name: str, expert: int) -> None:
    mesh = make_mesh("auto", list(topology(slice_name).devices))
    model = CONFIG, weights_on(mesh, ModelPreset(config=CONFIG, vocab_size=512), "bfloat16")
    engine = Engine(EngineConfig(layout={"tensor": 4, "expert": expert}, memory_bytes_per_device=8 << 30), mesh)
    params = SamplingParams(max_new_tokens=64)
    engine.prepare(model, [Request(prompt_id=i, prompt_tokens=(1,) * 100, params=params) for i in range(64)])
    for name in ("decode", "prefill"):
        text = engine.programs[name].text()
        assert kernels(text) == 3, name
        # The device's 32 experts of both layers are an operand of the kernel; nothing has those of one layer. Or a
        # quarter of each: 192 of 768 columns in 256, as two tiles.
        one, both = ("[32,2048,768]", "[64,2048,768]") if expert == 4 else ("[128,2048,256]", "[256,2048,256]")
        assert f"bf16{one}" not in text and f"bf16{both}" in text and "2048,192]" not in text, name
        assert engine.programs[name].memory().temp_size_in_bytes < 32 << 20, "nothing copies them"


def test_layers_with_an_mlp_and_layers_with_experts_are_two_branches() -> None:
    """Each layer runs one of them, on weights of all layers of its kind that nothing copies into the branch."""
    experts = dataclasses.replace(CONFIG.experts, mlp_only_layers=(0,))
    config = dataclasses.replace(CONFIG, num_layers=3, experts=experts)
    mesh = make_mesh("auto", list(topology("v6e-8").devices))
    model = config, weights_on(mesh, ModelPreset(config=config, vocab_size=512), "bfloat16")
    engine = Engine(EngineConfig(layout={"tensor": 4, "expert": 4}, memory_bytes_per_device=8 << 30), mesh)
    params = SamplingParams(max_new_tokens=64)
    engine.prepare(model, [Request(prompt_id=i, prompt_tokens=(1,) * 100, params=params) for i in range(64)])
    for name in ("decode", "prefill"):
        text = engine.programs[name].text()
        assert kernels(text) == 3 and "conditional(" in text, name
        assert "bf16[32,2048,768]" not in text and "bf16[64,2048,768]" in text, name
        hlo = Hlo(text, ())
        assert not any(copies(hlo, shape) for shape in ((64, 2048, 768), (2, 32, 2048, 768), (64, 768, 2048))), name


def test_gpt_oss_is_decoded_on_a_tpu() -> None:
    mesh = make_mesh("auto", list(topology("v6e-8").devices))
    model = GPT_OSS, weights_on(mesh, ModelPreset(config=GPT_OSS, vocab_size=512), "bfloat16")
    engine = Engine(EngineConfig(layout={"tensor": 4, "expert": 4}, memory_bytes_per_device=8 << 30), mesh)
    params = SamplingParams(max_new_tokens=64)
    engine.prepare(model, [Request(prompt_id=i, prompt_tokens=(1,) * 100, params=params) for i in range(64)])
    assert [kernels(engine.programs[name].text()) for name in ("decode", "prefill")] == [2, 2]
    # By the kernel that returns the sums of its softmax, of which a sink is one more term.
    assert all("/partial_attention/pallas_call" in engine.programs[name].text() for name in ("decode", "prefill"))
    assert engine.sizing is not None and "TPU kernel, on the KV cache itself" in engine.sizing.describe()


FEWER = dataclasses.replace(CONFIG, experts=dataclasses.replace(CONFIG.experts, num_experts=16))


@pytest.mark.parametrize(
    ("config", "products", "slice_name"),
    [(CONFIG, 3, "v5p-8"), (FEWER, 3, "v5p-16"), (GPT_OSS, 2, "v5p-8")],
    ids=["qwen3_moe", "16 experts", "gpt_oss"],
)
def test_a_gradient_multiplies_by_the_kernel_and_is_scattered_while_it_is_summed(
    config: Any, products: int, slice_name: str
) -> None:
    mesh = make_mesh("auto", list(topology(slice_name).devices))
    model = skeleton(512, config)
    shardings = parameter_shardings(model, mesh)
    structs = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16), model)

    def loss(model: Any, ids: jax.Array) -> jax.Array:
        with hax.axis_mapping(COMPUTE_AXES):
            return jnp.mean(model(hax.named(ids, ("batch", "position"))).array)

    with jax.set_mesh(mesh):
        ids = jax.ShapeDtypeStruct((mesh.size, 256), jnp.int32)
        rows = jax.sharding.NamedSharding(mesh, batch_spec(mesh))
        lowered = jax.jit(jax.grad(loss), in_shardings=(shardings, rows), out_shardings=shardings).lower(structs, ids)
        text = lowered.compile().as_text()
    # Forward, again for the backward pass, and for each product the gradients of its two factors.
    assert kernels(text) == 4 * products
    moved = fsdp_bytes(model, mesh.shape, collectives(Hlo(text), mesh.size), microbatches=1, itemsize=2)
    assert moved.ratio is not None and moved.ratio < 1.15, "of what FSDP needs"


@pytest.mark.parametrize("rank", [16, 3])
def test_adapters_multiply_by_the_kernel_and_frozen_experts_have_no_gradient(rank: int) -> None:
    mesh = make_mesh("1,1,1", list(topology("v6e-1").devices))
    whole = jax.sharding.NamedSharding(mesh, jax.P())
    x, router, gate, down, low, high, low_down, high_down = (
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=whole)
        for shape in (
            *((512, 512), (512, 8), (8, 512, 384), (8, 384, 512)),
            *((8, 512, rank), (8, rank, 384), (8, 384, rank), (8, rank, 512)),
        )
    )
    frozen, factors = (gate, gate, down), ((low, high), (low, high), (low_down, high_down))

    def loss(x: Any, factors: Any, router: Any, frozen: Any) -> Any:
        weights = ExpertWeights(
            *(AdaptedMatrices(weight, a, b) for weight, (a, b) in zip(frozen, factors, strict=True))
        )
        experts = Experts(num_experts=8, num_experts_per_tok=2)
        return jnp.sum(mixture(x, route(x, router, None, experts), weights, "silu").astype(jnp.float32) ** 2)

    with jax.set_mesh(mesh):
        text = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(x, factors, router, frozen).compile().as_text()
    # Forward, and the gradients of the rows, of three weights and six factors; and those of the factors.
    assert kernels(text) == 9 + 9 + 6
