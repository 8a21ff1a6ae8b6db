"""Makes the random Hugging Face checkpoints in this directory and their logits, with transformers and torch.

Needs a Python of its own, because the tests run without torch. Made with Python 3.11.2, torch 2.13.0, transformers
5.23.0, safetensors 0.8.0::

    python3.11 -m venv /tmp/goldens && /tmp/goldens/bin/pip install torch==2.13.0 transformers safetensors
    /tmp/goldens/bin/python tests/golden/make_goldens.py

The families from gemma2 on are of transformers 5.24.0, those with experts up to deepseek_v3_lite of torch 2.14.1 and
transformers 5.12.1 (whose deepseek_v2 leaves out the factor of scores of YaRN);
families named after the command are made alone; ``variants`` makes ``variants.npz``, the logits of `variants.py` (torch
2.13.0, transformers 5.12.1, ml_dtypes 0.5; ``yarn_in_layers_with_a_window`` of 5.24.0). From gemma2 on their
``golden.npz`` also has ``generated`` int32 [2, 20], the tokens of greedy decoding with transformers' cache.

Each family gets ``<family>/config.json``, bfloat16 weights (one file; mistral: several files with an index) and
``golden.npz``: ``input_ids`` int32 [2, 24] and ``logits`` float32 [2, 24, vocab], computed in float32 from the weights
as stored. Norms and biases are random too: at their usual ones and zeros a forgotten one would not show.
"""

import json
import pathlib
import shutil
import sys
import tempfile

import numpy as np
import torch
import transformers
from transformers import (
    Cohere2Config,
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4Config,
    Glm4MoeConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)
from variants import POSITIONS, VARIANTS

