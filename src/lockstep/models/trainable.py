"""The trainable model over weights that the decoder reads: the same arrays, seen with named axes."""

import dataclasses
from typing import Any

import jax

from lockstep.models.config import LlamaConfig
from lockstep.models.hf.names import skeleton
from lockstep.models.llama import LlamaLMHeadModel
from lockstep.models.weights import DecoderWeights


def as_trainable(config: LlamaConfig, weights: DecoderWeights) -> LlamaLMHeadModel:
    """The model whose `read_decoder` gives ``(config, weights)``; nothing is copied, so it works on traced arrays too.

    Args:
        config: The configuration of the model.
        weights: Arrays, or tracers inside a traced function.
    """
    layers = {field.name: getattr(weights.layers, field.name) for field in dataclasses.fields(weights.layers)}
    by_name = {**layers, "embed": weights.embed, "final_norm": weights.final_norm, "lm_head": weights.lm_head}
    by_name["embed_norm"] = weights.embed_norm

    def fill(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        # Parameters have the decoder's names; the array inside a NamedArray adds an entry of its own.
        name = next(key.name for key in reversed(path) if getattr(key, "name", None) in by_name)
        return by_name[name].reshape(leaf.shape)  # axes of heads may be flattened

    return jax.tree_util.tree_map_with_path(fill, skeleton(weights.embed.shape[0], config))
