"""Reads Levanter's language models: by reference, whatever order, stacking or adapter their weights have."""

import dataclasses
import math
import string
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import haliax.nn as hnn
from haliax import NamedArray
from haliax.nn.mup import LinearStandardParam
from haliax.nn.scan import BlockSeq, Stacked
from haliax.quantization import DefaultDotGeneralOp
from levanter.adaptor.lora import LoraLinear
from levanter.dpo import DpoModel
from levanter.layers.attention import Attention
from levanter.layers.rotary import DefaultRotaryEmbeddingsConfig, Llama3RotaryEmbeddingsConfig
from levanter.models.apertus import ApertusLMHeadModel
from levanter.models.gemma import Gemma2LMHeadModel, Gemma3LMHeadModel, GemmaLMHeadModel
from levanter.models.llama import LlamaLMHeadModel
from levanter.models.lm_model import LmHeadModel
from levanter.models.mistral import MistralLMHeadModel
from levanter.models.mixtral import MixtralLMHeadModel
from levanter.models.olmo import Olmo2Attention, Olmo2LMHeadModel
from levanter.models.qwen import QwenConfig, QwenLMHeadModel
from levanter.models.qwen3_moe import Qwen3MoeLMHeadModel

from lockstep.models import snowball_reader as snowball_reader  # registers itself
from lockstep.models.config import LlamaConfig
from lockstep.models.experts import Experts
from lockstep.models.low_rank import MergeLora, unchanged
from lockstep.models.registry import UnreadableModelError, read_registered, register_reader, registered_classes
from lockstep.models.rope import Llama3Scaling, RotaryConfig
from lockstep.models.variant import Activation, Variant
from lockstep.models.weights import WEIGHT_AXES, DecoderWeights, LayerWeights, haliax_axes
from lockstep.placement import LazyWeight, axis_specs, resharded, view

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "relu": "relu",
}
"""Activations of a gated MLP: Levanter's name and ours."""

AXES = {name: " ".join(axis for axis in haliax_axes(name) if axis != "layer") for name in WEIGHT_AXES}
"""The axes that the decoder wants of each weight, without the layer, by Levanter's names."""
AXES["o"] = AXES["o"].replace("kv_head q_heads_per_group", "heads")  # the one weight with flattened heads


@register_reader(LmHeadModel)
def _refuse(model: Any) -> tuple[LlamaConfig, DecoderWeights]:
    classes = (cls for cls in registered_classes() if cls.__module__.startswith("levanter.models."))
    supported = sorted(cls.__name__ for cls in classes if cls is not LmHeadModel)
    raise UnreadableModelError(
        f"Levanter's {type(model).__name__} cannot be read; supported are {', '.join(supported)} and their "
        "subclasses. Train one of these, or register a reader for the class with lockstep.models.register_reader."
    )


@register_reader(DpoModel, ignore=("reference.*",))
def _read_policy(model: Any) -> tuple[LlamaConfig, DecoderWeights]:
    return read_registered(model.policy)


@register_reader(LlamaLMHeadModel)
@register_reader(MistralLMHeadModel)
@register_reader(QwenLMHeadModel)
def _read_llama(model: Any) -> tuple[LlamaConfig, DecoderWeights]:
    layers = _Layers(model)
    norms = layers.norms(attn_norm="input_layernorm", mlp_norm="post_attention_layernorm")
    norms["attn_post_norm"] = layers.norm(lambda layer: getattr(layer, "post_attn_layernorm", None))
    norms["mlp_post_norm"] = layers.norm(lambda layer: getattr(layer, "post_mlp_layernorm", None))
    variant = Variant(
        activation=_activation(model),
        post_norm=norms["attn_post_norm"] is not None,
        embed_norm=model.embeddings.norm is not None,
    )
    return _read(model, layers, norms | _gated_mlp(layers), variant)


@register_reader(GemmaLMHeadModel)
def _read_gemma(model: Any) -> tuple[LlamaConfig, DecoderWeights]:
    layers = _Layers(model)
    norms = layers.norms(attn_norm="input_layernorm", mlp_norm="post_attention_layernorm")
    return _read(model, layers, norms | _gated_mlp(layers), _gemma(model, post_norm=False))


@register_reader(Gemma2LMHeadModel)
@register_reader(Gemma3LMHeadModel)
def _read_gemma2(model: Any) -> tuple[LlamaConfig, DecoderWeights]:
    layers = _Layers(model)
    norms = layers.norms(
        attn_norm="input_layernorm",
        attn_post_norm="post_attention_layernorm",
        mlp_norm="pre_feedforward_layernorm",
        mlp_post_norm="post_feedforward_layernorm",
    )
    return _read(model, layers, norms | _gated_mlp(layers), _gemma(model, post_norm=True))


