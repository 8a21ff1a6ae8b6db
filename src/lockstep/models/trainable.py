"""Models made of shapes or of the decoder's weights: nothing is computed, nothing copied."""

import functools
import math
from typing import Any

import equinox as eqx
import haliax as hax
import jax
from haliax import Axis, NamedArray

from lockstep.models.config import LlamaConfig
from lockstep.models.llama import LlamaLMHeadModel
from lockstep.models.weights import DecoderWeights, input_dims


def skeleton(vocab_size: int, config: LlamaConfig) -> LlamaLMHeadModel:
    """Return a model whose arrays are `jax.ShapeDtypeStruct`, without device work.

    Args:
        vocab_size: The number of rows of the embedding.
    """
    key = jax.eval_shape(lambda: jax.random.key(0))
    vocab = Axis("vocab", vocab_size)
    # Without a mapping nothing is sharded, whatever context the caller is in.
    with hax.axis_mapping({}):
        return eqx.filter_eval_shape(lambda k: LlamaLMHeadModel.init(vocab, config, key=k), key)


@functools.lru_cache
def layer_products(config: LlamaConfig, *, again: bool = False) -> float:
    """The numbers of the weights of all layers that a token is multiplied with.

    Args:
        again: Those alone that the backward pass multiplies with a second time where it recomputes layers: no gradient
            needs the last products of a layer, that of a dense MLP and of attention beside it, if these are added as
            they are.
    """
    last = {"down": config.experts is None, "o": config.variant.parallel}
    unused = {name for name, is_last in last.items() if is_last and again and not config.variant.post_norm}
    layers = skeleton(1, config).layers
    leaves = jax.tree_util.tree_leaves_with_path(layers, is_leaf=lambda leaf: isinstance(leaf, NamedArray))
    named_leaves = ((path[-1].name, leaf) for path, leaf in leaves)
    named_leaves = ((name, leaf) for name, leaf in named_leaves if name not in unused)
    products = ((name, leaf.array.shape) for name, leaf in named_leaves if input_dims(name, leaf.ndim))
    return sum(config.part_read(name, 1) * math.prod(shape) for name, shape in products)


def as_trainable(config: LlamaConfig, weights: DecoderWeights) -> LlamaLMHeadModel:
    """The model whose `read_decoder` gives ``(config, weights)``; nothing is copied, so it works on traced arrays too.

    Args:
        weights: Arrays, or tracers inside a traced function.
    """
    by_name = vars(weights.layers) | vars(weights)
    del by_name["layers"]

    def fill(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        # Parameters have the decoder's names; the array inside a NamedArray adds an entry of its own.
        name = next(key.name for key in reversed(path) if getattr(key, "name", None) in by_name)
        return by_name[name].reshape(leaf.shape)  # axes of heads may be flattened

    return jax.tree_util.tree_map_with_path(fill, skeleton(weights.embed.shape[0], config))
