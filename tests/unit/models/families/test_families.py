"""Every family that is read from Hugging Face: tokens, gradients, adapters and checkpoints, with transformers' own."""

import dataclasses
import json
import re
from collections.abc import Container
from pathlib import Path
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import lockstep
from lockstep.errors import ConfigError
from lockstep.models import LoraConfig, join_trained, load_hf, save_hf, split_trained
from lockstep.models.hf.adapters import save_peft
from lockstep.types import Request, SamplingParams
from tests.adapters import GATE_UP, MLPS, merged, with_adapters
from tests.numpy_forward import Tensors, forward, logits_of, read_tensors
from tests.unit.engine.models import mesh_of

GOLDEN = Path(__file__).parents[3] / "golden"
BIASED = ["deepseek_v3", "deepseek_v3_lite", "glm4_moe", "glm4_moe_lite", "minimax_m2"]
QWEN = ["qwen2_moe", "qwen3_moe", "qwen3_moe_mixed", "qwen3_next", "qwen3_5_moe"]
EXPERTS = [*BIASED, *QWEN, "deepseek_v2", "deepseek_v2_lite", "gpt_oss", "hunyuan_v1_moe", "mixtral", "olmoe"]
EXPERTS += ["gemma4_moe", "mistral4"]
FAMILIES = [*EXPERTS, "arcee", "cohere2", "gemma2", "gemma3", "glm4", "olmo2", "olmo3", "phi3", "qwen3_5"]
FAMILIES += ["ernie4_5", "exaone4", "gemma", "granite", "hunyuan_v1_dense", "ministral3", "seed_oss", "smollm3"]
FAMILIES += ["gemma4"]
LLAMAS = ["llama3", "llama_tied", "mistral", "qwen2", "qwen3"]
"""Families whose layers tests/unit/engine has in every layout."""
UNLIKE = ("deepseek_v3", "gpt_oss", "qwen3_next")
"""Families that have the fewest layers in common, with each other and with those of `make test`: latents, sinks, a
memory. The others are nightly."""
DEFAULT = LoraConfig(r=2, alpha=3.0)


def some_fast(name: str, fast: str, slow: Container[str], *values: Any) -> Any:
    marks = () if name == fast else pytest.mark.slow if name in slow else pytest.mark.nightly
    return pytest.param(name, *values, marks=marks)


def load(path: Path, shape: str) -> Any:
    """The model; its backward pass computes no layer again, which gives the same gradients and compiles sooner."""
    config = dataclasses.replace(lockstep.models.load_config(str(path)), gradient_checkpointing=False)
    return load_hf(str(path), mesh_of(shape), config=config)


@pytest.mark.parametrize("family", [*FAMILIES, *LLAMAS])
def test_the_oracle_is_transformers(family: str) -> None:
    golden = np.load(GOLDEN / family / "golden.npz")
    assert np.abs(forward(GOLDEN / family, golden["input_ids"]) - golden["logits"]).max() < 5e-5


@pytest.mark.parametrize("family", [some_fast(name, "phi3", UNLIKE) for name in (*FAMILIES, *LLAMAS)])
@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        ("1,1,2", {"tensor": 2}),
        *(pytest.param(*case, marks=pytest.mark.nightly) for case in (
            ("1,1,1", "auto"), ("1,1,2", "training"), ("1,2,2", {"tensor": 2})
        )),
    ],
)  # fmt: skip
def test_the_engine_writes_what_transformers_writes(family: str, shape: str, layout: Any) -> None:
    golden = np.load(GOLDEN / family / "golden.npz")
    model = load(GOLDEN / family, shape)
    params = SamplingParams(max_new_tokens=20)
    asked = [
        Request(prompt_id=row, prompt_tokens=tuple(ids.tolist()), params=params)
        for row, ids in enumerate(golden["input_ids"])
    ]
    engine = lockstep.Engine(lockstep.EngineConfig(layout=layout), mesh_of(shape))
    answers = engine.generate(model, asked)
    tokens = np.array([answer.tokens for answer in answers])
    if "generated" in golden:
        assert tokens.tolist() == golden["generated"].tolist()
    texts = np.concatenate([golden["input_ids"], tokens], axis=1)
    logits = forward(GOLDEN / family, texts)[:, golden["input_ids"].shape[1] - 1 : -1]
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    assert tokens.tolist() == logprobs.argmax(-1).tolist()
    assert np.abs(logprobs.max(-1) - [answer.logprobs for answer in answers]).max() < 5e-5


