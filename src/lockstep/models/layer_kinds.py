"""The sliding window and the rotary embeddings of each layer, where a model's layers differ in them (Gemma 2 and 3)."""

import dataclasses
from collections.abc import Hashable, Iterable

from lockstep.models.config import LlamaConfig, RotaryConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerKind:
    """What layers of one model may differ in.

    Args:
        window: The number of positions that a query attends to, its own included; None for all.
        rope: The rotary embeddings.
    """

    window: int | None
    rope: RotaryConfig


def layer_kinds(config: LlamaConfig) -> tuple[LayerKind, ...]:
    """The kind of each layer.

    Args:
        config: The configuration of the model.
    """
    variant = config.variant
    if variant.layer_types is None:
        return (LayerKind(window=variant.sliding_window, rope=config.rope),) * config.num_layers
    full = LayerKind(window=None, rope=config.rope)
    sliding = LayerKind(window=variant.sliding_window, rope=variant.sliding_rope or config.rope)
    return tuple(sliding if each == "sliding_attention" else full for each in variant.layer_types)


def distinct[T: Hashable](values: Iterable[T]) -> tuple[tuple[T, ...], tuple[int, ...]]:
    """The values that there are, in the order of their first, and which of them each one is.

    Args:
        values: One for each layer. Where there is a single distinct value, nothing depends on the layer.
    """
    each = tuple(values)
    found = tuple(dict.fromkeys(each))
    return found, tuple(map(found.index, each))
