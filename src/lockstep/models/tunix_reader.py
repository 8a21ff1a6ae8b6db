"""Reads Tunix's language models (Flax NNX): by reference, each weight by its name."""

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

from flax import nnx
from tunix.generate.mappings import BackendMappingMixin
from tunix.models.gemma import model as gemma
from tunix.models.llama3 import model as llama3
from tunix.models.qwen2 import model as qwen2
from tunix.models.qwen3 import model as qwen3

from lockstep.models.config import LlamaConfig, RotaryConfig, Variant
from lockstep.models.registry import UnreadableModelError, register_reader, registered_classes
from lockstep.models.weights import DecoderWeights, LayerWeights
from lockstep.placement import view

PAGE = "docs/tunix.md"
MAX_SEQ_LEN = 2**20
"""Tunix's models have no longest sequence: rotary embeddings go on, and nothing else depends on the position."""

type Table = Mapping[str, tuple[str, str]]
"""The decoder's name of each weight, the path of the parameter in a layer, and the axes that it has there."""

DENSE: Table = {
    "attn_norm": ("input_layernorm.w", "embed"),
    "mlp_norm": ("post_attention_layernorm.w", "embed"),
    "q": ("attn.q_proj.w", "embed heads head"),
    "k": ("attn.k_proj.w", "embed heads head"),
    "v": ("attn.v_proj.w", "embed heads head"),
    "o": ("attn.o_proj.w", "heads head embed"),
    "gate": ("mlp.gate_proj.kernel", "embed mlp"),
    "up": ("mlp.up_proj.kernel", "embed mlp"),
    "down": ("mlp.down_proj.kernel", "mlp embed"),
}
BIASES: Table = {f"{name}_bias": (f"attn.{name}_bias", "heads") for name in "qkv"}
QK_NORMS: Table = {f"{name}_norm": (f"attn.{name}_norm.w", "head") for name in "qk"}
GEMMA: Table = {
    **{name: DENSE[name] for name in ("gate", "up", "down")},
    "attn_norm": ("pre_attention_norm.scale", "embed"),
    "mlp_norm": ("pre_ffw_norm.scale", "embed"),
    "o": ("attn.attn_vec_einsum.w", "heads head embed"),
}
GEMMA_KV: Table = {
    "q": ("attn.q_einsum.w", "heads embed head"),
    "k": ("attn.kv_einsum.w", "k heads embed head"),
    "v": ("attn.kv_einsum.w", "v heads embed head"),
}
GEMMA_QKV: Table = {name: ("attn.qkv_einsum.w", f"{name} heads embed head") for name in "qkv"}
GEMMA_POST_NORMS: Table = {
    "attn_post_norm": ("post_attn_norm.scale", "embed"),
    "mlp_post_norm": ("post_ffw_norm.scale", "embed"),
}

PICKS = {"attn.kv_einsum.w": "kv", "attn.qkv_einsum.w": "qkv"}
"""Parameters that hold several weights, and which, in their order along the first axis."""


@register_reader(BackendMappingMixin)
def _refuse(model: Any) -> tuple[LlamaConfig, DecoderWeights]:
    readable = {cls.__name__ for cls in registered_classes() if cls.__module__.startswith("tunix.models.")}
    raise UnreadableModelError(
        f"Tunix's {type(model).__name__} cannot be read: the decoder does not compute it. Supported are "
        f"{', '.join(sorted(readable))} and their subclasses. Train one of these, or register a reader for the class "
        f"with lockstep.models.register_reader ({PAGE})."
    )


@register_reader(llama3.Llama3)
def _read_llama(model: Any) -> tuple[LlamaConfig, DecoderWeights]:
    return _read(model, DENSE, tied=model.config.weight_tying, theta=_theta(model, llama3))


@register_reader(qwen2.Qwen2)
def _read_qwen2(model: Any) -> tuple[LlamaConfig, DecoderWeights]:
    config = model.config
    theta = float(config.rope_theta)
    return _read(model, {**DENSE, **BIASES}, tied=config.use_tied_embedding, theta=theta, qkv_bias=True)


@register_reader(qwen3.Qwen3)
def _read_qwen3(model: Any) -> tuple[LlamaConfig, DecoderWeights]:
    config = model.config
    if config.num_experts is not None:
        raise _unreadable(model, f"it has {config.num_experts} experts in each layer", "models without experts")
    return _read(model, {**DENSE, **QK_NORMS}, tied=config.use_tied_embedding, theta=_theta(model, qwen3), qk_norm=True)


