"""Configurations with keys missing, null, changed and doubled, in both spellings, against transformers' own classes."""

import copy
import dataclasses
import json
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import transformers
from packaging.version import Version
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from lockstep.errors import ConfigError
from lockstep.models import LlamaConfig, config_from_hf
from tests.fuzz.hostile import SECONDS

GOLDEN = Path(__file__).parents[1] / "golden"
FAMILIES = sorted({place.parent.name for place in GOLDEN.glob("*/config.json")} - {"reward_model"})  # a classifier
if Version(transformers.__version__) < Version("5.24"):
    FAMILIES.remove("olmo3")  # whose layers have one rotary setting there
SAME_CLASS = ("deepseek_v2_lite", "deepseek_v3_lite", "llama_tied", "qwen3_moe_mixed")
"""Families that share their class of transformers, and so their reader, with another; nightly."""
BY_CLASS = [pytest.param(name, marks=[pytest.mark.nightly] * (name in SAME_CLASS)) for name in FAMILIES]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 64,
}
ROTARY: list[dict[str, Any]] = [
    *({"rope_scaling": scaling, **beside} for scaling in (YARN, LLAMA3) for beside in (
        {}, {"original_max_position_embeddings": 32}, {"rope_theta": 500.0}, {"rope_theta": None},
        {"rope_parameters": scaling}, {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}, "rope_theta": 300.0},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 300.0, "factor": 2.0}, "rope_theta": 300.0},
        {"rope_parameters": {}}, {"rope_parameters": None},
    )),
    *({"rope_scaling": {**YARN, **change}} for change in (
        {"factor": None}, {"attention_factor": 1.0}, {"attention_factor": 1.5}, {"mscale": 1.0, "mscale_all_dim": 1.0},
        {"mscale": 0.707}, {"mscale": 0.707, "mscale_all_dim": 1.0}, {"beta_fast": 16, "beta_slow": 2},
        {"beta_fast": None, "beta_slow": None}, {"truncate": False}, {"rope_theta": 777.0}, {"rope_theta": None},
        {"partial_rotary_factor": 0.5}, {"type": "linear"}, {"original_max_position_embeddings": None},
    )),
    *({"rope_scaling": scaling} for scaling in (
        {"type": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}, {"factor": 4.0}, {"type": "linear"},
        {"type": "yarn", "factor": 4.0}, {"type": "yarn"}, {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "default"}, {"rope_type": None}, {}, None, {"full_attention": YARN}, {"full_attention": YARN,
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0}},
    )),
    {"rope_scaling": {"type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 32},
    {"rope_scaling": YARN, "original_max_position_embeddings": None},
    {"rope_theta": 500.0}, {"rope_theta": None}, {"partial_rotary_factor": 0.5}, {"partial_rotary_factor": None},
    {"rope_local_base_freq": 77.0}, {"rope_local_base_freq": None},
]  # fmt: skip
OTHERS: list[dict[str, Any]] = [
    {"head_dim": None}, {"head_dim": 32}, {"num_key_value_heads": None}, {"num_experts": 3}, {"num_local_experts": 3},
    {"num_experts": 3, "num_local_experts": 3}, {"num_experts": None}, {"num_local_experts": None},
    *({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": layers} for layers in (0, 1)),
    {"use_sliding_window": True, "sliding_window": None}, {"use_sliding_window": None}, {"sliding_window": None},
    *({"sliding_window": 8, "layer_types": types} for types in ("alternating", "full", "sliding")),
    *({"sliding_window": 8, "use_sliding_window": used, "layer_types": "alternating"} for used in (True, False)),
    {"sliding_window": 8}, {"layer_types": None}, {"max_window_layers": None},
    {"attention_bias": True}, {"mlp_bias": True}, {"hidden_act": "gelu"}, {"hidden_act": "gelu_new"},
    {"hidden_activation": None}, {"hidden_activation": "gelu"}, {"hidden_activation": None, "hidden_act": "gelu"},
    {"tie_word_embeddings": True}, {"tie_word_embeddings": False}, {"tie_word_embeddings": None},
    {"qkv_bias": False}, {"norm_topk_prob": True}, {"norm_topk_prob": False}, {"norm_topk_prob": None},
    {"mlp_only_layers": [0]}, {"mlp_only_layers": None}, {"decoder_sparse_step": 2}, {"query_pre_attn_scalar": 49},
    {"attn_logit_softcapping": None}, {"final_logit_softcapping": None}, {"final_logit_softcapping": 5.0},
    {"attn_logit_softcapping": 0.0}, {"final_logit_softcapping": 0.0}, {"sliding_window_pattern": 2},
    {"sliding_window_pattern": 3, "layer_types": None}, {"use_bidirectional_attention": True}, {"rms_norm_eps": None},
    {"num_experts_per_tok": 1}, {"router_aux_loss_coef": None}, {"shared_expert_intermediate_size": 0},
    {"swiglu_limit": 5.0}, {"max_position_embeddings": 77}, {"pretraining_tp": 2},
    {"quantization_config": {"quant_method": "fp8"}}, {"quantization_config": None},
]  # fmt: skip
OF_TRAINING = {"gradient_checkpointing", "attn_backend", "numerics", "initializer_range"}
OUR_NAMES = {
    "num_attention_heads": "num_heads", "num_key_value_heads": "num_kv_heads", "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_dim", "rms_norm_eps": "layer_norm_epsilon", "head_dim": "head",
    "moe_intermediate_size": "intermediate_dim", "num_experts_per_tok": "experts", "attn_logit_softcapping":
    "attention_soft_cap", "final_logit_softcapping": "logit_soft_cap", "shared_expert_intermediate_size":
    "shared_intermediate_dim", "hidden_activation": "hidden_act", "first_k_dense_replace": "mlp_only_layers",
    "n_group": "groups", "topk_group": "groups_per_tok", "linear_num_key_heads": "key_heads",
    "linear_num_value_heads": "value_heads", "rope_parameters": "rope_theta",
}  # fmt: skip


def as_published(family: str) -> dict[str, dict[str, Any]]:
    """The configuration of a family in the spelling of transformers 5 and in that of 4."""
    hf = json.loads((GOLDEN / family / "config.json").read_text())
    if (by_layer := hf.pop("per_layer_config", None)) is not None:  # of transformers 5.24; as checkpoints have it
        (kv_heads,) = {heads["num_key_value_heads"] for heads in by_layer.values()}
        (head_dim,) = {heads["head_dim"] for heads in by_layer.values()}
        return {"new": {**hf, "num_global_key_value_heads": kv_heads, "global_head_dim": head_dim}}  # 4 has no class
    rope = hf.get("rope_parameters")
    old = {key: value for key, value in hf.items() if key != "rope_parameters"}
    full = rope.get("full_attention", rope)
    beside = ("rope_theta", "partial_rotary_factor")
    scaling = {key: value for key, value in full.items() if key not in beside}
    old |= {key: full[key] for key in beside if key in full}
    # What transformers writes, whose classes take their own factor where it is said in rope_parameters alone.
    hf |= {key: full[key] for key in ("partial_rotary_factor",) if key in full}
    old["rope_scaling"] = None if scaling["rope_type"] == "default" else scaling
    if family == "olmo3":
        old["rope_theta"] = 5e5  # which transformers 5 takes for layers with a window
    elif "sliding_attention" in rope:
        old["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
    return {"new": hf, "old": old}


def changed(start: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with a change; a value of `...` removes the key."""
    layers = range(start["num_hidden_layers"])
    kinds = {
        "alternating": [("sliding" if layer % 2 else "full") + "_attention" for layer in layers],
        **{kind: [f"{kind}_attention" for _ in layers] for kind in ("full", "sliding")},
    }
    hf = copy.deepcopy({**start, **change})
    if isinstance(hf.get("layer_types"), str):
        hf["layer_types"] = kinds[hf["layer_types"]]
    return {key: value for key, value in hf.items() if value is not ...}


def of_transformers(hf: Mapping[str, Any]) -> dict[str, Any] | None:
    """The whole configuration as transformers' class has it, and its models compute it; None where it refuses."""
    try:
        config = CONFIG_MAPPING[hf["model_type"]].from_dict(copy.deepcopy(dict(hf)))
        config.standardize_rope_params()  # as each of its rotary embeddings does
        return {**config.to_dict(), "architectures": hf["architectures"]}
    except Exception:
        return None


def computed(config: LlamaConfig) -> dict[str, Any]:
    """All that a configuration says of the model, in one spelling."""
    fields = {key: value for key, value in vars(config).items() if key not in OF_TRAINING}
    variant = dataclasses.asdict(fields.pop("variant"))
    for key in ("full_attention_every", "layer_types", "attention_scale"):
        variant.pop(key)
    experts = fields.pop("experts")
    own = {} if experts is None else dataclasses.asdict(experts)
    own.pop("load_balancing_coef", None)
    return {
        **fields, **variant, **own, "head_dim": config.head_size, "layer_types": config.layer_types,
        "scale": config.attention_scale or config.head_size**-0.5,
    }  # fmt: skip


def complaint(start: Mapping[str, Any], change: Mapping[str, Any]) -> str | None:
    """What is wrong with how a changed configuration is read; None if nothing is."""
    hf = changed(start, change)
    full = of_transformers(hf)
    try:
        ours = computed(config_from_hf(hf))
    except ConfigError as error:
        inner = [key for value in change.values() if isinstance(value, Mapping) for key in value]
        names = [*change, *inner, *(OUR_NAMES[key] for key in change if key in OUR_NAMES)]
        named = any(name in str(error) for name in names) and "cannot be read (" not in str(error)
        return None if named else f"is refused without the name of a key: {error}"
    if full is None:
        return None
    try:
        theirs = computed(config_from_hf(full))
    except ConfigError as error:
        return f"is read, and as transformers has it refused: {error}"
    different = {
        key: (ours.get(key), theirs.get(key)) for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key)
    }
    return f"has {different} (ours, theirs)" if different else None


def single_changes(start: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    yield {}
    for key in start:
        beside = key == "partial_rotary_factor" and "rope_parameters" in start  # see `as_published`
        if key not in ("architectures", "model_type") and not beside:
            yield {key: ...}
            yield {key: None}
    yield from ROTARY
    yield from OTHERS


def complaints(family: str, changes: Mapping[str, list[dict[str, Any]]]) -> list[str]:
    starts = as_published(family)
    return [
        f"{family}, {spelling} spelling, {change}: {wrong}"
        for spelling, own in changes.items()
        for change in own
        if (wrong := complaint(starts[spelling], change))
    ]


@pytest.mark.parametrize("family", ["llama3", "gemma3", "gpt_oss"])  # those of all are among the single changes below
def test_rotary_settings_are_those_of_transformers(family: str) -> None:
    assert complaints(family, {"new": ROTARY, "old": ROTARY}) == []


@pytest.mark.slow
@pytest.mark.parametrize("family", BY_CLASS)
def test_one_change_of_a_configuration_means_what_it_means_to_transformers(family: str) -> None:
    changes = {spelling: list(single_changes(start)) for spelling, start in as_published(family).items()}
    assert complaints(family, changes) == []


@pytest.mark.slow
@pytest.mark.parametrize("family", BY_CLASS)
def test_two_or_three_changes_of_a_configuration_mean_what_they_mean_to_transformers(family: str) -> None:
    chance = random.Random(f"changes of {family}")
    changes = {
        spelling: [
            {key: value for part in chance.sample(singles, chance.choice((2, 3))) for key, value in part.items()}
            for _ in range(500 if SECONDS else 20)
        ]
        for spelling, start in as_published(family).items()
        for singles in [list(single_changes(start))]
    }
    assert complaints(family, changes) == []
