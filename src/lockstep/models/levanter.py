"""Reads Levanter's language models: by reference, whatever order, stacking or adapter their weights have."""

import dataclasses
import string
from collections.abc import Callable, Sequence
from typing import Any

import haliax.nn as hnn
import jax.numpy as jnp
from haliax import NamedArray
from haliax.nn.mup import LinearStandardParam
from haliax.nn.scan import BlockSeq, Stacked
from haliax.quantization import DefaultDotGeneralOp
from jaxtyping import Array
from levanter.adaptor.lora import LoraLinear
from levanter.dpo import DpoModel
from levanter.layers.rotary import DefaultRotaryEmbeddingsConfig, Llama3RotaryEmbeddingsConfig
from levanter.models.llama import LlamaLMHeadModel
from levanter.models.lm_model import LmHeadModel

from lockstep.models.config import Llama3Scaling, LlamaConfig, RotaryConfig
from lockstep.models.reader import UnreadableModelError, read_decoder, register_reader
from lockstep.models.weights import DecoderWeights, LayerWeights
from lockstep.placement.stored import StoredWeight, axis_specs, resharded, view

QUERY, KV = "kv_head q_heads_per_group head_size", "kv_head head_size"


@register_reader(LmHeadModel)
def _refuse(model: Any) -> tuple[LlamaConfig, DecoderWeights]:
    supported = sorted(cls.__name__ for cls in read_decoder.registry if cls.__module__.startswith("levanter.models."))
    supported.remove(LmHeadModel.__name__)
    raise UnreadableModelError(
        f"Levanter's {type(model).__name__} cannot be read; supported are {', '.join(supported)} and their subclasses. "
        "Train one of these, or register a reader for the class with lockstep.models.register_reader."
    )


@register_reader(DpoModel)
def _read_policy(model: Any) -> tuple[LlamaConfig, DecoderWeights]:
    return read_decoder(model.policy)


@register_reader(LlamaLMHeadModel)
def _read_llama(model: Any) -> tuple[LlamaConfig, DecoderWeights]:
    layers = _Layers(model)
    config = dataclasses.replace(_config(model, layers), intermediate_dim=layers.first.mlp.up_proj.Out.size)
    return config, _weights(model, LayerWeights(**_attention(layers), **_mlp(layers)))


def _config(model: Any, layers: "_Layers") -> LlamaConfig:
    """What all families have in common."""
    attention = layers.first.self_attn.config
    norm = model.transformer.norm
    return LlamaConfig(
        max_seq_len=model.config.max_seq_len,
        hidden_dim=model.embeddings.token_embeddings.Embed.size,
        num_layers=layers.count,
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        head_dim=attention.head_size,
        layer_norm_epsilon=norm.eps,
        rope=_rope(model, attention.rope),
        tie_word_embeddings=model.lm_head is None,
        qkv_bias=layers.first.self_attn.q_proj.bias is not None,
        qk_norm=attention.qk_norm is not None,
    )


def _attention(layers: "_Layers") -> dict[str, Any]:
    return {
        "attn_norm": layers.norm(lambda layer: layer.input_layernorm),
        "mlp_norm": layers.norm(lambda layer: layer.post_attention_layernorm),
        "q": layers.weight(lambda layer: layer.self_attn.q_proj, f"embed {QUERY}"),
        "k": layers.weight(lambda layer: layer.self_attn.k_proj, f"embed {KV}"),
        "v": layers.weight(lambda layer: layer.self_attn.v_proj, f"embed {KV}"),
        "o": layers.weight(lambda layer: layer.self_attn.o_proj, "heads head_size embed"),
        "q_bias": layers.bias(lambda layer: layer.self_attn.q_proj, QUERY),
        "k_bias": layers.bias(lambda layer: layer.self_attn.k_proj, KV),
        "v_bias": layers.bias(lambda layer: layer.self_attn.v_proj, KV),
        "q_norm": layers.norm(lambda layer: layer.self_attn.q_norm, "head_size"),
        "k_norm": layers.norm(lambda layer: layer.self_attn.k_norm, "head_size"),
    }


def _mlp(layers: "_Layers") -> dict[str, Any]:
    return {
        "gate": layers.weight(lambda layer: layer.mlp.gate_proj, "embed mlp"),
        "up": layers.weight(lambda layer: layer.mlp.up_proj, "embed mlp"),
        "down": layers.weight(lambda layer: layer.mlp.down_proj, "mlp embed"),
    }