@register_reader(gemma.Gemma)
def _read_gemma(model: Any) -> tuple[LlamaConfig, DecoderWeights]:
    config = model.config
    post = config.use_post_attn_norm
    if post != config.use_post_ffw_norm:
        raise _unreadable(
            model, "it has a norm after one of attention and MLP", "models that have one after both, or none"
        )
    table = {**GEMMA, **(GEMMA_QKV if config.num_heads == config.num_kv_heads else GEMMA_KV)}
    variant = Variant(
        activation="gelu_tanh",
        post_norm=post,
        norm_plus_one=True,
        embed_scale=math.sqrt(config.embed_dim),
        attention_soft_cap=config.attn_logits_soft_cap,
        logit_soft_cap=config.final_logit_softcap,
    )
    local = any(layer.attn.attn_type is gemma.AttentionType.LOCAL_SLIDING for layer in model.layers)
    return _read(
        model,
        {**table, **GEMMA_POST_NORMS} if post else table,
        tied=True,
        theta=_default(gemma.apply_rope, "max_wavelength"),
        variant=variant,
        final_norm="final_norm.scale",
        # Up to the length of the window, layers with a window and layers without compute the same.
        max_seq_len=config.sliding_window_size if local else MAX_SEQ_LEN,
    )


def _read(
    model: Any,
    table: Table,
    *,
    tied: bool,
    theta: float,
    final_norm: str = "final_norm.w",
    **values: Any,
) -> tuple[LlamaConfig, DecoderWeights]:
    """What all families have in common."""
    config, parameters = model.config, _Parameters(model)
    layers = LayerWeights(
        **{name: parameters.of_layers(path, axes, config.num_layers) for name, (path, axes) in table.items()}
    )
    weights = DecoderWeights(
        embed=parameters.whole("embedder.input_embedding", "vocab embed"),
        layers=layers,
        final_norm=parameters.whole(final_norm, "embed"),
        lm_head=None if tied else parameters.whole("lm_head.w", "embed vocab"),
    )
    parameters.refuse_unread()
    defaults: dict[str, Any] = {
        "max_seq_len": MAX_SEQ_LEN,
        "hidden_dim": config.embed_dim,
        "intermediate_dim": config.hidden_dim,
        "num_layers": config.num_layers,
        "num_heads": config.num_heads,
        "num_kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "layer_norm_epsilon": getattr(config, "norm_eps", 1e-6),
        "rope": RotaryConfig(theta=theta),
        "tie_word_embeddings": tied,
    }
    return LlamaConfig(**defaults | values), weights


class _Parameters:
    """The parameters of a model by name, and which of them were read.

    Args:
        model: The model.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._arrays = {
            ".".join(map(str, path)): variable.get_value()
            for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param))
        }
        self._unread = set(self._arrays)

    def whole(self, path: str, axes: str) -> Any:
        """A weight outside the layers, whose axes are in the decoder's order."""
        return self._take(path, axes)

    def of_layers(self, path: str, axes: str, layers: int) -> Any:
        """A weight of all layers, each with an array of its own."""
        pattern, picks = _pattern(path, axes)
        return view([self._take(f"layers.{layer}.{path}", axes) for layer in range(layers)], pattern, **picks)

    def refuse_unread(self) -> None:
        """Refuse a model that has a parameter which no weight was read from: samples would be another model's."""
        if self._unread:
            names = sorted(self._unread)
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise _unreadable(
                self._model,
                f"nothing reads its parameters {', '.join(names[:3])}{more}",
                "the parameters of Tunix's own models",
            )

    def _take(self, path: str, axes: str) -> Any:
        if path not in self._arrays:
            raise _unreadable(self._model, f"it has no parameter {path}", "weights that are not quantized")
        self._unread.discard(path)
        array = self._arrays[path]
        assert array.ndim == len(axes.split()), f"{path} has the shape {array.shape}, not {axes}"
        return array


def _pattern(path: str, axes: str) -> tuple[str, dict[str, int]]:
    """How `view` reads a parameter of one layer: its axes, the decoder's, and the index of an axis of several weights.

    Args:
        path: The path of the parameter in a layer.
        axes: Its axes; the first is the weight's own name where the parameter holds several.
    """
    have, picks = axes.split(), {}
    if have[0] in (several := PICKS.get(path, "")):
        picks[have[0]] = several.index(have[0])
    # The one weight that begins with its heads is the one whose output is the stream.
    want = [axis for axis in have if axis not in picks]
    if "heads" in want and want[-1] == "head":
        want = ["embed", "heads", "head"]
    return f"{axes} -> {' '.join(want)}", picks


def _theta(model: Any, module: Any) -> float:
    """The base of the rotary embeddings: that of the configuration only where attention hands it on.

    In Tunix 0.1.7 Llama 3 and Qwen3 call ``apply_rope`` without it, and so compute with its default.
    """
    if "rope_theta" in inspect.unwrap(module.Attention.block).__code__.co_names:
        return float(model.config.rope_theta)
    return _default(module.apply_rope, "rope_theta")


def _default(function: Callable[..., Any], argument: str) -> float:
    return float(inspect.signature(function).parameters[argument].default)


def _unreadable(model: Any, what: str, can: str) -> UnreadableModelError:
    return UnreadableModelError(
        f"Tunix's {type(model).__name__} cannot be read: {what}. The decoder can do {can}. Change the model, or leave "
        f"lockstep's hooks out of this run ({PAGE})."
    )
