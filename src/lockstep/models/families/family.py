"""A model family: its configuration, and how Hugging Face stores it in ``config.json`` and in tensors."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from lockstep.errors import ConfigError
from lockstep.models.config import LlamaConfig
from lockstep.models.experts import Experts
from lockstep.models.layer_kinds import every_nth_full
from lockstep.models.rope import required, rope_from_hf, rope_to_hf

ACTIVATIONS: Final = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}
"""Activations of a gated MLP: Hugging Face's name and ours."""

_DEFAULTS: Final = {"tie_word_embeddings": False, "initializer_range": 0.02}
"""The values of keys that a ``config.json`` lacks, in all families that do not say otherwise."""
_NULLABLE: Final = frozenset(
    "head_dim num_key_value_heads sliding_window attn_logit_softcapping final_logit_softcapping mlp_only_layers".split()
    + ["rope_theta", "rope_local_base_freq", "partial_rotary_factor"]  # rope_parameters may have them
    + ["q_lora_rank", "sliding_window_pattern", "num_global_key_value_heads", "use_bidirectional_attention"]
)
"""The keys with a default whose null transformers reads."""
_TRAINING: Final = ("gradient_checkpointing", "attn_backend", "numerics")
"""Fields of a configuration that are of training, not of the model."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelPreset:
    """The configuration that the ``config.json`` of a checkpoint has."""

    config: LlamaConfig
    vocab_size: int  # number of rows of its embedding


def preset(
    kind: type[LlamaConfig], sizes: tuple[int, int, int, int, int], *, context: int, vocab: int, **fields: Any
) -> ModelPreset:
    """Return the preset of a checkpoint.

    Args:
        sizes: The widths of residual stream and MLP, and the numbers of layers, query heads and key/value heads.
        context: The longest sequence in tokens.
        vocab: The number of rows of the embedding.
        fields: Other fields of the configuration.
    """
    names = ("hidden_dim", "intermediate_dim", "num_layers", "num_heads", "num_kv_heads")
    config = kind(max_seq_len=context, **fields, **dict[str, Any](zip(names, sizes, strict=True)))
    return ModelPreset(config=config, vocab_size=vocab)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """The particulars of a model family in transformers' checkpoints.

    Args:
        tensors: The name of the tensor of each weight, with ``{layer}`` for the number of the layer. Weights of one
            name are rows of one tensor, in the order of this table.
        packed_experts: Whether a layer's experts are saved in ``gate_up_proj`` and ``down_proj``, as all are read.
        presets: The configurations of well-known checkpoints, by the last part of their path.
    """

    architecture: str
    model_type: str
    config: type[LlamaConfig]  # the defaults of its variant are the family's
    tensors: Mapping[str, str]
    packed_experts: bool = False
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # for keys that `config.json` lacks
    read: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda hf: {}  # fields from a `config.json`
    write: Callable[[LlamaConfig], Mapping[str, Any]] = lambda config: {}  # keys of `config.json` from them
    with_images: tuple[str, str] | None = None  # architecture and `model_type` of models that see, with this one inside
    unwritten: frozenset[str] = frozenset()  # keys of other families that its `config.json` does not have
    activation_key: str = "hidden_act"
    activations: Mapping[str, str] = dataclasses.field(default_factory=lambda: ACTIVATIONS)  # names there and here
    epsilon_key: str = "rms_norm_eps"
    presets: Mapping[str, ModelPreset] = dataclasses.field(default_factory=dict)

    def config_from_hf(self, hf: Mapping[str, Any], max_seq_len: int | None = None) -> LlamaConfig:
        """The configuration of a ``config.json``.

        Args:
            max_seq_len: The longest sequence in tokens; None for ``max_position_embeddings``.

        Raises:
            ConfigError: A setting is not one that lockstep computes, or a key is missing.
        """
        defaults = {self.epsilon_key: 1e-6, **_DEFAULTS, **self.defaults}
        if (hf.get("rope_parameters") or {}).get("partial_rotary_factor") is not None:
            defaults.pop("partial_rotary_factor", None)  # said there, in transformers 5
        hf = {**defaults, **hf}
        for key in defaults.keys() - _NULLABLE:
            required(hf, key)
        variant = self.config().variant
        for switch in ("attention_bias", "mlp_bias", "use_bidirectional_attention"):
            if hf.get(switch) and switch not in self.defaults and not (switch == "attention_bias" and variant.o_bias):
                raise ConfigError(
                    f"the checkpoint has {switch}: true; lockstep has biases of attention in qwen2, glm4, gpt_oss and "
                    f"cohere2 only, and causal attention. Choose a checkpoint without {switch}."
                )
        if not hf.get("is_causal", True):  # null too, in transformers/masking_utils.py, create_causal_mask
            raise ConfigError(
                f"the checkpoint's config.json has is_causal {hf['is_causal']!r}, so that each token sees those after "
                "it; lockstep has causal attention only. Choose another checkpoint, or remove the key if it is wrong."
            )
        activation = hf.get(self.activation_key)
        if activation is not None and activation not in self.activations:
            raise ConfigError(
                f"the checkpoint has {self.activation_key} {activation!r}; lockstep computes "
                f"{', '.join(map(repr, self.activations))} only. Choose another checkpoint."
            )
        hidden_dim, num_heads = required(hf, "hidden_size"), required(hf, "num_attention_heads")
        head_dim = hf.get("head_dim")
        if head_dim and head_dim * num_heads == hidden_dim:
            head_dim = None  # one spelling, so that equal models have equal configurations
        fields: dict[str, Any] = {
            "max_seq_len": required(hf, "max_position_embeddings") if max_seq_len is None else max_seq_len,
            "hidden_dim": hidden_dim,
            "intermediate_dim": required(hf, "intermediate_size"),
            "num_layers": required(hf, "num_hidden_layers"),
            "num_heads": num_heads,
            # As in transformers: the first Llama has no num_key_value_heads.
            "num_kv_heads": hf.get("num_key_value_heads") or num_heads,
            "head_dim": head_dim,
            "layer_norm_epsilon": hf[self.epsilon_key],
            "tie_word_embeddings": hf["tie_word_embeddings"],
            "initializer_range": hf["initializer_range"],
            "activation": variant.activation if activation is None else self.activations[activation],
            **self.read(hf),
        }
        if "rope" not in fields:
            fields["rope"] = rope_from_hf(hf)
        switches = {field.name for field in dataclasses.fields(variant)} & fields.keys()
        variant = dataclasses.replace(variant, **{name: fields.pop(name) for name in switches})
        config = self.config(**fields, variant=variant)
        if config.rope.partial_rotary_factor != 1 and "partial_rotary_factor" not in self.defaults:
            raise ConfigError(
                f"the checkpoint has partial_rotary_factor {config.rope.partial_rotary_factor}; {self.architecture} "
                "rotates whole heads (1.0). Choose another checkpoint."
            )
        return config

    def config_to_hf(self, config: LlamaConfig, vocab_size: int) -> dict[str, Any]:
        """The content of ``config.json`` for a configuration, which `config_from_hf` may read as another.

        Args:
            vocab_size: The number of rows of the embedding.
        """
        names = {own_name: hf_name for hf_name, own_name in self.activations.items()}
        partial = config.rope.partial_rotary_factor
        written = {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "vocab_size": vocab_size,
            "hidden_size": config.hidden_dim,
            "intermediate_size": config.intermediate_dim,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_heads,
            "num_key_value_heads": config.num_kv_heads,
            "head_dim": config.head_size,
            self.activation_key: names.get(config.variant.activation, config.variant.activation),
            "max_position_embeddings": config.max_seq_len,
            "initializer_range": config.initializer_range,
            self.epsilon_key: config.layer_norm_epsilon,
            "tie_word_embeddings": config.tie_word_embeddings,
            # transformers 5 reads these as well as its own rope_parameters; 4 and other programs read only these.
            "rope_theta": config.rope.theta,
            "rope_scaling": rope_to_hf(config.rope),
            **({} if partial == 1 else {"partial_rotary_factor": partial}),
            "attention_dropout": 0.0,
            "use_cache": True,
            **self.write(config),
        }
        return {key: value for key, value in written.items() if key not in self.unwritten}

    def changes(self, config: LlamaConfig) -> dict[str, tuple[Any, Any]]:
        """The fields that a ``config.json`` of the family loses: by name the value, and the one that is read back.

        Raises:
            ConfigError: What is written cannot be read back.
        """
        want, have = _computed(config), _computed(self.config_from_hf(self.config_to_hf(config, 1)))
        return {name: (want[name], have[name]) for name in want if want[name] != have[name]}


def _computed(config: LlamaConfig) -> dict[str, Any]:
    """All that a configuration says of the model, in one spelling."""
    switches = {name: getattr(config, name) for name in ("norms_values", "layer_scalars")}  # of a class
    fields = {**vars(config), **switches, "head_dim": config.head_size}
    variant = {
        **vars(fields.pop("variant")),
        "embed_scale": config.embed_scale,
        "layer_types": config.layer_types,
        "attention_scale": config.variant.attention_scale or config.head_size**-0.5,
    }
    variant.pop("full_attention_every")
    if config.experts is not None:  # their losses are of training too
        fields["experts"] = dataclasses.replace(
            config.experts, intermediate_dim=config.expert_dim, load_balancing_coef=0.0, router_z_coef=0.0
        )
    for name in _TRAINING:
        fields.pop(name)
    return fields | {f"variant.{name}": value for name, value in variant.items()}


def _count_experts(hf: Mapping[str, Any], names: Sequence[str], default: int | None) -> int:
    counts = {key: hf[key] for key in names if key in hf}
    if len(set(counts.values())) > 1:
        raise ConfigError(
            f"the checkpoint's config.json has {' and '.join(f'{key} {count}' for key, count in counts.items())}, "
            "which are two names of one number. Keep the one that its tensors have."
        )
    number = next(iter(counts.values()), default)
    if number is None:
        raise ConfigError(
            f"the checkpoint's config.json has no number for {' or '.join(names)}; lockstep needs it. Add the number "
            "of experts that its tensors have."
        )
    return int(number)


ROUTED: Final = {"num_experts_per_tok": "num_experts_per_tok", "load_balancing_coef": "router_aux_loss_coef"}
"""Keys of ``config.json`` that most families with experts have, by the field of `Experts`."""


def expert_fields(
    hf: Mapping[str, Any],
    keys: Mapping[str, str],
    *,
    names: Sequence[str] = ("num_experts", "num_local_experts"),
    default: int | None = None,
) -> dict[str, Any]:
    """The fields of `Experts` by the keys of a ``config.json`` that have them.

    Args:
        names: The names of the key of their number.
        default: The number where the file has none.

    Raises:
        ConfigError: Two names have two numbers, or a number is missing.
    """
    return {"num_experts": _count_experts(hf, names, default)} | {
        field: required(hf, key) for field, key in keys.items()
    }


def expert_keys(config: LlamaConfig, keys: Mapping[str, str]) -> dict[str, Any]:
    """The keys of a ``config.json`` that `expert_fields` reads."""
    experts = dataclasses.replace(config.experts or Experts(), intermediate_dim=config.expert_dim)
    return {key: getattr(experts, field) for field, key in keys.items()}


def windows(
    window: int | None, types: Sequence[str] | None, *, every: int | None = None, layers: int = 0
) -> dict[str, Any]:
    """The fields of a variant for windows of layers, in one spelling.

    Args:
        window: The window of the layers that slide; None for none.
        types: The attention of each layer, in Hugging Face's words; None: all slide, or as ``every`` says.
        every: The ``full_attention_every`` of the family; None where it has none.
        layers: The number of layers, for ``every``.
    """
    fields: dict[str, Any] = {"sliding_window": None, "layer_types": None, "full_attention_every": None}
    types = every_nth_full(layers, every) if types is None and every is not None else types
    if window is None or (types is not None and "sliding_attention" not in types):
        return fields
    fields["sliding_window"] = window
    if every is not None and tuple(types or ()) == every_nth_full(layers, every):
        fields["full_attention_every"] = every
    elif types is not None and (every is not None or "full_attention" in types):
        fields["layer_types"] = tuple(types)
    return fields


def layer_types_to_hf(config: LlamaConfig) -> list[str]:
    """The ``layer_types`` of a ``config.json``."""
    same = "full_attention" if config.variant.sliding_window is None else "sliding_attention"
    return list(config.layer_types or (same,) * config.num_layers)
