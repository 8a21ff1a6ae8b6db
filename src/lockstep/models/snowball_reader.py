"""Reads Levanter's Snowball models: a table of their parameters, and the settings that Levanter pins."""

import dataclasses
import math
from typing import Any

from levanter.models import snowball

from lockstep.models.config import LlamaConfig
from lockstep.models.experts import Experts
from lockstep.models.from_names import Entry, from_names
from lockstep.models.registry import register_reader
from lockstep.models.rope import RotaryConfig
from lockstep.models.variant import Variant
from lockstep.models.weights import DecoderWeights

_GATES = {"embed": "embed_gated_norm", "final": "final_gated_norm"}
_LAYER = {
    "attn_norm": "rms_attn.weight",
    "attn_norm_down": "attn_gated_norm.w_down",
    "attn_norm_up": "attn_gated_norm.w_up",
    **{name: f"attn.w_{name}" for name in "qkvo"},
    "head_gate": "attn.attn_gate",
    "mlp_norm": "rms_mlp.weight",
    "mlp_norm_down": "mlp_gated_norm.w_down",
    "mlp_norm_up": "mlp_gated_norm.w_up",
    "router": "mlp.router",
    "router_bias": "mlp.router_bias",
    **{f"expert_{name}": f"mlp.expert_mlp.w_{name}" for name in ("gate", "up", "down")},
    **{f"shared_{name}": f"shared.w_{name}" for name in ("gate", "up", "down")},
}
_TABLE: dict[str, Entry] = {
    "embed": "transformer.token_embed",
    "embed_norm": "transformer.embed_norm.weight",
    "final_norm": "transformer.final_norm.weight",
    "lm_head": "transformer.output_proj",
    **{f"{at}_norm_{side}": f"transformer.{name}.w_{side}" for at, name in _GATES.items() for side in ("down", "up")},
    **{name: f"transformer.blocks.{{}}.{path}" for name, path in _LAYER.items()},
}
_read_weights = from_names(_TABLE)


@register_reader(snowball.SnowballLMHeadModel)
def _read_snowball(model: Any) -> tuple[LlamaConfig, DecoderWeights]:
    config, count = model.config, len(model.transformer.blocks)
    every, last = snowball._LONG_ATTENTION_INTERVAL, count - 1
    long = [layer % every == every - 1 or layer == last for layer in range(count)]
    slides = not all(long)
    rope = RotaryConfig(theta=float(config.rope.theta), partial_rotary_factor=0.5)
    variant = Variant(
        embed_norm=True,
        gated_norm_rank=model.transformer.embed_gated_norm.w_down.shape[1],
        unit_qk_norm=snowball._QK_RMS_NORM_EPS,
        exclusive_attention=True,
        head_gates=True,
        attention_scale=config.qk_mult * config.inferred_head_dim**-0.5,
        sliding_window=config.sliding_window if slides else None,
        layer_types=tuple("full_attention" if is_long else "sliding_attention" for is_long in long),
        sliding_rope=rope if slides else None,
    )
    experts = Experts(
        num_experts=config.num_experts,
        num_experts_per_tok=config.num_experts_per_token,
        shared_intermediate_dim=config.shared_expert_intermediate_dim,
        scoring="sigmoid",
        routed_scaling_factor=snowball._ROUTING_RENORM_SUM,
    )
    return LlamaConfig(
        max_seq_len=config.max_seq_len,
        hidden_dim=config.hidden_dim,
        intermediate_dim=config.intermediate_dim,
        num_layers=count,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.inferred_head_dim,
        layer_norm_epsilon=config.layer_norm_eps,
        rope=dataclasses.replace(rope, linear_factor=math.inf),  # long layers have no positions
        experts=experts,
        variant=variant,
    ), _read_weights(model)
