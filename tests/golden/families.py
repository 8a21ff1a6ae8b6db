"""The configurations of the random checkpoints in this directory, in transformers' words, for `make_goldens.py`."""

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
YARN = {"rope_type": "yarn", "rope_theta": 200.0, "factor": 4.0, "original_max_position_embeddings": 16}
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
        rope_parameters={**YARN, "beta_fast": 2.0, "truncate": False},
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
        rope_parameters={**YARN, "beta_fast": 2.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    # Queries of the residual stream, as V2-Lite and Kimi-VL have them; another factor of scores, an epsilon that the
    # norms of latents do not have.
    "deepseek_v3_lite": DeepseekV3Config(
        **DEEPSEEK,
        q_lora_rank=None,
        rms_norm_eps=1e-2,
        rope_interleave=False,
        rope_parameters={**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
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
        rope_parameters={**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
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
            "full_attention": {**YARN, "beta_fast": 2.0, "attention_factor": 1.3},
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        },
        eos_token_id=0,
    ),
}