def _weights(model: Any, layers: LayerWeights) -> DecoderWeights:
    outer = _Layers(model, outer=True)
    return DecoderWeights(
        embed=outer.named([model.embeddings.token_embeddings.weight], "vocab embed"),
        layers=layers,
        final_norm=outer.norm(lambda model: model.transformer.norm),
        lm_head=outer.weight(lambda model: model.lm_head, "embed vocab"),
    )


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
    """The transformer layers of a model, stacked or not, seen one weight at a time.

    Args:
        model: of Levanter.
        outer: whether to see the model itself instead of its layers.
    """

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

    def norm(self, get: Callable[[Any], Any], axes: str = "embed") -> Any:
        """The weight of a normalisation, None where there is none."""
        norms = [get(block) for block in self._blocks]
        if norms[0] is None:
            return None
        if norms[0].weight is None or norms[0].bias is not None:
            what = "no weight" if norms[0].weight is None else "a bias"
            raise _unreadable(self.model, f"a {type(norms[0]).__name__} has {what}", "norms with a weight and no bias")
        return self.named([norm.weight for norm in norms], axes)

    def bias(self, get: Callable[[Any], Any], axes: str) -> Any:
        """The bias of a linear layer, None where there is none."""
        biases = [_base(get(block)).bias for block in self._blocks]
        return None if biases[0] is None else self.named(biases, axes)

    def weight(self, get: Callable[[Any], Any], axes: str) -> Any:
        """The weight of a linear layer, with its adapter merged; None where there is no layer."""
        linears = [get(block) for block in self._blocks]
        if linears[0] is None:
            return None
        for linear in linears:
            self._check(linear)
        base = [_base(linear).weight for linear in linears]
        if not isinstance(linears[0], LoraLinear):
            return self.named(base, axes)
        low = [(linear.lora.lora_A.weight, linear.lora.lora_B.weight) for linear in linears]
        return self._merged(base, low, linears[0].lora.scale, axes)

    def named(self, arrays: Sequence[NamedArray], axes: str) -> Any:
        """Named arrays in the wanted order of axes."""
        have = self._names(arrays[0])
        held = [array.array for array in arrays] if self.by_layer else arrays[0].array
        return view(held, f"{' '.join(have)} -> {'layer ' if 'layer' in have else ''}{axes}")

    def _names(self, array: NamedArray) -> tuple[str, ...]:
        return tuple("layer" if axis.name == self.axis else axis.name for axis in array.axes)

    def _check(self, linear: Any) -> None:
        base = _base(linear)
        if not isinstance(base, hnn.Linear) or not isinstance(base.dot_general, DefaultDotGeneralOp):
            raise _unreadable(self.model, f"a linear layer is a quantized {type(base).__name__}", "plain linear layers")
        if base._reparam_cls is not LinearStandardParam:
            raise _unreadable(self.model, f"a linear layer has {base._reparam_cls.__name__}", "standard parameters")

    def _merged(self, base: Sequence[NamedArray], low: Sequence[Any], scale: float, axes: str) -> StoredWeight:
        """``W + scale * A B``, block by block: the axes that a factor shares with ``W`` are split alike."""
        plain = self.named(base, axes)
        names = [self._names(array) for array in (base[0], *low[0])]
        where = dict(zip(names[0], axis_specs(base[0].array), strict=True))
        for array, own in zip(low[0], names[1:], strict=True):
            for name, spec in zip(own, axis_specs(array.array), strict=True):
                if spec != where.get(name):
                    raise _unreadable(
                        self.model,
                        f"the axis {name} of a LoRA factor is split over {spec} and that of its weight over "
                        f"{where.get(name)}",
                        "factors that lie as their weight does, with the rank whole",
                    )
        if not isinstance(plain, StoredWeight):  # already in the wanted order
            array, sharding = base[0].array, resharded(base[0].array, axis_specs(base[0].array))
            plain = StoredWeight((array,), _same, array.shape, array.dtype, sharding, stacked="layer" in names[0])
        every = dict.fromkeys(name for own in names for name in own if name != "layer")
        letters = dict(zip(every, string.ascii_letters, strict=False))
        weight, a, b = ("".join(letters[name] for name in own if name != "layer") for own in names)
        parts = [array.array for array in base], [pair[0].array for pair in low], [pair[1].array for pair in low]
        return dataclasses.replace(
            plain,
            parts=tuple(tuple(part) if self.by_layer else part[0] for part in parts),
            recipe=MergeLora(equation=f"{a},{b}->{weight}", scale=scale, then=plain.recipe),
        )


@dataclasses.dataclass(frozen=True)
class MergeLora:
    """The recipe of a weight with a low-rank adapter (https://arxiv.org/abs/2106.09685, eq. 3), summed in float32.

    Args:
        equation: einsum of the two factors that gives the axes of the weight.
        scale: of their product.
        then: what is done to the sum.
    """

    equation: str
    scale: float
    then: Callable[[Array], Array]

    def __call__(self, weight: Array, a: Array, b: Array) -> Array:
        """The merged weight, float32."""
        delta = jnp.einsum(self.equation, a.astype(jnp.float32), b.astype(jnp.float32))
        return self.then(weight.astype(jnp.float32) + self.scale * delta)


def _base(linear: Any) -> Any:
    return linear.wrapped if isinstance(linear, LoraLinear) else linear


def _same(block: Array) -> Array:
    return block


def _unreadable(model: Any, what: str, can: str) -> UnreadableModelError:
    return UnreadableModelError(
        f"Levanter's {type(model).__name__} cannot be read: {what}. The decoder can do {can}. Change the model's "
        "configuration, or leave lockstep's hook out of this run."
    )
