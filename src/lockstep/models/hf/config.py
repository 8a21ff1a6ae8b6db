"""Model configurations from and to the ``config.json`` of Hugging Face, by a table of model families."""

import dataclasses
from collections.abc import Callable, Mapping
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
from lockstep.models.hf.names import LLAMA_TENSORS, HFTensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture:
    """What is particular to a model family in transformers' checkpoints.

    Args:
        name: The entry of ``architectures`` in ``config.json``.
        config: The configuration class.
        is_family_of: Whether a configuration computes what this family computes.
        variant: The variant that the family has.
        head_dim: The ``head_dim`` that transformers' class of the family takes where ``config.json`` has none; None for
            ``hidden_size // num_attention_heads``.
        always_windowed: Whether ``sliding_window`` applies without ``use_sliding_window``.
        fields: The fields of ``config.json`` that transformers reads for this family besides the common ones.
        tensors: The tensors of a checkpoint by the path of the parameter in `LlamaLMHeadModel`.
    """

    name: str
    config: type[LlamaConfig]
    is_family_of: Callable[[LlamaConfig], bool]
    variant: Variant = Variant()
    head_dim: int | None = None
    always_windowed: bool = False
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tensors: Mapping[str, HFTensor] = dataclasses.field(default_factory=lambda: LLAMA_TENSORS)


ARCHITECTURES = {
    each.name: each
    for each in (
        Architecture(
            name="LlamaForCausalLM",
            config=LlamaConfig,
            is_family_of=lambda config: True,
            fields={"attention_bias": False},
        ),
        Architecture(
            name="MistralForCausalLM",
            config=MistralConfig,
            is_family_of=lambda config: isinstance(config, MistralConfig),
            always_windowed=True,
            fields={"sliding_window": None},
        ),
        Architecture(
            name="Qwen2ForCausalLM",
            config=Qwen2Config,
            is_family_of=lambda config: config.qkv_bias,
            fields={"use_sliding_window": False},
        ),
        Architecture(
            name="Qwen3ForCausalLM",
            config=Qwen3Config,
            is_family_of=lambda config: config.qk_norm,
            head_dim=128,
            fields={"attention_bias": False, "use_sliding_window": False},
        ),
    )
}
"""The model families by name; a configuration belongs to the last that it fits (`architecture_of`)."""


def architecture_of(config: LlamaConfig) -> Architecture:
    """Returns the family whose computation a configuration describes, except for ``config.variant``."""
    return [each for each in ARCHITECTURES.values() if each.is_family_of(config)][-1]


def config_from_hf(hf: Mapping[str, Any], *, max_seq_len: int | None = None) -> LlamaConfig:
    """Returns the configuration that a Hugging Face ``config.json`` describes.

    It reads both spellings of the rotary settings: ``rope_theta`` and ``rope_scaling``, and ``rope_parameters`` of
    transformers 5.

    Args:
        hf: The parsed file.
        max_seq_len: The longest sequence in tokens, in place of ``max_position_embeddings``; a model with a sliding
            window needs it. None for the file's own.

    Returns:
        The configuration, of the class of the architecture.

    Raises:
        ConfigError: The architecture, or one of its settings, is not one that lockstep computes; or a key is missing.
    """
    architecture = _architecture(hf)
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
    _check_window(hf, architecture, max_seq_len)
    num_heads = _required(hf, "num_attention_heads")
    # As in transformers: the first Llama has no num_key_value_heads.
    num_kv_heads = hf.get("num_key_value_heads") or num_heads
    head_dim = hf.get("head_dim") or architecture.head_dim
    if head_dim and head_dim * num_heads == _required(hf, "hidden_size"):
        head_dim = None  # one spelling, so that equal models have equal configurations
    return architecture.config(
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
    """Returns the content of a ``config.json`` with which transformers (4 or 5) computes the same model.

    The architecture follows from what the model computes: with ``qkv_bias`` it is Qwen2, with ``qk_norm`` Qwen3,
    otherwise Llama (Mistral for a `MistralConfig`).

    Args:
        config: The configuration of the model.
        vocab_size: The number of rows of the embedding.

    Returns:
        A mapping that JSON can represent.

    Raises:
        ConfigError: No architecture that lockstep writes computes ``config.variant``.
    """
    architecture = architecture_of(config)
    if config.variant != architecture.variant:
        raise ConfigError(
            f"a model with {config.variant} cannot be saved as a Hugging Face checkpoint: lockstep writes "
            f"{', '.join(ARCHITECTURES)} only. Leave model.variant at its defaults, or do not save."
        )
    return {
        "architectures": [architecture.name],
        "model_type": architecture.name.removesuffix("ForCausalLM").lower(),
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
        "rope_scaling": _rope_to_hf(config.rope),
        "attention_dropout": 0.0,
        "use_cache": True,
        **architecture.fields,
    }


def _architecture(hf: Mapping[str, Any]) -> Architecture:
    names = hf.get("architectures") or []
    if len(names) != 1 or names[0] not in ARCHITECTURES:
        raise ConfigError(
            f"the checkpoint has architectures {names} (model_type {hf.get('model_type')!r}); lockstep computes "
            f"{', '.join(ARCHITECTURES)}. Choose a checkpoint of one of these."
        )
    return ARCHITECTURES[names[0]]


def _check_window(hf: Mapping[str, Any], architecture: Architecture, max_seq_len: int) -> None:
    windowed = architecture.always_windowed or hf.get("use_sliding_window")
    window = hf.get("sliding_window", 4096) if windowed else None  # the default of transformers' classes
    if window is not None and window < max_seq_len:
        raise ConfigError(
            f"the checkpoint has sliding_window {window}, and max_seq_len is {max_seq_len}; lockstep attends to all "
            "earlier tokens, which is the same model only up to the window. Set max_seq_len to "
            f"{window} or less."
        )


def _rope_to_hf(rope: RotaryConfig) -> dict[str, Any] | None:
    if rope.linear_factor != 1:
        return {"rope_type": "linear", "factor": rope.linear_factor}
    if rope.scaling is None:
        return None
    return {
        "rope_type": "llama3",
        "factor": rope.scaling.factor,
        "low_freq_factor": rope.scaling.low_freq_factor,
        "high_freq_factor": rope.scaling.high_freq_factor,
        "original_max_position_embeddings": rope.scaling.original_max_position_embeddings,
    }


def _rope_from_hf(hf: Mapping[str, Any]) -> RotaryConfig:
    parameters: Mapping[str, Any] = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    theta = parameters.get("rope_theta", hf.get("rope_theta", 10000.0))
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    partial = parameters.get("partial_rotary_factor", hf.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise ConfigError(
            f"the checkpoint has partial_rotary_factor {partial}; lockstep rotates whole heads (1.0) only. Choose "
            "another checkpoint."
        )
    if kind == "default":
        return RotaryConfig(theta=theta)
    if kind == "linear":
        return RotaryConfig(theta=theta, linear_factor=_required(parameters, "factor"))
    if kind != "llama3":
        raise ConfigError(
            f"the checkpoint has rope type {kind!r}; lockstep computes 'default', 'linear' and 'llama3'. Choose "
            "another checkpoint, or remove rope_scaling from its config.json where the model is used only up to its "
            "original context length."
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
