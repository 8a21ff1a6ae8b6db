import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import draccus
import jax
import pytest
import transformers
import yaml

from lockstep.errors import ConfigError
from lockstep.models import (
    LlamaConfig,
    ModelConfig,
    Qwen2Config,
    RotaryConfig,
    Variant,
    config_from_hf,
    config_to_hf,
    find_preset,
    layer_kinds,
    load_config,
    skeleton,
)
from lockstep.models.families.gemma4 import Gemma4Config, NormedExperts, ProportionalRotary, WideHeads
from lockstep.models.families.ministral3 import Ministral3Config
from lockstep.models.families.mistral4 import Mistral4Config
from lockstep.models.families.registry import FAMILIES as REGISTERED

GOLDEN = Path(__file__).parents[3] / "golden"
SIZES: dict[str, Any] = {
    "max_seq_len": 128,
    "hidden_dim": 64,
    "intermediate_dim": 40,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
}
FAMILIES = {
    file.parent.name: load_config(str(file.parent))
    for file in sorted(GOLDEN.glob("*/config.json"))
    if file.parent.name not in ("gpt_oss", "reward_model")
}
"""What is read of each family, which test_families.py compares with transformers by its logits."""


YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
SEES: dict[str, Any] = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5"}
MIXTRAL: dict[str, Any] = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}


OF_LATER = {"num_nextn_predict_layers", "num_mtp_layers", "qk_head_dim"}
"""What only one of transformers 5.12 and 5.24 writes of deepseek_v2."""


def hf(family: str, **changes: Any) -> dict[str, Any]:
    return {**json.loads((GOLDEN / family / "config.json").read_text()), **changes}


def test_layers_without_experts_are_those_of_a_step_and_those_that_are_named() -> None:
    experts = FAMILIES["qwen3_moe_mixed"].experts
    assert experts is not None and experts.mlp_only_layers == (0, 2, 4, 6, 7)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_written_reads_back(family: str) -> None:
    config = FAMILIES[family]
    back = config_from_hf(json.loads(json.dumps(config_to_hf(config, 112))))
    assert type(back) is type(config)
    assert config_to_hf(back, 112) == config_to_hf(config, 112)


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_reads_what_is_written_as_its_own(family: str, tmp_path: Path) -> None:
    vocab_size = hf(family)["vocab_size"]
    (tmp_path / "config.json").write_text(json.dumps(config_to_hf(FAMILIES[family], vocab_size)))
    ours = transformers.AutoConfig.from_pretrained(tmp_path).to_dict()
    theirs = transformers.AutoConfig.from_pretrained(GOLDEN / family).to_dict()
    # Special tokens and dtype belong to the checkpoint, which save_hf writes; Qwen2 takes a head_dim but writes none.
    skip = {"_name_or_path", "dtype", "bos_token_id", "eos_token_id", "pad_token_id", "transformers_version"}
    skip |= {
        "qwen2": {"head_dim"},
        **dict.fromkeys(("exaone4", "granite", "mixtral", "olmo2", "olmoe", "smollm3"), {"head_dim"}),
        "olmo3": {"head_dim", "rope_parameters"},  # those of either kind of layer are of transformers 5.24
        "gemma2": {"use_bidirectional_attention"},  # null or false
        **dict.fromkeys(("gemma3", "cohere2"), {"sliding_window_pattern"}),  # of transformers 4
        # The same in rope_parameters, for transformers 4; and the length that only longrope has.
        "phi3": {"head_dim", "partial_rotary_factor", "original_max_position_embeddings", "attention_bias"},
        # The same as mlp_only_layers, and the name that transformers 4 has.
        "qwen3_moe_mixed": {"decoder_sparse_step", "mlp_only_layers", "num_experts"},
        "qwen2_moe": {"head_dim", "num_local_experts"},
        "glm4_moe": {"num_nextn_predict_layers"},  # none
        "glm4_moe_lite": {"num_nextn_predict_layers", "first_k_dense_replace"},  # the same as mlp_layer_types
        **dict.fromkeys(("ernie4_5", "seed_oss"), {"attention_dropout", "residual_dropout"}),  # none
        # The same as layer_types, in rope_parameters, and as num_experts.
        "qwen3_next": {"full_attention_interval", "partial_rotary_factor", "num_local_experts"},
        "qwen3_5": {"full_attention_interval", "partial_rotary_factor", "rope_parameters"},  # mrope_section: of images
        "qwen3_5_moe": {"full_attention_interval", "partial_rotary_factor"},
        # Defaults of transformers are written too; it has no use for the last.
        "deepseek_v2": {"rope_parameters", "rope_scaling", *OF_LATER},
        "deepseek_v2_lite": {"n_group", "topk_group", *OF_LATER},
        **dict.fromkeys(("arcee", "ministral3"), {"rope_parameters"}),
        # `truncate` is written too; it has no use for the others.
        "mistral4": {"rope_parameters", "pretraining_tp", "num_nextn_predict_layers"},
        "hunyuan_v1_dense": {"rope_parameters"},  # the same base without alpha
        "hunyuan_v1_moe": {"rope_parameters", "output_router_logits"},  # likewise, and of transformers 5.24
        # The heads layer by layer are of transformers 5.24; the other is of inputs of each layer.
        **dict.fromkeys(
            ("gemma4", "gemma4_moe"),
            {"per_layer_config", "global_head_dim", "num_global_key_value_heads", "vocab_size_per_layer_input"},
        ),
        "minimax_m2": {"partial_rotary_factor", "rotary_dim"},  # the same in rope_parameters
        **dict.fromkeys(("deepseek_v3", "deepseek_v3_lite"), {"rope_parameters", "pretraining_tp", "rope_scaling"}),
    }.get(family, set())
    assert {key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key)} <= skip


