"""The tensors of a Hugging Face checkpoint: which parameter each one has, and how their axes correspond."""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import numpy as np
from haliax import Axis, NamedArray

from lockstep.models.config import LlamaConfig
from lockstep.models.llama import LlamaLMHeadModel

Heads = ("kv_head", "q_heads_per_group", "head_size")
KVHeads = ("kv_head", "head_size")
Embed, Mlp, Vocab, HeadSize = ("embed",), ("mlp",), ("vocab",), ("head_size",)


@dataclasses.dataclass(frozen=True)
class HFTensor:
    """One parameter as Hugging Face stores it: one tensor, or one per layer.

    Args:
        template: The tensor's name in the checkpoint, with ``{layer}`` for the number of the layer.
        dims: The named axes flattened into each dimension of the stored tensor, the slowest first.
    """

    template: str
    dims: tuple[tuple[str, ...], ...]

    def name(self, layer: int | None) -> str:
        """Returns the stored name of one layer's tensor; ``layer`` is None where the parameter is not per layer."""
        return self.template.format(layer=layer)

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Returns the stored shape, given the sizes of the named axes."""
        return tuple(math.prod(sizes[axis] for axis in group) for group in self.dims)

    def to_stored(self, array: np.ndarray, axes: Sequence[str], sizes: Mapping[str, int]) -> np.ndarray:
        """Converts one layer's parameter, with the given order of axes, to the stored tensor."""
        flat = [axis for group in self.dims for axis in group]
        return np.ascontiguousarray(array.transpose([axes.index(a) for a in flat]).reshape(self.shape(sizes)))

    def stored_slices(self, where: Mapping[str, slice], sizes: Mapping[str, int]) -> tuple[slice, ...]:
        """Returns the block of the stored tensor that has a part of the parameter, split by slowest axes alone."""
        slices = []
        for slowest, *rest in self.dims:
            inner = math.prod(sizes[axis] for axis in rest)
            slices.append(slice(where[slowest].start * inner, where[slowest].stop * inner))
        return tuple(slices)

    def from_stored(
        self, block: np.ndarray, where: Mapping[str, slice], axes: Sequence[str], sizes: Mapping[str, int]
    ) -> np.ndarray:
        """Returns a part of the parameter, in the given order of axes, from a block read with `stored_slices`."""
        shape: list[int] = []
        pick: list[slice] = []
        for slowest, *rest in self.dims:
            shape += [where[slowest].stop - where[slowest].start, *(sizes[axis] for axis in rest)]
            pick += [slice(None), *(where[axis] for axis in rest)]
        flat = [axis for group in self.dims for axis in group]
        return block.reshape(shape)[tuple(pick)].transpose([flat.index(axis) for axis in axes])


_LAYER = "model.layers.{layer}."
LLAMA_TENSORS: dict[str, HFTensor] = {
    "embed": HFTensor("model.embed_tokens.weight", (Vocab, Embed)),
    "layers.stacked.attn_norm": HFTensor(_LAYER + "input_layernorm.weight", (Embed,)),
    "layers.stacked.attention.q": HFTensor(_LAYER + "self_attn.q_proj.weight", (Heads, Embed)),
    "layers.stacked.attention.k": HFTensor(_LAYER + "self_attn.k_proj.weight", (KVHeads, Embed)),
    "layers.stacked.attention.v": HFTensor(_LAYER + "self_attn.v_proj.weight", (KVHeads, Embed)),
    "layers.stacked.attention.o": HFTensor(_LAYER + "self_attn.o_proj.weight", (Embed, Heads)),
    "layers.stacked.attention.q_bias": HFTensor(_LAYER + "self_attn.q_proj.bias", (Heads,)),
    "layers.stacked.attention.k_bias": HFTensor(_LAYER + "self_attn.k_proj.bias", (KVHeads,)),
    "layers.stacked.attention.v_bias": HFTensor(_LAYER + "self_attn.v_proj.bias", (KVHeads,)),
    "layers.stacked.attention.q_norm": HFTensor(_LAYER + "self_attn.q_norm.weight", (HeadSize,)),
    "layers.stacked.attention.k_norm": HFTensor(_LAYER + "self_attn.k_norm.weight", (HeadSize,)),
    "layers.stacked.mlp_norm": HFTensor(_LAYER + "post_attention_layernorm.weight", (Embed,)),
    "layers.stacked.mlp.gate": HFTensor(_LAYER + "mlp.gate_proj.weight", (Mlp, Embed)),
    "layers.stacked.mlp.up": HFTensor(_LAYER + "mlp.up_proj.weight", (Mlp, Embed)),
    "layers.stacked.mlp.down": HFTensor(_LAYER + "mlp.down_proj.weight", (Embed, Mlp)),
    "final_norm": HFTensor("model.norm.weight", (Embed,)),
    "lm_head": HFTensor("lm_head.weight", (Vocab, Embed)),
}
"""The tensors of Llama, Mistral, Qwen2 and Qwen3 by the path of the parameter in `LlamaLMHeadModel`."""


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One parameter of a model and its Hugging Face tensors."""

    path: str
    """The dotted path in `LlamaLMHeadModel`."""
    value: NamedArray
    """The parameter, or its shape where the model is a skeleton."""
    stored: HFTensor
    """Its tensors in the checkpoint."""

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of the axes of one layer's part."""
        return tuple(axis.name for axis in self.value.axes if axis.name != "layer")

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of all its axes by name."""
        return {axis.name: axis.size for axis in self.value.axes}

    @property
    def layers(self) -> Sequence[int | None]:
        """The layers that it has a tensor for: ``[None]`` where it is not per layer."""
        return range(self.sizes["layer"]) if "layer" in self.sizes else [None]

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Returns the name and shape of each of its tensors."""
        shape = self.stored.shape(self.sizes)
        return ((self.stored.name(layer), shape) for layer in self.layers)


def skeleton(vocab_size: int, config: LlamaConfig) -> LlamaLMHeadModel:
    """Returns a model whose arrays are `jax.ShapeDtypeStruct`, without device work.

    Args:
        vocab_size: The number of rows of the embedding.
        config: The configuration of the model.
    """
    key = jax.eval_shape(lambda: jax.random.key(0))
    vocab = Axis("vocab", vocab_size)
    # Without a mapping nothing is sharded, whatever context the caller is in.
    with hax.axis_mapping({}):
        return eqx.filter_eval_shape(lambda k: LlamaLMHeadModel.init(vocab, config, key=k), key)


def parameters(model: Any, tensors: Mapping[str, HFTensor]) -> list[Parameter]:
    """Returns every parameter of a model, or of its skeleton, in the order of the model's tree.

    Args:
        model: The model.
        tensors: The tensors of its family by the path of the parameter.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(model, is_leaf=lambda x: isinstance(x, NamedArray))
    paths = ((jax.tree_util.keystr(path, simple=True, separator="."), leaf) for path, leaf in leaves)
    return [Parameter(path, leaf, tensors[path]) for path, leaf in paths]