@register_reader(Olmo2LMHeadModel)
def _read_olmo2(model: Any) -> tuple[LlamaConfig, DecoderWeights]:
    layers = _Layers(model)
    norms = layers.norms(attn_post_norm="post_attention_layernorm", mlp_post_norm="post_feedforward_layernorm")
    variant = Variant(activation=_activation(model), pre_norm=False, post_norm=True, wide_qk_norm=True)
    return _read(model, layers, norms | _gated_mlp(layers), variant)


@register_reader(MixtralLMHeadModel)
def _read_mixtral(model: Any) -> tuple[LlamaConfig, DecoderWeights]:
    config, layers = model.config, _Layers(model)
    experts = Experts(
        num_experts=config.n_routed_experts,
        num_experts_per_tok=config.num_experts_per_tok,
        # One MLP of the width of an expert, whatever their number.
        shared_intermediate_dim=config.intermediate_dim if config.n_shared_experts else None,
    )
    names = {"expert_gate": "w1", "expert_up": "w3", "expert_down": "w2"}
    return _read_experts(model, layers, experts, lambda layer: layer.block_sparse_moe, names)


@register_reader(Qwen3MoeLMHeadModel)
def _read_qwen3_moe(model: Any) -> tuple[LlamaConfig, DecoderWeights]:
    config, layers = model.config, _Layers(model)
    experts = Experts(
        num_experts=config.num_experts,
        num_experts_per_tok=config.num_experts_per_tok,
        intermediate_dim=config.moe_intermediate_dim,
        norm_topk_prob=config.norm_topk_prob,
    )
    names = {f"expert_{name}": f"{name}_proj" for name in ("gate", "up", "down")}
    return _read_experts(model, layers, experts, lambda layer: layer.mlp, names)


def _read_experts(
    model: Any, layers: "_Layers", experts: Experts, block: Callable[[Any], Any], names: dict[str, str]
) -> tuple[LlamaConfig, DecoderWeights]:
    """A model with experts in every layer.

    Args:
        block: Returns the router and the experts of a layer.
        names: The attribute of the experts by the name of the weight.
    """
    weights = layers.norms(attn_norm="input_layernorm", mlp_norm="post_attention_layernorm")
    if any(getattr(block(layers.first).experts, name).bias is not None for name in names.values()):
        raise _unreadable(model, "its experts have a bias", "biases of q, k and v")
    if experts.shared_intermediate_dim is not None:
        weights |= {f"shared_{name}": weight for name, weight in _gated_mlp(layers, "shared_mlp").items()}
    weights["router"] = layers.weight(lambda layer: block(layer).gate, "embed experts")
    for weight, name in names.items():
        axes = "experts mlp embed" if weight == "expert_down" else "experts embed mlp"
        weights[weight] = layers.array(lambda layer, name=name: getattr(block(layer).experts, name).weight, axes)  # type: ignore[misc]
    return _read(model, layers, weights, Variant(activation=_activation(model)), experts)


@register_reader(ApertusLMHeadModel)
def _read_apertus(model: Any) -> tuple[LlamaConfig, DecoderWeights]:
    layers = _Layers(model)
    weights = layers.norms(attn_norm="attention_layernorm", mlp_norm="feedforward_layernorm") | {
        "up": layers.weight(lambda layer: layer.mlp.up_proj, AXES["up"]),
        "down": layers.weight(lambda layer: layer.mlp.down_proj, AXES["down"]),
    }
    scalars = {"xielu_p": "alpha_p", "xielu_n": "alpha_n", "xielu_beta": "beta", "xielu_eps": "eps"}
    for name, own in scalars.items():
        weights[name] = layers.array(attrgetter(f"mlp.act_fn.{own}"), AXES[name])
    return _read(model, layers, weights, Variant(activation="xielu"))