def seeing(family: str, **whole: Any) -> dict[str, Any]:
    """The ``config.json`` of a model with a vision tower whose language model is a family's."""
    text = hf(family)
    with_images = REGISTERED[text.pop("architectures")[0]].with_images
    assert with_images is not None
    return {"architectures": [with_images[0]], "model_type": with_images[1], "text_config": text, **whole}


@pytest.mark.parametrize("family", ["gemma3", "gemma4", "ministral3", "mistral", "mistral4", "qwen3_5", "qwen3_5_moe"])
def test_the_language_model_of_one_that_reads_images_is_read(family: str) -> None:
    whole = seeing(family)
    assert config_from_hf(whole) == config_from_hf({**whole, "model_type": None}) == FAMILIES[family]
    assert config_from_hf({**whole, "architectures": hf(family)["architectures"]}) == FAMILIES[family]
    del whole["text_config"]["tie_word_embeddings"]  # transformers ties by the one that is there
    assert config_from_hf({**whole, "tie_word_embeddings": True}).tie_word_embeddings
    whole["text_config"]["tie_word_embeddings"] = False  # as transformers 5 saves a Mistral with its vision tower
    assert config_from_hf({**whole, "tie_word_embeddings": True}).tie_word_embeddings
    with pytest.raises(ConfigError, match="architectures \\['Other'\\]"):
        config_from_hf({**whole, "architectures": ["Other"]})


def test_what_qwen_3_5_lacks_is_as_in_transformers() -> None:
    kept = {key: value for key, value in hf("qwen3_5_moe").items() if not key.startswith(("linear_", "layer", "head_"))}
    config = config_from_hf({**kept, "rope_parameters": None, "num_attention_heads": 4, "norm_topk_prob": False})
    theirs = transformers.AutoConfig.for_model("qwen3_5_moe_text")
    assert config.rope == RotaryConfig(partial_rotary_factor=theirs.rope_parameters["partial_rotary_factor"])
    linear = config.linear_attention
    assert linear is not None and config.head_dim == theirs.head_dim
    assert (linear.key_heads, linear.value_heads) == (theirs.linear_num_key_heads, theirs.linear_num_value_heads)
    assert config.layer_types == ("linear_attention",) * 3 + ("full_attention",)
    assert config.experts is not None and config.experts.norm_topk_prob  # transformers has no such key
    with pytest.raises(ConfigError, match=r"layer_types \['sliding_attention'\]; a layer of Qwen3-Next or Qwen3.5"):
        config_from_hf(hf("qwen3_5", layer_types=["sliding_attention"] * 4))


def test_old_and_new_spelling_of_the_rotary_settings_are_the_same() -> None:
    new = hf("llama3")
    old = dict(new)
    parameters = dict(old.pop("rope_parameters"))
    old["rope_theta"] = parameters.pop("rope_theta")
    parameters["type"] = parameters.pop("rope_type")
    old["rope_scaling"] = parameters
    assert config_from_hf(old) == config_from_hf(new) == FAMILIES["llama3"]
    assert config_from_hf({**old, "rope_scaling": None, "rope_theta": 5e5}).rope == RotaryConfig(theta=5e5)


def test_a_part_that_is_rotated_is_read_in_the_spelling_of_transformers_5() -> None:
    rope = {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.34}
    assert config_from_hf(hf("glm4_moe", rope_parameters=rope)).rope.partial_rotary_factor == 0.34


def test_linear_scaling_is_kept(tmp_path: Path) -> None:
    config = dataclasses.replace(FAMILIES["qwen3"], rope=RotaryConfig(theta=5e5, linear_factor=4.0))
    written = config_to_hf(config, 112)
    assert config_from_hf(written) == config
    (tmp_path / "config.json").write_text(json.dumps(written))
    parameters = transformers.AutoConfig.from_pretrained(tmp_path).rope_parameters
    assert (parameters["rope_type"], parameters["factor"], parameters["rope_theta"]) == ("linear", 4.0, 5e5)


