"""Model configurations from and to the ``config.json`` of Hugging Face."""

from collections.abc import Mapping
from typing import Any

from lockstep.errors import ConfigError
from lockstep.models.config import (
    Llama3Scaling,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    RotaryConfig,
    Variant,
)

ARCHITECTURES: dict[str, type[LlamaConfig]] = {
    "LlamaForCausalLM": LlamaConfig,
    "MistralForCausalLM": MistralConfig,
    "Qwen2ForCausalLM": Qwen2Config,
    "Qwen3ForCausalLM": Qwen3Config,
}


def config_from_hf(hf: Mapping[str, Any], *, max_seq_len: int | None = None) -> LlamaConfig:
    """The configuration that a Hugging Face ``config.json`` describes.

    Reads both spellings of the rotary settings: ``rope_theta`` + ``rope_scaling``, and ``rope_parameters`` of
    transformers 5.

    Args:
        hf: the parsed file.
        max_seq_len: tokens; replaces ``max_position_embeddings``. Needed for models with a sliding window.

    Returns:
        The configuration, of the class of the architecture.

    Raises:
        ConfigError: the architecture, or one of its settings, is not one that lockstep computes; or a key is missing.
    """
    cls = _architecture(hf)
    max_seq_len = _required(hf, "max_position_embeddings") if max_seq_len is None else max_seq_len
    for switch in ("attention_bias", "mlp_bias"):
        if hf.get(switch):
            raise ConfigError(
                f"the checkpoint has {switch}: true; lockstep has biases on query, key and value of qwen2 only. Choose "
                f"a checkpoint without {switch}."
            )
    activation = hf.get("hidden_act", "silu")
    if activation != "silu":
        raise ConfigError(
            f"the checkpoint has hidden_act {activation!r}; lockstep computes 'silu' only. Choose another checkpoint."
        )
    _check_window(hf, cls, max_seq_len)
    num_heads = _required(hf, "num_attention_heads")
    # The first Llama has no num_key_value_heads; Qwen3's class has a head_dim of its own. Both as in transformers.
    num_kv_heads = hf.get("num_key_value_heads") or num_heads
    head_dim = hf.get("head_dim") or (128 if cls is Qwen3Config else None)
    if head_dim and head_dim * num_heads == _required(hf, "hidden_size"):
        head_dim = None  # one spelling, so that equal models have equal configurations
    return cls(
        max_seq_len=max_seq_len,
        hidden_dim=_required(hf, "hidden_size"),
        intermediate_dim=_required(hf, "intermediate_size"),
        num_layers=_required(hf, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        layer_norm_epsilon=hf.get("rms_norm_eps", 1e-6),
        tie_word_embeddings=hf.get("tie_word_embeddings", False),
        initializer_range=hf.get("initializer_range", 0.02),
        rope=_rope_from_hf(hf),
    )


def config_to_hf(config: LlamaConfig, vocab_size: int) -> dict[str, Any]:
    """What goes into ``config.json`` so that transformers (4 or 5) computes the same model.

    The architecture follows from what the model computes: with ``qkv_bias`` it is Qwen2, with ``qk_norm`` Qwen3,
    otherwise Llama (Mistral for a `MistralConfig`).

    Args:
        config: of the model.
        vocab_size: number of tokens.

    Returns:
        A mapping that JSON can hold.
    """
    if config.variant != Variant():
        raise ConfigError(
            f"a model with {config.variant} cannot be saved as a Hugging Face checkpoint: lockstep writes "
            f"{', '.join(ARCHITECTURES)} only. Leave model.variant at its defaults, or do not save."
        )
    if config.qkv_bias:
        architecture = "Qwen2ForCausalLM"
    elif config.qk_norm:
        architecture = "Qwen3ForCausalLM"
    else:
        architecture = "MistralForCausalLM" if isinstance(config, MistralConfig) else "LlamaForCausalLM"
    rope = config.rope.scaling and {
        "rope_type": "llama3",
        "factor": config.rope.scaling.factor,
        "low_freq_factor": config.rope.scaling.low_freq_factor,
        "high_freq_factor": config.rope.scaling.high_freq_factor,
        "original_max_position_embeddings": config.rope.scaling.original_max_position_embeddings,
    }
    hf: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": architecture.removesuffix("ForCausalLM").lower(),
        "vocab_size": vocab_size,
        "hidden_size": config.hidden_dim,
        "intermediate_size": config.intermediate_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_size,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_seq_len,
        "initializer_range": config.initializer_range,
        "rms_norm_eps": config.layer_norm_epsilon,
        "tie_word_embeddings": config.tie_word_embeddings,
        # transformers 5 reads these two as well as its own rope_parameters; 4 and other programs read only these.
        "rope_theta": config.rope.theta,
        "rope_scaling": rope,
        "attention_dropout": 0.0,
        "use_cache": True,
    }
    if architecture == "MistralForCausalLM":
        hf["sliding_window"] = None
    if architecture.startswith("Qwen"):
        hf["use_sliding_window"] = False
    if architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM"):
        hf["attention_bias"] = False
    return hf


def _architecture(hf: Mapping[str, Any]) -> type[LlamaConfig]:
    names = hf.get("architectures") or []
    if len(names) != 1 or names[0] not in ARCHITECTURES:
        raise ConfigError(
            f"the checkpoint has architectures {names} (model_type {hf.get('model_type')!r}); lockstep computes "
            f"{', '.join(ARCHITECTURES)}. Choose a checkpoint of one of these."
        )
    return ARCHITECTURES[names[0]]


def _check_window(hf: Mapping[str, Any], cls: type[LlamaConfig], max_seq_len: int) -> None:
    if cls is MistralConfig:
        window = hf.get("sliding_window", 4096)  # the default of transformers' MistralConfig
    else:
        window = hf.get("sliding_window", 4096) if hf.get("use_sliding_window") else None
    if window is not None and window < max_seq_len:
        raise ConfigError(
            f"the checkpoint has sliding_window {window}, and max_seq_len is {max_seq_len}; lockstep attends to all "
            "earlier tokens, which is the same model only up to the window. Set max_seq_len to "
            f"{window} or less."
        )


def _rope_from_hf(hf: Mapping[str, Any]) -> RotaryConfig:
    parameters: Mapping[str, Any] = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    theta = parameters.get("rope_theta", hf.get("rope_theta", 10000.0))
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    partial = parameters.get("partial_rotary_factor", hf.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise ConfigError(
            f"the checkpoint has partial_rotary_factor {partial}; lockstep turns whole heads (1.0) only. Choose "
            "another checkpoint."
        )
    if kind == "default":
        return RotaryConfig(theta=theta)
    if kind != "llama3":
        raise ConfigError(
            f"the checkpoint has rope type {kind!r}; lockstep computes 'default' and 'llama3'. Choose another "
            "checkpoint, or remove rope_scaling from its config.json where the model is used only up to its original "
            "context length."
        )
    keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    return RotaryConfig(theta=theta, scaling=Llama3Scaling(**{key: _required(parameters, key) for key in keys}))


def _required(hf: Mapping[str, Any], key: str) -> Any:
    if hf.get(key) is None:
        raise ConfigError(
            f"the checkpoint's config.json has no {key}; lockstep needs it. Found keys: {', '.join(sorted(hf))}. Save "
            "the checkpoint again with a recent version of transformers, or add the key."
        )
    return hf[key]