def _read(
    model: Any, layers: "_Layers", weights: dict[str, Any], variant: Variant, experts: Experts | None = None
) -> tuple[LlamaConfig, DecoderWeights]:
    """The parts that all families have in common: attention, embedding and output layer."""
    attention = layers.first.self_attn
    if type(attention) not in (Attention, Olmo2Attention):
        raise _unreadable(model, f"its attention is {type(attention).__name__}", "Attention and Olmo2Attention")
    shape = attention.config
    variant = dataclasses.replace(
        variant,
        attention_scale=shape.scaling_factor,
        attention_soft_cap=shape.logits_soft_cap,
        sliding_window=shape.sliding_window,
    )
    norm = "_wide_norm" if variant.wide_qk_norm else "_norm"
    config = LlamaConfig(
        max_seq_len=_max_seq_len(model.config),
        hidden_dim=shape.Embed.size,
        intermediate_dim=model.config.intermediate_dim,
        experts=experts,
        num_layers=layers.count,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_size,
        layer_norm_epsilon=model.transformer.norm.eps,
        rope=_rope(model, shape.rope),
        tie_word_embeddings=model.lm_head is None,
        qkv_bias=_base(attention.q_proj).bias is not None,
        qk_norm=shape.qk_norm is not None,
        variant=variant,
    )

    def projection(name: str) -> Callable[[Any], Any]:
        return attrgetter(f"self_attn.{name}_proj")

    def bias(name: str) -> Callable[[Any], Any]:
        return lambda layer: _base(projection(name)(layer)).bias

    stacked = LayerWeights(
        **weights,
        **{name: layers.weight(projection(name), AXES[name], bias=name != "o") for name in "qkvo"},
        **{f"{name}_bias": layers.array(bias(name), AXES[f"{name}_bias"]) for name in "qkv"},
        **{f"{name}{norm}": layers.norm(attrgetter(f"self_attn.{name}_norm"), AXES[f"{name}{norm}"]) for name in "qk"},
    )
    outer = _Layers(model, outer=True)
    return config, DecoderWeights(
        embed=outer.array(lambda model: model.embeddings.token_embeddings.weight, AXES["embed"]),
        layers=stacked,
        final_norm=outer.norm(lambda model: model.transformer.norm),
        lm_head=outer.weight(lambda model: model.lm_head, AXES["lm_head"]),
        embed_norm=outer.norm(lambda model: getattr(model.embeddings, "norm", None)),
    )


def _gated_mlp(layers: "_Layers", mlp: str = "mlp") -> dict[str, Any]:
    return {name: layers.weight(attrgetter(f"{mlp}.{name}_proj"), AXES[name]) for name in ("gate", "up", "down")}


def _gemma(model: Any, *, post_norm: bool) -> Variant:
    return Variant(
        activation=_activation(model),
        post_norm=post_norm,
        norm_plus_one=True,
        embed_norm=model.embeddings.norm is not None,
        embed_scale=math.sqrt(model.config.hidden_dim),
    )


def _activation(model: Any) -> Activation:
    name = str(model.config.activation_function)
    if name not in ACTIVATIONS:
        raise _unreadable(model, f"activation_function is {name}", f"{', '.join(ACTIVATIONS)}, and Apertus's xielu")
    return ACTIVATIONS[name]


def _max_seq_len(config: Any) -> int:
    """Levanter's Qwen2 refuses sequences that are longer than its window, where it has one."""
    windowed = isinstance(config, QwenConfig) and config.use_sliding_window and config.sliding_window is not None
    return min(config.max_seq_len, config.sliding_window) if windowed else int(config.max_seq_len)


def _rope(model: Any, rope: Any) -> RotaryConfig:
    match rope:
        case DefaultRotaryEmbeddingsConfig(factor=1.0):
            return RotaryConfig(theta=float(rope.theta))
        case Llama3RotaryEmbeddingsConfig():
            scaling = Llama3Scaling(
                factor=rope.factor,
                low_freq_factor=rope.low_freq_factor,
                high_freq_factor=rope.high_freq_factor,
                original_max_position_embeddings=rope.original_max_position_embeddings,
            )
            return RotaryConfig(theta=float(rope.theta), scaling=scaling)
    raise _unreadable(model, f"rope is {rope}", "the default rotary embeddings without a factor, and llama3")