def test_another_activation_is_kept() -> None:
    config = config_from_hf(hf("llama3", hidden_act="gelu_pytorch_tanh"))
    assert config.variant.activation == "gelu_tanh" and config_to_hf(config, 8)["hidden_act"] == "gelu_pytorch_tanh"


@pytest.mark.parametrize("names", [None, [], ["LlamaModel"]])
def test_a_model_type_alone_says_the_family_as_in_transformers(names: list[str] | None) -> None:
    assert config_from_hf(hf("llama3", architectures=names)) == FAMILIES["llama3"]


def test_the_first_llama_has_no_number_of_key_value_heads() -> None:
    assert config_from_hf(hf("llama3", num_key_value_heads=None)).num_kv_heads == 4


def test_windows_are_those_that_transformers_applies() -> None:
    config = config_from_hf(hf("mistral", sliding_window=64))
    assert config.variant.sliding_window == 64 and [kind.window for kind in layer_kinds(config)] == [64, 64]
    short = config_from_hf(hf("mistral", sliding_window=64), max_seq_len=64)
    assert short.variant.sliding_window == 64 and [kind.window for kind in layer_kinds(short)] == [None, None]
    assert config_from_hf({key: value for key, value in hf("mistral").items() if key != "sliding_window"}) == (
        config_from_hf(hf("mistral", sliding_window=4096))
    )
    qwen = hf("qwen2", sliding_window=64, layer_types=None)
    assert [kind.window for kind in layer_kinds(config_from_hf(qwen))] == [None, None]
    qwen["use_sliding_window"] = True
    assert [kind.window for kind in layer_kinds(config_from_hf({**qwen, "max_window_layers": 0}))] == [64, 64]
    assert [kind.window for kind in layer_kinds(config_from_hf({**qwen, "max_window_layers": 1}))] == [None, 64]
    assert [kind.window for kind in layer_kinds(config_from_hf({**qwen, "max_window_layers": 28}))] == [None, None]


@pytest.mark.parametrize("first", [0, 1])
def test_windows_are_written_as_transformers_reads_them(first: int, tmp_path: Path) -> None:
    types = [("full" if layer < first else "sliding") + "_attention" for layer in range(2)]
    qwen = hf("qwen3", sliding_window=64, use_sliding_window=True, layer_types=types)
    written = config_to_hf(config_from_hf(qwen), 112)
    assert config_from_hf(written) == config_from_hf(qwen)
    (tmp_path / "config.json").write_text(json.dumps(written))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    assert (theirs.layer_types, theirs.sliding_window) == (types, 64)
    mistral = config_to_hf(config_from_hf(hf("mistral", sliding_window=64)), 112)
    assert mistral["architectures"] == ["MistralForCausalLM"] and mistral["sliding_window"] == 64


def test_all_layers_of_qwen3_with_experts_slide_as_in_transformers() -> None:
    settings = {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 3}
    config = config_from_hf(hf("qwen3_moe_mixed", **settings))
    assert {kind.window for kind in layer_kinds(config)} == {16}
    written = config_to_hf(config, 112)
    assert config_from_hf(written) == config and not {"layer_types", "max_window_layers"} & written.keys()
    types = ("full_attention", *["sliding_attention"] * 7)
    mixed = dataclasses.replace(config, variant=dataclasses.replace(config.variant, layer_types=types))
    with pytest.raises(ConfigError, match="cannot be saved as a Hugging Face checkpoint"):
        config_to_hf(mixed, 112)


@pytest.mark.parametrize("family", sorted(REGISTERED.keys() - {"Olmo3ForCausalLM", "Gemma4ForCausalLM"}))
def test_a_base_that_is_left_out_is_that_of_transformers(family: str) -> None:
    model_type = REGISTERED[family].model_type
    theirs = getattr(type(transformers.AutoConfig.for_model(model_type)), "default_theta", 1e4)
    keys = {"rope_theta", "rope_parameters", "rope_local_base_freq"}
    written = config_to_hf(REGISTERED[family].config(), 112)
    config = config_from_hf({key: value for key, value in written.items() if key not in keys})
    assert config.rope.theta == (theirs["global"] if isinstance(theirs, dict) else theirs)


