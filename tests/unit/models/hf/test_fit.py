"""Checkpoints whose tensors are not those of the model, or would not all be read."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from lockstep.errors import ConfigError
from lockstep.models import load_hf
from lockstep.placement import make_mesh
from tests.golden.variants import VARIANTS, Variant

UP = "model.layers.0.mlp.up_proj.weight"
MODULE = UP.removesuffix(".weight")


def refused(variant: Variant, target: Path, text: str) -> None:
    variant.write(target / "checkpoint")
    with pytest.raises(ConfigError, match=text):
        load_hf(target / "checkpoint", make_mesh("1,1,1", jax.devices()[:1]))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "float8_e4m3fn", "bool"])
def test_weights_that_are_no_floats_are_refused_before_their_shapes(dtype: str, tmp_path: Path) -> None:
    def change(tensors: dict[str, Any]) -> dict[str, Any]:
        return {**tensors, UP: tensors[UP].astype(getattr(ml_dtypes, dtype, dtype))[:3]}

    text = rf"is quantised: model\.safetensors has tensor {UP} of dtype (I8|U8|I32|F8_E4M3|BOOL)\. .*dequantise"
    refused(Variant("llama3", tensors=change), tmp_path, text)


QUANTISED: dict[str, Callable[[np.ndarray], dict[str, np.ndarray]]] = {
    "fp8": lambda weight: {UP: weight.astype(ml_dtypes.float8_e4m3fn), f"{UP}_scale": weight[:1, :1]},
    "compressed-tensors": lambda weight: {UP: weight.astype(np.int8), f"{MODULE}.weight_scale": weight[:, :1]},
    "packed": lambda weight: {f"{MODULE}.weight_packed": weight.astype(np.int32), f"{MODULE}.weight_scale": weight},
    "gptq": lambda weight: {f"{MODULE}.{name}": weight.astype(np.int32) for name in ("qweight", "qzeros", "g_idx")},
    "awq": lambda weight: {f"{MODULE}.qweight": weight.astype(np.int32), f"{MODULE}.scales": weight[:, :1]},
    "bitsandbytes 4": lambda weight: {UP: weight.astype(np.uint8).reshape(-1, 1), f"{UP}.absmax": weight[0]},
    "bitsandbytes 8": lambda weight: {UP: weight.astype(np.int8), f"{MODULE}.SCB": weight[:, 0]},
    "quanto": lambda weight: {f"{UP}._data": weight.astype(np.int8), f"{UP}._scale": weight[:, :1]},
    "factors of floats": lambda weight: {UP: weight, f"{UP}_scale_inv": np.ones((1, 1), np.float32)},
    "hqq": lambda weight: {f"{MODULE}.W_q": weight.astype(np.uint8), f"{MODULE}.zero": weight[:, :1]},
    "keys and values": lambda weight: {UP: weight, "model.layers.0.self_attn.k_proj.k_scale": weight[0, 0]},
}


@pytest.mark.parametrize("method", QUANTISED)
def test_quantised_weights_are_refused_by_that_name_where_the_configuration_says_nothing(
    method: str, tmp_path: Path
) -> None:
    def change(tensors: dict[str, Any]) -> dict[str, Any]:
        weight = tensors.pop(UP)
        parts = {name: np.ascontiguousarray(part) for name, part in QUANTISED[method](weight).items()}
        return {**tensors, **parts}

    refused(Variant("llama3", tensors=change), tmp_path, r"^the checkpoint in .* is quantised: model\.safetensors has")


def test_nothing_is_left_out(tmp_path: Path) -> None:
    def with_fewer_routes(tensors: dict[str, Any]) -> dict[str, Any]:
        fused = VARIANTS["qwen3_moe_fused"].tensors(tensors)
        return {name: value[:4].copy() if name.endswith("mlp.gate.weight") else value for name, value in fused.items()}

    fewer = Variant("qwen3_moe", {"num_local_experts": 4}, tensors=with_fewer_routes)
    refused(fewer, tmp_path / "experts", r"experts\.gate_up_proj in .* of shape \(5, 44, 42\) has more experts than")
    both = Variant("llama3", tensors=lambda tensors: {**tensors, "norm.weight": tensors["model.norm.weight"]})
    refused(both, tmp_path / "both", r"tensor norm\.weight in model\.safetensors of shape \(64,\) is not part of")


def test_a_model_that_was_saved_without_its_output_layer_is_told_how_to_save_it(tmp_path: Path) -> None:
    def without_head(tensors: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in tensors.items() if name != "lm_head.weight"}

    text = r"but lm_head\.weight, the output layer: it was saved by AutoModel\. Save it by AutoModelForCausalLM"
    refused(Variant("llama3", {"architectures": ["LlamaModel"]}, tensors=without_head), tmp_path, text)


WRAPPED = {
    "torch.compile": ("_orig_mod.", "Save the module _orig_mod of that one"),
    "DistributedDataParallel": ("module.", "Save the module module of that one"),
    "PEFT": ("base_model.model.", "Save the module base_model.model of that one"),
}


@pytest.mark.parametrize("wrapper", WRAPPED)
def test_a_model_that_was_saved_inside_another_module_is_told_by_the_prefix(wrapper: str, tmp_path: Path) -> None:
    prefix, text = WRAPPED[wrapper]
    wrapped = Variant("llama3", tensors=lambda tensors: {prefix + name: value for name, value in tensors.items()})
    refused(
        wrapped, tmp_path, rf"has the tensors of the model as {prefix}model\.embed_tokens\.weight and so on.*{text}"
    )


@pytest.mark.parametrize("name", [f"{MODULE}.base_layer.weight", f"{MODULE}.lora_A.default.weight"])
def test_an_adapter_that_is_not_merged_is_refused_by_what_to_do(name: str, tmp_path: Path) -> None:
    def change(tensors: dict[str, Any]) -> dict[str, Any]:
        return {**tensors, name: tensors.pop(UP) if "base_layer" in name else tensors[UP][:2].copy()}

    refused(Variant("llama3", tensors=change), tmp_path, rf"has tensor {name} of an adapter.*merge_and_unload")


@pytest.mark.parametrize(
    ("family", "key", "text"),
    [
        ("llama3", "num_hidden_layers", r"has 9999 layers, and the checkpoint in .* has \d+ tensors, fewer than"),
        ("qwen3_moe", "num_local_experts", r"has 9999 experts, and the checkpoint in .* has \d+ tensors, fewer than"),
    ],
)
def test_more_layers_or_experts_than_tensors_are_refused_before_each_has_a_name(
    family: str, key: str, text: str, tmp_path: Path
) -> None:
    refused(Variant(family, {key: 9999}), tmp_path, text)