@pytest.mark.parametrize("family", [some_fast(name, "cohere2", (*UNLIKE, "gemma2")) for name in (*FAMILIES, *LLAMAS)])
def test_logits_are_those_of_transformers_and_gradients_of_the_oracle(family: str, tmp_path: Path) -> None:
    """Along a random direction of each kind of tensor, by a central difference in float64."""
    golden, rng = np.load(GOLDEN / family / "golden.npz"), np.random.default_rng(0)
    config, tensors = json.loads((GOLDEN / family / "config.json").read_text()), read_tensors(GOLDEN / family)
    ids = golden["input_ids"]

    def loss(model: Any) -> Any:
        logits = model(hax.named(ids, ("batch", "position"))).array
        return -jnp.mean(jax.nn.log_softmax(logits)[..., 0]), logits

    def loss_of(tensors: Tensors) -> float:
        logits = logits_of(config, tensors, ids)
        return -float(np.mean(logits[..., 0] - np.log(np.exp(logits).sum(-1))))

    gradients, logits = jax.jit(jax.grad(loss, has_aux=True))(load(GOLDEN / family, "1,1,1"))
    assert np.abs(logits - golden["logits"]).max() < 1e-4
    save_hf(gradients, tmp_path / "gradient")
    gradient = read_tensors(tmp_path / "gradient")
    assert gradient.keys() == tensors.keys()
    for kind in sorted({re.sub(r"\.\d+\.", ".*.", name) for name in tensors}):
        moved = [name for name in tensors if re.sub(r"\.\d+\.", ".*.", name) == kind]
        if kind.endswith("layer_scalar"):  # no parameter in transformers
            assert all(not gradient[name].any() for name in moved)
            continue
        way = {name: rng.standard_normal(tensors[name].shape) for name in moved}
        ahead, behind = (
            loss_of(Tensors(tensors | {name: tensors[name] + step * way[name] for name in moved}))
            for step in (1e-6, -1e-6)
        )
        slope = sum(float(np.sum(gradient[name] * way[name])) for name in moved)
        norm = np.sqrt(sum(float(np.sum(np.square(gradient[name]))) for name in moved))  # the slope may be near zero
        assert abs(slope - (ahead - behind) / 2e-6) <= 1e-4 * norm, kind


@pytest.mark.parametrize("family", [some_fast(name, "", UNLIKE) for name in FAMILIES])
def test_a_saved_checkpoint_is_the_one_that_was_loaded(family: str, tmp_path: Path) -> None:
    model = load_hf(str(GOLDEN / family), mesh_of("1,1,2"), dtype=jnp.bfloat16)
    save_hf(model, tmp_path / "out", max_shard_bytes=20_000)
    ours, theirs = (
        {name: each for file in path.glob("*.safetensors") for name, each in load_file(file).items()}
        for path in (tmp_path / "out", GOLDEN / family)
    )
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        np.testing.assert_array_equal(ours[name], tensor, err_msg=name)
    assert lockstep.models.load_config(str(tmp_path / "out")) == model.config