PUBLISHED = {
    "google/gemma-2-27b-it": {
        "architectures": ["Gemma2ForCausalLM"],
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "head_dim": 128,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 4608,
        "intermediate_size": 36864,
        "max_position_embeddings": 8192,
        "num_attention_heads": 32,
        "num_hidden_layers": 46,
        "num_key_value_heads": 16,
        "query_pre_attn_scalar": 144,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
    },
    "google/gemma-3-1b-it": {
        "architectures": ["Gemma3ForCausalLM"],
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "max_position_embeddings": 32768,
        "num_attention_heads": 4,
        "num_hidden_layers": 26,
        "num_key_value_heads": 1,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-6,
        "rope_local_base_freq": 10000,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
    },
    "CohereLabs/c4ai-command-r7b-12-2024": {
        "architectures": ["Cohere2ForCausalLM"],
        "attention_bias": False,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "layer_norm_eps": 1e-05,
        "logit_scale": 0.25,
        "max_position_embeddings": 132096,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rope_scaling": None,
        "rope_theta": 50000,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    },
    "zai-org/GLM-4.5-Air-Base": {
        "architectures": ["Glm4MoeForCausalLM"],
        "attention_bias": True,
        "first_k_dense_replace": 1,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 10944,
        "max_position_embeddings": 131072,
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 96,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 46,
        "num_key_value_heads": 8,
        "num_nextn_predict_layers": 1,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "routed_scaling_factor": 1.0,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "use_qk_norm": False,
    },
    "zai-org/GLM-4-9B-0414": {
        "architectures": ["Glm4ForCausalLM"],
        "attention_bias": True,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 13696,
        "max_position_embeddings": 32768,
        "num_attention_heads": 32,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    },
    "Qwen/Qwen3-Next-80B-A3B-Instruct": {
        "architectures": ["Qwen3NextForCausalLM"],
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "max_position_embeddings": 262144,
        "mlp_only_layers": [],
        "moe_intermediate_size": 512,
        "norm_topk_prob": True,
        "num_attention_heads": 16,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "num_hidden_layers": 48,
        "num_key_value_heads": 2,
        "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 10000000,
        "shared_expert_intermediate_size": 512,
        "tie_word_embeddings": False,
    },
    "google/gemma-3-4b-it": {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "eos_token_id": [1, 106],
        "image_token_index": 262144,
        "mm_tokens_per_image": 256,
        "model_type": "gemma3",
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "torch_dtype": "bfloat16",
        "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model", "num_hidden_layers": 27},
    },
    "Qwen/Qwen3.5-27B": {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "image_token_id": 248056,
        "model_type": "qwen3_5",
        "text_config": {
            "attention_bias": False,
            "attn_output_gate": True,
            "dtype": "bfloat16",
            "full_attention_interval": 4,
            "head_dim": 256,
            "hidden_act": "silu",
            "hidden_size": 5120,
            "intermediate_size": 17408,
            "layer_types": [*["linear_attention"] * 3, "full_attention"] * 16,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 48,
            "linear_value_head_dim": 128,
            "mamba_ssm_dtype": "float32",
            "max_position_embeddings": 262144,
            "model_type": "qwen3_5_text",
            "mtp_num_hidden_layers": 1,
            "num_attention_heads": 24,
            "num_hidden_layers": 64,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-06,
            "rope_parameters": {
                "mrope_interleaved": True,
                "mrope_section": [11, 11, 10],
                "partial_rotary_factor": 0.25,
                "rope_theta": 10000000,
                "rope_type": "default",
            },
            "vocab_size": 248320,
        },
        "tie_word_embeddings": False,
        "vision_config": {"depth": 27, "hidden_size": 1152, "model_type": "qwen3_5"},
    },
    "Qwen/Qwen3.5-35B-A3B": {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "text_config": {
            "head_dim": 256,
            "hidden_size": 2048,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_value_head_dim": 128,
            "max_position_embeddings": 262144,
            "model_type": "qwen3_5_moe_text",
            "moe_intermediate_size": 512,
            "num_attention_heads": 16,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 40,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-06,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25},
            "shared_expert_intermediate_size": 512,
            "tie_word_embeddings": False,
            "vocab_size": 248320,
        },
    },
    "deepseek-ai/DeepSeek-V3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "attention_bias": False,
        "first_k_dense_replace": 3,
        "hidden_act": "silu",
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "kv_lora_rank": 512,
        "max_position_embeddings": 163840,
        "moe_intermediate_size": 2048,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "tie_word_embeddings": False,
        "topk_group": 4,
        "v_head_dim": 128,
    },
    "microsoft/phi-4": {
        "architectures": ["Phi3ForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": 5120,
        "intermediate_size": 17920,
        "max_position_embeddings": 16384,
        "num_attention_heads": 40,
        "num_hidden_layers": 40,
        "num_key_value_heads": 10,
        "original_max_position_embeddings": 16384,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_theta": 250000,
        "sliding_window": None,
        "tie_word_embeddings": False,
    },
}
"""What ``config.json`` of published checkpoints says, as transformers 4 wrote it."""


