import dataclasses

from lockstep.models import LayerKind, RotaryConfig, Variant, distinct, layer_kinds
from lockstep.models.families.qwen3_next import Qwen3NextConfig
from tests.unit.engine.models import LLAMA, SIZES

SLIDING, FULL = "sliding_attention", "full_attention"


def with_variant(**fields):
    return dataclasses.replace(LLAMA, variant=Variant(**fields))


def test_without_types_all_layers_are_of_one_kind():
    assert layer_kinds(LLAMA) == (LayerKind(window=None, rope=LLAMA.rope),) * 2
    assert layer_kinds(with_variant(sliding_window=3)) == (LayerKind(window=3, rope=LLAMA.rope),) * 2


def test_sliding_layers_have_the_window_and_their_own_base():
    local = RotaryConfig(theta=100.0)
    config = with_variant(sliding_window=3, layer_types=(FULL, SLIDING), sliding_rope=local)
    assert layer_kinds(config) == (LayerKind(window=None, rope=config.rope), LayerKind(window=3, rope=local))
    config = with_variant(sliding_window=3, layer_types=(FULL, SLIDING))
    assert [kind.rope for kind in layer_kinds(config)] == [config.rope] * 2


def test_every_nth_layer_has_full_attention_and_the_embedding_its_width():
    variant = Variant(sliding_window=3, full_attention_every=3, embed_scale="sqrt_hidden_dim")
    config = dataclasses.replace(LLAMA, num_layers=7, variant=variant)
    assert config.layer_types == (SLIDING, SLIDING, FULL) * 2 + (SLIDING,)
    assert [kind.window for kind in layer_kinds(config)] == [3, 3, None, 3, 3, None, 3]
    assert config.embed_scale == LLAMA.hidden_dim**0.5 and LLAMA.embed_scale is None


def test_a_window_as_long_as_the_context_is_none():
    config = with_variant(sliding_window=LLAMA.max_seq_len)
    assert layer_kinds(config) == layer_kinds(LLAMA)


def test_distinct_values_in_the_order_of_their_first():
    assert distinct("abcab") == (("a", "b", "c"), (0, 1, 2, 0, 1))


def test_layers_of_a_kind_have_its_weights():
    assert LLAMA.heads_by_kind == {"full": LLAMA} and not LLAMA.mixed_parts and [*LLAMA.layers_of("q")] == [0, 1]
    hybrid = Qwen3NextConfig(**SIZES | {"num_layers": 4})
    kinds = hybrid.attention_kinds
    assert {*kinds} == {"full", "linear"} and [*hybrid.heads_by_kind] == ["full"]
    assert hybrid.mixed_parts["attention"] == kinds and {kind.attention for kind in layer_kinds(hybrid)} == {"full"}
    for weight, kind in (("k", "full"), ("linear_o", "linear")):
        assert hybrid.layers_of(weight) == tuple(number for number, own in enumerate(kinds) if own == kind)
    assert [*hybrid.layers_of("attn_norm")] == [*range(hybrid.num_layers)]