class _Layers:
    """The transformer layers of a model, stacked or not, one weight at a time; ``outer``: the model itself."""

    def __init__(self, model: Any, *, outer: bool = False) -> None:
        self.model = model
        self.axis: str | None = None
        """Name of the layer axis; None where no array has one."""
        self.by_layer = False
        """Whether each layer has arrays of its own."""
        self.count = 1
        layers = model.transformer.layers
        if outer:
            self._blocks: Sequence[Any] = [model]
        elif isinstance(layers, Stacked):
            self._blocks, self.axis, self.count = [layers.stacked], layers.Block.name, layers.Block.size
        elif isinstance(layers, BlockSeq):
            self._blocks, self.by_layer, self.count = list(layers.blocks), True, len(layers.blocks)
        else:
            raise _unreadable(model, f"its layers are a {type(layers).__name__}", "Stacked and BlockSeq")

    @property
    def first(self) -> Any:
        """The first layer, or all of them stacked."""
        return self._blocks[0]

    def norms(self, **attributes: str) -> dict[str, Any]:
        """Weights of normalisations: the decoder's name of each and the attribute of a layer that it is."""
        return {name: self.norm(attrgetter(attribute)) for name, attribute in attributes.items()}

    def norm(self, get: Callable[[Any], Any], axes: str = AXES["final_norm"]) -> Any:
        """The weight of a normalisation, None where there is none."""
        norms = [get(block) for block in self._blocks]
        if norms[0] is None:
            return None
        if norms[0].weight is None or norms[0].bias is not None:
            fault = "no weight" if norms[0].weight is None else "a bias"
            raise _unreadable(self.model, f"a {type(norms[0]).__name__} has {fault}", "norms with a weight and no bias")
        if norms[0].eps != self.model.transformer.norm.eps:
            raise _unreadable(self.model, "its norms have different eps", "one eps for all norms")
        return self._named([norm.weight for norm in norms], axes)

    def array(self, get: Callable[[Any], Any], axes: str) -> Any:
        """A named array, None where there is none."""
        arrays = [get(block) for block in self._blocks]
        return None if arrays[0] is None else self._named(arrays, axes)

    def weight(self, get: Callable[[Any], Any], axes: str, *, bias: bool = False) -> Any:
        """The weight of a linear layer, with its adapter merged; None where there is no layer.

        Args:
            bias: Whether the decoder reads its bias, too; otherwise it may have none.
        """
        linears = [get(block) for block in self._blocks]
        if linears[0] is None:
            return None
        for linear in linears:
            self.check_plain(linear)
            if _base(linear).bias is not None and not bias:
                raise _unreadable(self.model, "it has a bias beside those of q, k and v", "biases of q, k and v")
        base = [_base(linear).weight for linear in linears]
        if not isinstance(linears[0], LoraLinear):
            return self._named(base, axes)
        low = [(linear.lora.lora_A.weight, linear.lora.lora_B.weight) for linear in linears]
        return self._merged(base, low, linears[0].lora.scale, axes)

    def _named(self, arrays: Sequence[NamedArray], axes: str) -> Any:
        """Named arrays in the wanted order of axes."""
        have = self._names(arrays[0])
        every = [array.array for array in arrays] if self.by_layer else arrays[0].array
        return view(every, f"{' '.join(have)} -> {'layer ' if 'layer' in have else ''}{axes}")

    def _names(self, array: NamedArray) -> tuple[str, ...]:
        return tuple("layer" if axis.name == self.axis else axis.name for axis in array.axes)

    def check_plain(self, linear: Any) -> None:
        """Refuse a quantized linear layer, or one whose weight is scaled."""
        base = _base(linear)
        if not isinstance(base, hnn.Linear) or not isinstance(base.dot_general, DefaultDotGeneralOp):
            raise _unreadable(self.model, f"a linear layer is a quantized {type(base).__name__}", "plain linear layers")
        if base._reparam_cls is not LinearStandardParam:
            raise _unreadable(self.model, f"a linear layer has {base._reparam_cls.__name__}", "standard parameters")

    def _merged(self, base: Sequence[NamedArray], low: Sequence[Any], scale: float, axes: str) -> LazyWeight:
        """``W + scale * A B``, block by block: the axes that a factor shares with ``W`` must be split as in ``W``."""
        plain = self._named(base, axes)
        names = [self._names(array) for array in (base[0], *low[0])]
        where = dict(zip(names[0], axis_specs(base[0].array), strict=True))
        for array, own in zip(low[0], names[1:], strict=True):
            for name, spec in zip(own, axis_specs(array.array), strict=True):
                if spec != where.get(name):
                    raise _unreadable(
                        self.model,
                        f"the axis {name} of a LoRA factor is split over {spec} and that of its weight over "
                        f"{where.get(name)}",
                        "factors that are sharded as their weight is, with the rank whole",
                    )
        if not isinstance(plain, LazyWeight):  # already in the wanted order
            array, sharding = base[0].array, resharded(base[0].array, axis_specs(base[0].array))
            plain = LazyWeight((array,), unchanged, array.shape, array.dtype, sharding, stacked="layer" in names[0])
        every = dict.fromkeys(name for own in names for name in own if name != "layer")
        letters = dict(zip(every, string.ascii_letters, strict=False))
        weight, a, b = ("".join(letters[name] for name in own if name != "layer") for own in names)
        parts = [array.array for array in base], [pair[0].array for pair in low], [pair[1].array for pair in low]
        return dataclasses.replace(
            plain,
            parts=tuple(tuple(part) if self.by_layer else part[0] for part in parts),
            assemble=MergeLora(equation=f"{a},{b}->{weight}", scale=scale, then=plain.assemble),
        )


def _base(linear: Any) -> Any:
    return linear.wrapped if isinstance(linear, LoraLinear) else linear


def _unreadable(model: Any, fault: str, can: str) -> UnreadableModelError:
    return UnreadableModelError(
        f"Levanter's {type(model).__name__} cannot be read: {fault}. The decoder can do {can}. Change the model's "
        "configuration, or leave lockstep's hook out of this run."
    )