@pytest.mark.parametrize(
    ("name", "billions"),
    [("c4ai-command-r7b-12-2024", 8.0), ("c4ai-command-a-03-2025", 111.1), ("GLM-4-9B-0414", 9.4), ("GLM-4.5", 352.8),
     ("GLM-4.5-Air", 106.9), ("Qwen3.5-27B", 26.9), ("Qwen3.5-35B-A3B", 34.66), ("Qwen3.5-397B-A17B", 396.3),
     ("Qwen3-Next-80B-A3B-Instruct", 79.7), ("DeepSeek-V3", 671.03), ("DeepSeek-V2", 235.74),
     ("DeepSeek-V2-Lite", 15.71), ("Ministral-3-3B-Instruct-2512", 3.43), ("Ministral-3-8B-Base-2512", 8.49),
     ("Ministral-3-14B-Instruct-2512", 13.51), ("OLMoE-1B-7B-0924-Instruct", 6.92), ("MiniMax-M2", 228.69),
     ("Mistral-Small-4-119B-2603", 118.97), ("gemma-4-31B-it", 30.7), ("gemma-4-26B-A4B-it", 25.2)],
)  # fmt: skip
def test_a_preset_has_the_parameters_of_its_checkpoint(name: str, billions: float) -> None:
    preset = find_preset(name)
    assert preset is not None
    leaves = jax.tree.leaves(skeleton(preset.vocab_size, preset.config))
    assert sum(math.prod(leaf.shape) for leaf in leaves) / 1e9 == pytest.approx(billions, abs=0.06)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_checkpoint_is_its_preset(name: str) -> None:
    preset = find_preset(name)
    assert preset is not None and config_from_hf(PUBLISHED[name]) == preset.config


def test_gemma_3_spelled_for_transformers_4_and_5_is_the_same() -> None:
    new, old = hf("gemma3"), hf("gemma3", layer_types=None, sliding_window_pattern=6)
    kinds = old.pop("rope_parameters")
    old["rope_theta"] = kinds["full_attention"].pop("rope_theta")
    old |= {"rope_scaling": kinds["full_attention"], "rope_local_base_freq": kinds["sliding_attention"]["rope_theta"]}
    assert config_from_hf(old) == config_from_hf(new)
    last = hf("gemma3", layer_types=["full_attention"] * 6 + ["sliding_attention"])
    assert config_from_hf(last).variant.full_attention_every is None
    assert config_from_hf(config_to_hf(config_from_hf(last), 118)) == config_from_hf(last)


def test_gemma_4_has_its_wide_heads_in_either_spelling() -> None:
    by_layer = hf("gemma4")
    heads = by_layer["per_layer_config"]
    assert heads["2"] == heads["4"] == {"head_dim": 14, "num_key_value_heads": 2}
    config = FAMILIES["gemma4"]
    assert isinstance(config, Gemma4Config) and config.wide == WideHeads(num_kv_heads=2, head_dim=14)
    written = config_to_hf(config, 118)
    assert "per_layer_config" not in written and config_from_hf(written) == config
    (short := {**written, "attention_k_eq_v": False}).pop("rope_parameters")
    projected = config_from_hf(short)
    assert isinstance(projected, Gemma4Config)  # the second number is of models without values of their own
    assert projected.wide == WideHeads(num_kv_heads=4, head_dim=14, keys_are_values=False)
    theirs = transformers.AutoConfig.for_model("gemma4_text").rope_parameters
    assert theirs == config_to_hf(projected, 118)["rope_parameters"]
    same = config_from_hf({**short, "global_head_dim": 10})
    assert isinstance(same, Gemma4Config) and same.wide is None and config_from_hf(config_to_hf(same, 118)) == same
    last = config_from_hf({**written, "layer_types": ["sliding_attention"] * 5})  # transformers changes the last
    assert last.layer_types == ("sliding_attention",) * 4 + ("full_attention",)
    assert config_from_hf({**written, "use_bidirectional_attention": "vision"}) == config  # of images alone
    for other in ({"2": heads["2"]}, {**heads, "4": {"head_dim": 18}}, {**heads, "4": {**heads["4"], "sinks": 1}}):
        with pytest.raises(ConfigError, match=r"computes one head_dim and one num_key_value_heads of all.*\[2, 4\]"):
            config_from_hf({**by_layer, "per_layer_config": other})


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"hidden_size_per_layer_input": 256}, "hidden_size_per_layer_input 256, which needs embeddings of each layer"),
        ({"num_kv_shared_layers": 20}, r"20, which needs layers that attend with the keys and values of others"),
        ({"rope_scaling": None}, "rope_scaling None .* some versions of transformers read them, and some do not"),
        ({"sliding_window": None}, "sliding_window: null; lockstep needs it"),
        ({"use_double_wide_mlp": True}, r"use_double_wide_mlp True, which needs MLPs of two widths"),
        ({"enable_moe_block": True}, "num_experts: null; lockstep needs it"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention 'all'; lockstep has causal attention"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn", "rope_theta": 1e6}}}, "computes 'default' and"),
    ],
)
def test_what_gemma_4_needs_beside_its_dense_model_is_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        config_from_hf({**config_to_hf(FAMILIES["gemma4"], 118), **changes})


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"numerics": "exact"}, "numerics is exact, and Gemma 4 has norms of values"),
        ({"num_layers": 8}, "some layers have sliding_attention, and the last one has full_attention"),
        ({"wide": WideHeads(num_kv_heads=3)}, "wide.num_kv_heads must divide num_heads"),
        ({"wide": WideHeads(head_dim=7)}, "wide.head_dim must be even"),
        ({"experts": NormedExperts(shared_intermediate_dim=64)}, "both are the width of the MLP beside experts"),
        (
            {"experts": NormedExperts(shared_intermediate_dim=11008, mlp_only_layers=(0,))},
            r"mlp_only_layers is \[0\]; all layers of Gemma 4 have experts",
        ),
    ],
)
def test_a_gemma_4_that_cannot_be_is_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        dataclasses.replace(Gemma4Config(), **changes)


