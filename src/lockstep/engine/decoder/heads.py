"""The attention heads of one device, and what the layers with them keep of the past."""

import dataclasses

from lockstep.models import LlamaConfig, layer_kinds
from lockstep.models.attention import Heads, ScoreModifier
from lockstep.models.attention.kv import KvSpec, PagedKv
from lockstep.placement import DecodeMesh


def device_heads(config: LlamaConfig, decode_mesh: DecodeMesh) -> Heads:
    """Return the attention heads of one device of the decode mesh: those of a kind of layers, with all kinds' beside
    them where they differ.
    """
    kinds = config.heads_by_kind
    if len(kinds) > 1:
        of_kinds = {kind: device_heads(of, decode_mesh) for kind, of in kinds.items()}
        by_layer = tuple(of_kinds[kind] for kind in config.attention_kinds)
        return dataclasses.replace(of_kinds["full"], by_layer=by_layer)
    windows = tuple(kind.window for kind in layer_kinds(config))
    differ = len(set(windows)) > 1
    latent, kv_heads = config.latent, max(1, config.kept_kv_heads // decode_mesh.tensor)
    return Heads(
        kv_heads=kv_heads,
        group=config.num_heads // decode_mesh.tensor // kv_heads,
        head_size=config.head_size if latent is None else latent.size,
        value_size=None if latent is None else latent.kv_lora_rank,
        modifier=ScoreModifier(soft_cap=config.variant.attention_soft_cap, window=None if differ else windows[0]),
        windows=windows if differ else None,
        sinks=config.variant.attention_sinks,
        context=decode_mesh.context,
        context_axes=decode_mesh.context_axes,
    )


def kept_by_layer(config: LlamaConfig, heads: Heads, rows: PagedKv, state: KvSpec | None = None) -> tuple[KvSpec, ...]:
    """Return what each layer keeps of the past on a device.

    Args:
        heads: The heads of the device.
        rows: The rows of a position that the pool has, for the layers that keep any.
        state: That of layers with linear attention; None where there are none.
    """
    own = [rows] * config.num_layers if heads.by_layer is None else [rows.holding(of.kept) for of in heads.by_layer]
    kept: list[KvSpec] = [
        dataclasses.replace(of, window=kind.window) for of, kind in zip(own, layer_kinds(config), strict=True)
    ]
    for number in config.linear_layers:
        assert state is not None
        kept[number] = state
    return tuple(kept)
