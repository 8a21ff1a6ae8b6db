"""Qwen3 with experts (https://arxiv.org/abs/2505.09388): a Qwen3 whose layers have experts in place of an MLP."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from lockstep.errors import ConfigError
from lockstep.models.config import LlamaConfig, ModelConfig
from lockstep.models.experts import Experts
from lockstep.models.families import llama, qwen3
from lockstep.models.families.family import Family, ModelPreset
from lockstep.models.families.qwen2 import WINDOW_DEFAULTS, read_windows, write_windows
from lockstep.models.rope import RotaryConfig, required


@ModelConfig.register_subclass("qwen3_moe")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3MoeConfig(qwen3.Qwen3Config):
    """Qwen3 with experts (https://arxiv.org/abs/2505.09388), such as Qwen3-30B-A3B.

    Example:
        >>> lockstep.models.Qwen3MoeConfig().experts.num_experts
        128
    """

    experts: Experts | None = dataclasses.field(
        default_factory=lambda: Experts(num_experts=128, num_experts_per_tok=8, intermediate_dim=768)
    )


MLP: Final = llama.LAYER + "mlp."


def _read(hf: Mapping[str, Any]) -> dict[str, Any]:
    for key, only in (("decoder_sparse_step", 1), ("mlp_only_layers", [])):
        if hf[key] != only:
            raise ConfigError(
                f"the checkpoint has {key} {hf[key]}, so that some of its layers have experts and some have an MLP; "
                f"lockstep computes {key} {only} only. Choose a checkpoint with experts in every layer."
            )
    # transformers 5 calls it as Mixtral does.
    number = "num_experts" if "num_experts" in hf else "num_local_experts"
    experts = Experts(
        num_experts=required(hf, number),
        num_experts_per_tok=required(hf, "num_experts_per_tok"),
        intermediate_dim=required(hf, "moe_intermediate_size"),
        norm_topk_prob=hf["norm_topk_prob"],
        load_balancing_coef=hf["router_aux_loss_coef"],
    )
    return {"qk_norm": True, "experts": experts, **read_windows(hf)}


def _write(config: LlamaConfig) -> dict[str, Any]:
    experts = config.experts or Experts()
    return {
        "num_experts": experts.num_experts,
        "num_local_experts": experts.num_experts,
        "num_experts_per_tok": experts.num_experts_per_tok,
        "moe_intermediate_size": config.expert_dim,
        "norm_topk_prob": experts.norm_topk_prob,
        "router_aux_loss_coef": experts.load_balancing_coef,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "attention_bias": False,
        **write_windows(config),
    }


def _preset(hidden: int, layers: int, heads: int, mlp: int, width: int) -> ModelPreset:
    config = Qwen3MoeConfig(
        max_seq_len=40960, hidden_dim=hidden, intermediate_dim=mlp, num_layers=layers, num_heads=heads,
        num_kv_heads=4, head_dim=128, rope=RotaryConfig(theta=1e6),
        experts=Experts(num_experts=128, num_experts_per_tok=8, intermediate_dim=width),
    )  # fmt: skip
    return ModelPreset(config=config, vocab_size=151936)


FAMILY: Final = Family(
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    config=Qwen3MoeConfig,
    tensors={name: tensor for name, tensor in qwen3.FAMILY.tensors.items() if name not in ("gate", "up", "down")}
    | {"router": MLP + "gate.weight"}
    | {f"expert_{name}": MLP + f"experts.{{expert}}.{name}_proj.weight" for name in ("gate", "up", "down")},
    defaults={
        "head_dim": None,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": False,
        "router_aux_loss_coef": 0.001,
        **WINDOW_DEFAULTS,
    },
    read=_read,
    write=_write,
    # Table 2 of the paper; the rest is in each checkpoint's config.json.
    presets={
        "qwen3-30b-a3b": _preset(2048, 48, 32, 6144, 768),
        "qwen3-235b-a22b": _preset(4096, 94, 64, 12288, 1536),
    },
)