def test_a_part_of_the_pairs_is_rotated_with_the_frequencies_of_whole_heads() -> None:
    with pytest.raises(ConfigError, match="rotated_part must be more than 0 and at most 1"):
        ProportionalRotary(rotated_part=0.0)
    whole = RotaryConfig(theta=100.0, linear_factor=2.0).frequencies(8)
    rope = ProportionalRotary(theta=100.0, linear_factor=2.0, rotated_part=0.5)
    assert rope.frequencies(8).tolist() == [*whole[:2].tolist(), 0.0, 0.0] and rope.rotated(8) == 8


def test_yarn_of_olmo_3_is_of_layers_with_full_attention() -> None:
    preset = find_preset("allenai/Olmo-3-7B-Instruct")
    assert preset is not None
    written = config_to_hf(preset.config, preset.vocab_size)
    assert written["rope_theta"] == 5e5 and "rope_parameters" not in written  # as in the published file
    assert config_from_hf(written) == preset.config
    sliding, full = preset.config.variant.sliding_rope, preset.config.rope
    assert [kind.rope for kind in layer_kinds(preset.config)] == [sliding, sliding, sliding, full] * 8
    assert full.score_factor == pytest.approx(1.2079441541679836**2)
    with pytest.raises(ConfigError, match=r"rope_theta 700000.0 and none in sliding_attention .* takes 500000, and 4"):
        config_from_hf({**written, "rope_theta": 7e5})
    with pytest.raises(ConfigError, match="rope_theta: null; lockstep needs it"):  # versions of transformers differ
        config_from_hf({key: value for key, value in written.items() if key != "rope_theta"})
    assert config_from_hf({**written, "rope_theta": 7e5, "layer_types": ["full_attention"] * 32}).rope.theta == 7e5
    with pytest.raises(ConfigError, match=r"rope_theta, rope_type in rope_parameters .* read there for olmo3"):
        config_from_hf({**written, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}})


@pytest.mark.parametrize("family", FAMILIES)
def test_a_configuration_in_a_training_checkpoint_reads_back(family: str) -> None:
    config = FAMILIES[family]
    assert draccus.decode(ModelConfig, json.loads(json.dumps(draccus.encode(config, ModelConfig)))) == config


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "olmo2", "olmo3", "phi3"])
def test_a_switch_in_yaml_leaves_the_others_as_the_family_has_them(family: str) -> None:
    text = f"{{type: {family}, num_layers: 7, num_heads: 64, variant: {{logit_soft_cap: 9.0}}}}"
    config = draccus.decode(ModelConfig, yaml.safe_load(text))
    cls = type(FAMILIES[family])
    assert config == cls(num_layers=7, num_heads=64, variant=dataclasses.replace(cls().variant, logit_soft_cap=9.0))