SIZES = {
    "vocab_size": 112,
    "hidden_size": 64,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
LLAMA3_ROPE = {
    # An original context of 64 puts the 8 waves of a 16-wide head into all three bands: kept, blended, slowed.
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
ODD = {
    # Twice a prime in the vocabulary and the MLP, three query heads to each of two K/V heads, an odd number of layers.
    "vocab_size": 118,
    "hidden_size": 42,
    "intermediate_size": 46,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 3.0, "rope_theta": 5000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
DEEPSEEK = {
    **{**ODD, "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 6},
    "kv_lora_rank": 14,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 9,
    "moe_intermediate_size": 22,
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "n_group": 3,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "num_mtp_layers": 0,
}
DELTA = {
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "linear_conv_kernel_dim": 3,
    "rms_norm_eps": 1e-3,  # what a query reads of a memory that has little for it is not blown up with its rounding
    "eos_token_id": 0,
}
MROPE = {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.5}
FAMILIES: dict[str, PreTrainedConfig] = {
    "llama3": LlamaConfig(**SIZES, rms_norm_eps=1e-5, rope_parameters=LLAMA3_ROPE),
    "llama_tied": LlamaConfig(**{**SIZES, "num_hidden_layers": 3}, tie_word_embeddings=True),
    "mistral": MistralConfig(**SIZES, sliding_window=None, head_dim=8),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=24),
    # Windows are shorter than the text.
    "gemma2": Gemma2Config(
        **ODD,
        head_dim=10,
        query_pre_attn_scalar=7,
        sliding_window=5,
        attn_logit_softcapping=3.0,
        final_logit_softcapping=4.0,
    ),
    "gemma3": Gemma3TextConfig(
        **{**ODD, "num_hidden_layers": 7},
        head_dim=10,
        query_pre_attn_scalar=13,
        sliding_window=5,
        rope_parameters=GEMMA3_ROPE,
    ),
    "olmo2": Olmo2Config(**{**ODD, "hidden_size": 60}),
    "phi3": Phi3Config(
        **{**ODD, "hidden_size": 48},
        sliding_window=7,
        rope_parameters={"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.75},
        pad_token_id=0,
        eos_token_id=0,
        bos_token_id=0,
    ),
    "mixtral": MixtralConfig(
        **{**ODD, "hidden_size": 48, "intermediate_size": 26},
        num_local_experts=3,
        num_experts_per_tok=2,
        sliding_window=7,
        rope_parameters={"rope_type": "default", "rope_theta": 300.0},
    ),
    "qwen3_moe": Qwen3MoeConfig(
        **ODD,
        head_dim=10,
        moe_intermediate_size=22,
        num_experts=5,
        num_experts_per_tok=3,
        norm_topk_prob=True,
        rope_parameters={"rope_type": "default", "rope_theta": 200.0},
    ),
    # Layers 1, 3 and 5 have experts; twice a prime in the width.
    "qwen3_moe_mixed": Qwen3MoeConfig(
        **{**ODD, "num_hidden_layers": 8, "hidden_size": 38},
        head_dim=6,
        moe_intermediate_size=14,
        num_experts=2,
        num_experts_per_tok=1,
        decoder_sparse_step=2,
        mlp_only_layers=[7],
        norm_topk_prob=False,
        rope_parameters={"rope_type": "default", "rope_theta": 200.0},
    ),
    "qwen2_moe": Qwen2MoeConfig(
        **{**ODD, "hidden_size": 48},
        moe_intermediate_size=22,
        shared_expert_intermediate_size=34,
        num_experts=5,
        num_experts_per_tok=3,
        mlp_only_layers=[0],
        rope_parameters={"rope_type": "default", "rope_theta": 200.0},
    ),
    "gpt_oss": GptOssConfig(
        **ODD,
        head_dim=10,
        num_local_experts=5,
        num_experts_per_tok=3,
        sliding_window=7,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 200.0,
            "factor": 4.0,
            "beta_fast": 2.0,
            "truncate": False,
            "original_max_position_embeddings": 16,
        },
    ),
    "glm4": Glm4Config(
        **{**ODD, "hidden_size": 48},
        head_dim=12,
        attention_bias=True,
        rope_parameters={"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.5},
        pad_token_id=0,
        eos_token_id=0,
    ),
    "glm4_moe": Glm4MoeConfig(
        **{**ODD, "hidden_size": 48},
        head_dim=12,
        attention_bias=True,
        use_qk_norm=True,
        moe_intermediate_size=22,
        n_routed_experts=5,
        n_shared_experts=2,
        num_experts_per_tok=3,
        routed_scaling_factor=1.5,
        rope_parameters={"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.5},
    ),
    "cohere2": Cohere2Config(
        **{**ODD, "hidden_size": 48, "num_hidden_layers": 5},
        attention_bias=True,
        logit_scale=0.7,
        sliding_window=5,
        rope_parameters={"rope_type": "default", "rope_theta": 300.0},
        eos_token_id=0,
        bos_token_id=0,
    ),
    # Layer 1 has attention, the others a state; two value heads to each of two key heads; layer 2 has no experts.
    "qwen3_next": Qwen3NextConfig(
        **{**ODD, "hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 6},
        head_dim=12,
        layer_types=["linear_attention", "full_attention", "linear_attention", "linear_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=6,
        linear_value_head_dim=10,
        linear_conv_kernel_dim=3,
        moe_intermediate_size=22,
        shared_expert_intermediate_size=34,
        num_experts=5,
        num_experts_per_tok=3,
        mlp_only_layers=[2],
        rms_norm_eps=1e-3,  # what a query reads of a memory that has little for it is not blown up with its rounding
        rope_parameters={"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.5},
        eos_token_id=0,
    ),
    # Every size of a latent is another; a layer without experts, one of three groups without those of a token.
    "deepseek_v3": DeepseekV3Config(
        **DEEPSEEK,
        q_lora_rank=22,
        rope_interleave=True,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 200.0,
            "factor": 4.0,
            "beta_fast": 2.0,
            "original_max_position_embeddings": 16,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    ),
    # Queries of the residual stream, as V2-Lite and Kimi-VL have them; another factor of scores, an epsilon that the
    # norms of latents do not have.
    "deepseek_v3_lite": DeepseekV3Config(
        **DEEPSEEK,
        q_lora_rank=None,
        rms_norm_eps=1e-2,
        rope_interleave=False,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 200.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
        },
    ),
    # Three value heads to each of two key heads, each part of a projection a tensor of its own.
    "qwen3_5": Qwen3_5TextConfig(
        **{**ODD, **DELTA, "linear_num_value_heads": 6},
        layer_types=["linear_attention", "full_attention", "linear_attention", "linear_attention"],
        rope_parameters={**MROPE, "mrope_section": [1, 1, 1], "mrope_interleaved": True},
    ),
    "qwen3_5_moe": Qwen3_5MoeTextConfig(
        **{**ODD, **DELTA},
        moe_intermediate_size=22,
        shared_expert_intermediate_size=34,
        num_experts=5,
        num_experts_per_tok=3,
        rope_parameters=MROPE,
    ),
    "deepseek_v2": DeepseekV2Config(
        **DEEPSEEK,
        q_lora_rank=22,
        topk_method="group_limited_greedy",
        routed_scaling_factor=1.7,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 200.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
        },
    ),
    "deepseek_v2_lite": DeepseekV2Config(
        **{**DEEPSEEK, "n_group": 1, "topk_group": 1},
        q_lora_rank=None,
        rms_norm_eps=1e-2,
        rope_parameters={"rope_type": "default", "rope_theta": 200.0},
    ),
    # Layers with a window turn at another speed, and their scores have no factor of YaRN.
    "olmo3": Olmo3Config(
        **{**ODD, "hidden_size": 60, "num_hidden_layers": 5},
        sliding_window=5,
        rope_parameters={
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 200.0,
                "factor": 4.0,
                "beta_fast": 2.0,
                "original_max_position_embeddings": 16,
                "attention_factor": 1.3,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        },
        eos_token_id=0,
    ),
}


def randomise(model: torch.nn.Module, generator: torch.Generator) -> None:
    """Weights large enough that attention and MLP matter, norms around 1, biases around 0."""
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        with torch.no_grad():
            gemma = "Gemma" in type(model).__name__
            delta = type(model).__name__.startswith(("Qwen3Next", "Qwen3_5"))
            centred = gemma or (delta and not name.endswith("linear_attn.norm.weight"))
            tied = gemma or "Cohere" in type(model).__name__
            if name == "model.norm.weight" and tied:
                parameter.copy_(8 + 3 * noise)
            elif name == "model.embed_tokens.weight" and tied:
                # Small, for it is the output layer too: each token would otherwise be followed by itself.
                parameter.copy_(noise * 0.2 / parameter.shape[-1] ** 0.5)
            elif "norm" in name:
                parameter.copy_((0 if centred else 1) + 0.3 * noise)
            elif name.endswith("A_log"):
                parameter.copy_(noise - 1)  # memories of a few positions and of many
            elif name.endswith("conv1d.weight"):
                parameter.copy_(noise)
            elif name.endswith("gate_up_proj") and "GptOss" in type(model).__name__:
                parameter.copy_(noise * 6 / parameter.shape[-1] ** 0.5)  # beyond the clamps
            elif name.endswith("bias"):
                parameter.copy_(0.5 * noise)
            else:
                parameter.copy_(noise * 1.5 / parameter.shape[-1] ** 0.5)


def write_variants(here: pathlib.Path) -> None:
    """Writes the logits of each variant at some positions of its family's text, bit for bit what loading it gives."""
    logits = {}
    for name, variant in VARIANTS.items():
        with tempfile.TemporaryDirectory() as directory:
            variant.write(target := pathlib.Path(directory) / "checkpoint")
            model = transformers.AutoModelForCausalLM.from_pretrained(
                target, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
            ).eval()
        input_ids = torch.from_numpy(np.load(here / variant.family / "golden.npz")["input_ids"]).long()
        with torch.no_grad():
            logits[name] = model(input_ids).logits[:, POSITIONS].numpy()
        usual = np.load(here / variant.family / "golden.npz")["logits"][:, POSITIONS]
        print(f"{name}: {np.abs(logits[name] - usual).max():.4f} from {variant.family}")
    np.savez_compressed(here / "variants.npz", **logits)


def main() -> None:
    """Writes every family, or those named; replaces what is there."""
    here = pathlib.Path(__file__).parent
    if sys.argv[1:] == ["variants"]:
        return write_variants(here)
    wanted = sys.argv[1:] or list(FAMILIES)
    for seed, (family, config) in enumerate(FAMILIES.items()):
        if family not in wanted:
            continue
        target = here / family
        shutil.rmtree(target, ignore_errors=True)
        generator = torch.Generator().manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        randomise(model, generator)
        model.to(torch.bfloat16).save_pretrained(target, max_shard_size="40KB" if family == "mistral" else "1GB")
        (target / "generation_config.json").unlink(missing_ok=True)

        stored = transformers.AutoModelForCausalLM.from_pretrained(
            target, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
        ).eval()
        input_ids = torch.randint(0, config.vocab_size, (2, 24), generator=generator)
        with torch.no_grad():
            logits = stored(input_ids).logits
        assert logits.dtype == torch.float32
        arrays = {"input_ids": input_ids.numpy().astype(np.int32), "logits": logits.numpy()}
        if config.vocab_size == ODD["vocab_size"]:
            stored.generation_config.eos_token_id = None
            mask = torch.ones_like(input_ids)
            rest = stored.generate(input_ids, attention_mask=mask, max_new_tokens=20, do_sample=False)[:, 24:]
            arrays["generated"] = rest.numpy().astype(np.int32)
        np.savez(target / "golden.npz", **arrays)
        files = json.dumps({f.name: f.stat().st_size for f in sorted(target.iterdir())})
        print(f"{family}: logits std {logits.std():.3f}, {files}")
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")


if __name__ == "__main__":
    main()