@pytest.mark.parametrize(
    ("family", "lora"),
    [
        *(some_fast(each, "", ("phi3",), DEFAULT) for each in FAMILIES),
        *(pytest.param(each, MLPS, marks=pytest.mark.nightly) for each in ("qwen2_moe", "qwen3_moe_mixed")),
        pytest.param("gpt_oss", GATE_UP, marks=pytest.mark.slow),
    ],
)
def test_adapters_are_trained_and_saved_merged(family: str, lora: LoraConfig, tmp_path: Path) -> None:
    model = with_adapters(load(GOLDEN / family, "1,1,1"), lora)
    trained, frozen = split_trained(model)
    ids = hax.named(np.load(GOLDEN / family / "golden.npz")["input_ids"], ("batch", "position"))
    gradients = jax.jit(jax.grad(lambda part: join_trained(part, frozen)(ids).array.std()))(trained)
    assert all(np.all(np.abs(leaf).reshape(len(leaf), -1).max(axis=1) > 0) for leaf in jax.tree.leaves(gradients))
    save_hf(model, tmp_path / "out")
    expected = jax.tree.leaves(merged(model))
    for ours, theirs in zip(jax.tree.leaves(load(tmp_path / "out", "1,1,1")), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("family", "modules"),
    [
        pytest.param("phi3", ("all-linear",), marks=pytest.mark.slow),
        pytest.param("phi3", ("k_proj", "up_proj"), marks=pytest.mark.slow),
        pytest.param("qwen3_5", ("in_proj_qkv", "in_proj_z", "out_proj"), marks=pytest.mark.slow),
        ("mixtral", ("q_proj", *MLPS.target_modules)),  # an adapter of each expert
        pytest.param(
            "gpt_oss", ("q_proj", *GATE_UP.target_modules), marks=pytest.mark.slow
        ),  # of parameters of all experts
        pytest.param("gpt_oss", ("down_proj",), marks=pytest.mark.slow),
    ],
)
def test_peft_adds_what_the_merged_model_has(family: str, modules: tuple[str, ...], tmp_path: Path) -> None:
    lora = LoraConfig(r=2, alpha=3.0, target_modules=modules)
    model = with_adapters(load(GOLDEN / family, "1,1,1"), lora)
    pairs = model.pairs

    def read_pair(name: str, layer: int) -> Any:
        return np.asarray(pairs[name].a.array[layer]), np.asarray(pairs[name].b.array[layer])

    save_peft(tmp_path / "peft", model.config, lora, "base", read_pair)
    save_hf(merged(model), tmp_path / "merged")
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    adapters = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    base = load_file(GOLDEN / family / "model.safetensors")
    used: set[str] = set()
    for name, expected in load_file(tmp_path / "merged" / "model.safetensors").items():
        weight = np.asarray(base[name], np.float32)
        key, module = f"base_model.model.{name.removesuffix('.weight')}.lora_", name.split(".")[-2]
        if module in config["target_modules"] and name.endswith(".weight"):
            low, high = adapters[f"{key}A.weight"], adapters[f"{key}B.weight"]
            rank = config["rank_pattern"].get(module, config["r"])
            alpha = config["alpha_pattern"].get(module, config["lora_alpha"])
            assert low.shape[0] == high.shape[1] == rank
            weight = weight + alpha / rank * high @ low
            used |= {f"{key}A.weight", f"{key}B.weight"}
        elif any(name.endswith(f".{parameter}") for parameter in config["target_parameters"]):
            # As `peft.tuners.lora.layer.ParamWrapper.get_delta_weight` has it of a parameter [expert, in, out]; the
            # module is wrapped for gate_up_proj, and outside that for down_proj.
            wraps = ".base_layer" * (module == "experts" and "gate_up" in name and len(config["target_parameters"]) > 1)
            key = f"base_model.model.{name.rpartition('.')[0]}{wraps}.lora_"
            low, high = adapters[f"{key}A.weight"], adapters[f"{key}B.weight"]
            low, high = low.reshape(len(weight), -1, low.shape[-1]), high.reshape(len(high), -1, len(weight))
            weight = weight + config["lora_alpha"] / config["r"] * np.einsum("ore,eri->eio", high, low)
            used |= {f"{key}A.weight", f"{key}B.weight"}
        np.testing.assert_allclose(weight, expected, rtol=1e-5, atol=1e-5, err_msg=name)
    assert used == adapters.keys()


@pytest.mark.parametrize(
    ("family", "modules", "why"),
    [
        ("qwen3_moe", ("q_proj", "up_proj"), "gate_proj and up_proj of experts are one parameter in transformers"),
        ("qwen3_moe_mixed", MLPS.target_modules, "the MLPs beside experts have adapters, which PEFT skips"),
        ("qwen2_moe", ("down_proj",), "the MLPs beside experts have adapters, which PEFT skips"),
        ("mistral4", ("gate_proj", "up_proj"), "transformers has no names of single experts of mistral4"),
        ("gemma4_moe", ("up_proj",), "transformers has no names of single experts of gemma4_text"),
    ],
)
def test_what_peft_would_not_load_whole_is_refused(family: str, modules: tuple[str, ...], why: str) -> None:
    config = lockstep.models.load_config(str(GOLDEN / family))
    with pytest.raises(ConfigError, match=f"cannot be saved as PEFT has them: {why}.*Export the merged model"):
        save_peft("nowhere", config, LoraConfig(target_modules=modules), "base", lambda name, place: ())