def test_a_model_is_stored_as_the_first_family_that_loses_nothing() -> None:
    gemma = FAMILIES["gemma2"]
    fields = {field.name: getattr(gemma, field.name) for field in dataclasses.fields(gemma)}
    plain = LlamaConfig(**{**fields, "variant": Variant(**vars(gemma.variant))})
    assert config_to_hf(plain, 118) == config_to_hf(gemma, 118)
    window = LlamaConfig(**SIZES, variant=Variant(sliding_window=5))
    assert config_to_hf(window, 118)["architectures"] == ["MistralForCausalLM"]
    part = LlamaConfig(**SIZES, rope=RotaryConfig(partial_rotary_factor=0.5))
    assert config_to_hf(part, 118)["architectures"] == ["Phi3ForCausalLM"]
    text = r"as Gemma2ForCausalLM, variant\.embed_scale 3\.0 would be 6\.48.*none of .*Gemma2ForCausalLM, "
    with pytest.raises(ConfigError, match=text):
        config_to_hf(dataclasses.replace(gemma, variant=dataclasses.replace(gemma.variant, embed_scale=3.0)), 118)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}, r"\['GPT2LMHeadModel'\] .*LlamaForCausalLM"),
        ({"architectures": None, "model_type": None}, r"architectures \[\]"),
        ({"architectures": ["LlamaForSequenceClassification"]}, r"\['LlamaForSequenceClassification'\]"),
        ({"architectures": ["MistralForCausalLM"]}, r"\['MistralForCausalLM'\] and model_type 'llama', .*contradict"),
        ({"transformers_weights": "other.safetensors"}, r"transformers_weights 'other\.safetensors', the file"),
        ({"architectures": ["DeepseekV32ForCausalLM"]}, r"DeepseekV32.*needs attention to positions that an indexer"),
        ({**SEES, "model_type": "llama"}, r"\['Qwen3_5ForConditionalGeneration'\] \(model_type 'llama'\)"),
        (SEES, r"has no text_config; lockstep needs it"),
        (
            {**SEES, "text_config": {"model_type": "qwen3_5_moe_text"}},
            r"\['Qwen3_5ForCausalLM'\] and model_type 'qwen3_5_moe_text', which contradict",
        ),
        (
            {**SEES, "tie_word_embeddings": False, "text_config": {"tie_word_embeddings": True}},
            r"has tie_word_embeddings False, and True in text_config, which contradict",
        ),
        (
            {**SEES, "quantization_config": {"quant_method": "awq"}, "text_config": {}},
            r"quantization_config \(quant_method 'awq'\)",
        ),
        ({"hidden_act": "relu2"}, r"hidden_act 'relu2'; lockstep computes 'silu', 'gelu', .* only"),
        ({"hidden_act": "quick_gelu"}, r"hidden_act 'quick_gelu'; lockstep computes 'silu', 'gelu', .* only"),
        ({"attention_bias": True}, r"attention_bias: true"),
        ({"mlp_bias": True}, r"mlp_bias: true"),
        ({"is_causal": False}, r"is_causal False, so that each token sees those after it"),
        ({"is_causal": None}, r"is_causal None"),  # as transformers reads it
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}},
            r"rope type 'dynamic'; .*'default', 'linear', 'llama3' and 'yarn'",
        ),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, r"has no factor; .*Found keys: rope_theta"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor 0\.5"),
        *(
            ({"quantization_config": {"quant_method": method}}, rf"quantization_config \(quant_method '{method}'\)")
            for method in ("fp8", "compressed-tensors", "gptq", "awq", "bitsandbytes", "quanto", "torchao", "mxfp4")
        ),
        ({"quantization_config": {"load_in_4bit": True}}, r"quantization_config \(quant_method None\): .*quantised"),
        ({"compression_config": {"quant_method": "sparseml"}}, r"compression_config \(quant_method 'sparseml'\)"),
        ({"num_experts": 4, "num_local_experts": 2, **MIXTRAL}, r"num_experts 4 and num_local_experts 2, .*two names"),
        ({"hidden_size": None}, r"has hidden_size: null; .*Found keys: .*intermediate_size"),
        ({"rms_norm_eps": None}, r"has rms_norm_eps: null; lockstep needs it"),
        ({"num_attention_heads": 3}, r"num_heads is 3 and num_kv_heads is 2"),
    ],
)
def test_what_lockstep_does_not_compute_is_refused_by_name(change: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        config_from_hf(hf("llama3", **change))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"topk_method": "noaux_tc"}, r"topk_method 'noaux_tc' and scoring_func 'softmax'; .*'group_limited_greedy'"),
        ({"scoring_func": "sigmoid"}, r"topk_method 'group_limited_greedy' and scoring_func 'sigmoid'"),
        ({"norm_topk_prob": True}, r"norm_topk_prob: true; transformers' deepseek_v2 does not divide"),
        ({"n_group": None}, r"has n_group: null; lockstep needs it"),
        ({"n_shared_experts": None}, r"has n_shared_experts: null; lockstep needs it"),
        ({"num_key_value_heads": 2}, r"num_key_value_heads 2 and num_attention_heads 6; a latent makes a key"),
        ({"rope_parameters": YARN}, r"mscale None and mscale_all_dim None; .*where the two are equal and not 0"),
        ({"attention_bias": True}, r"attention_bias: true"),
    ],
)
def test_what_is_not_deepseek_v2_is_refused_by_name(change: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        config_from_hf(hf("deepseek_v2", **change))
    kept = hf("deepseek_v2_lite", num_key_value_heads=None, n_group=None, topk_group=None)
    assert config_from_hf(kept) == FAMILIES["deepseek_v2_lite"]  # a greedy choice has no groups


@pytest.mark.parametrize(
    ("family", "change", "text"),
    [
        ("ernie4_5", {"use_bias": True}, r"use_bias: true; lockstep computes ERNIE 4\.5 without biases"),
        (
            "exaone4",
            {"layer_types": None, "sliding_window_pattern": "LLLG"},
            r"sliding_window 5, sliding_window_pattern 'LLLG' and no layer_types, with which transformers fails",
        ),
        ("glm4_moe_lite", {"head_dim": 8}, r"head_dim 8 and qk_rope_head_dim 6, which are two names of one number"),
        ("gemma", {"hidden_act": "gelu"}, r"hidden_act 'gelu' and hidden_activation None; Gemma was trained with gelu"),
        (
            "smollm3",
            {"use_sliding_window": True},
            r"use_sliding_window: true; lockstep computes SmolLM3 without windows",
        ),
        (
            "ministral3",
            {"rope_parameters": YARN},
            r"settings .*'yarn', .* YaRN and llama_4_scaling_beta",
        ),
        ("mistral4", {"n_group": 5, "topk_group": 2}, r"5 groups of experts, of which a token has 2; .* in one group"),
        (
            "mistral4",
            {"rope_parameters": {**YARN, "partial_rotary_factor": 0.5}},
            r"partial_rotary_factor 0\.5, .* 0\.375 of each head rotated, qk_rope_head_dim / \(qk_nope",
        ),
        (
            "mistral4",
            {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
            r"settings .*'yarn', .* Mistral 4 with YaRN and llama_4_scaling_beta",
        ),
        ("hunyuan_v1_moe", {"moe_topk": [3, 2, 3]}, r"'moe_topk': \[3, 2, 3\].*; lockstep computes the same number of"),
        ("olmoe", {"clip_qkv": 8.0}, r"clip_qkv 8\.0; lockstep computes OLMoE without a limit"),
        ("smollm3", {"no_rope_layers": [1, 0, 0, 1, 1]}, r"no_rope_layers \[1, 0, 0, 1, 1\]; .* every n-th layer"),
    ],
)
def test_what_was_never_published_of_a_family_is_refused_by_name(
    family: str, change: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        config_from_hf(hf(family, **change))


def test_a_family_is_read_with_the_defaults_of_transformers() -> None:
    both = hf("gemma", hidden_act="gelu", hidden_activation="gelu_pytorch_tanh")  # as it was published
    assert config_from_hf(both) == FAMILIES["gemma"]
    plain = config_from_hf(hf("smollm3", no_rope_layers=None, no_rope_layer_interval=3))
    assert [kind.rope.linear_factor for kind in layer_kinds(plain)] == [1.0, 1.0, math.inf, 1.0, 1.0]
    everywhere = config_from_hf(hf("smollm3", no_rope_layers=[1] * 5))
    assert everywhere.variant.no_rope_every is None
    assert config_from_hf(config_to_hf(everywhere, 118)) == everywhere
    assert config_from_hf(hf("ministral3", rope_parameters=None)).rope == Ministral3Config().rope
    assert config_from_hf(hf("mistral4", rope_parameters=None)).rope == Mistral4Config().rope
    for_layers = hf("hunyuan_v1_moe", moe_topk=[3] * 3, num_experts=[5] * 3)  # as in A13B
    assert config_from_hf(for_layers) == FAMILIES["hunyuan_v1_moe"]
    published = hf("minimax_m2", rope_theta=300.0, rotary_dim=6)
    assert config_from_hf({**published, "rope_parameters": None}) == FAMILIES["minimax_m2"]
    constant = config_from_hf(hf("ministral3", rope_parameters={**YARN, "llama_4_scaling_beta": 0.0}))
    assert config_from_hf(config_to_hf(constant, 118)) == constant
    whole = config_from_hf(hf("exaone4", sliding_window=None, layer_types=["full_attention"] * 5))  # as in 1.2B
    assert whole.variant.full_rope and [kind.window for kind in layer_kinds(whole)] == [None] * 5
    assert config_from_hf(hf("exaone4", layer_types=None)) == FAMILIES["exaone4"]
    letters = config_from_hf(hf("exaone4", sliding_window_pattern="LLG"))  # as in 32B
    assert layer_kinds(letters) == layer_kinds(FAMILIES["exaone4"])
    dense = config_from_hf(hf("glm4_moe_lite", mlp_layer_types=None))
    assert dense.experts is not None and dense.experts.mlp_only_layers == (0,)


@pytest.mark.parametrize("kind", ["longrope", "su"])
def test_longrope_is_refused_by_name(kind: str) -> None:
    longrope = {"type": kind, "short_factor": [1.0], "long_factor": [2.0]}
    with pytest.raises(ConfigError, match=rf"rope type '{kind}'; .*'yarn'\. Choose another checkpoint\.$"):
        config_from_hf(hf("phi3", rope_parameters=None, rope_scaling=longrope))


def test_the_architecture_follows_from_what_the_model_computes() -> None:
    assert config_to_hf(LlamaConfig(**SIZES, qkv_bias=True), 112)["architectures"] == ["Qwen2ForCausalLM"]
    assert config_to_hf(LlamaConfig(**SIZES, qk_norm=True), 112)["architectures"] == ["Qwen3ForCausalLM"]
    assert config_to_hf(Qwen2Config(**SIZES, qkv_bias=False), 112)["architectures"] == ["LlamaForCausalLM"]
