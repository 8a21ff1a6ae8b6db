from lockstep.models.llama_attention import LlamaAttention, MixedAttention, WideAttention
from lockstep.models.trainable import skeleton
from tests.unit.engine.models import LLAMA, VOCAB
from tests.unit.models.attention.test_by_heads import GEMMA4


def sizes_of(weight):
    return {axis.name: axis.size for axis in weight.axes if axis.name != "embed"}


def test_each_kind_of_attention_has_its_layers_and_its_heads():
    mixed = skeleton(VOCAB, GEMMA4).layers.stacked.attention
    assert isinstance(mixed, MixedAttention) and mixed.linear is None
    assert sizes_of(mixed.full.q) == {"layer": 2, "kv_head": 4, "q_heads_per_group": 2, "head_size": 8}
    assert isinstance(mixed.wide, WideAttention) and mixed.wide.q is mixed.wide.wide_v is mixed.full.sinks is None
    assert sizes_of(mixed.wide.wide_q) == {"layer": 1, "kv_head": 2, "q_heads_per_group": 4, "head_size": 12}
    assert [part.config for part in (mixed.full, mixed.wide)] == [*GEMMA4.heads_by_kind.values()]
    alone = skeleton(VOCAB, LLAMA).layers.stacked.attention
    assert isinstance(alone, LlamaAttention) and alone.config is LLAMA and alone.v is not None and alone.q_norm is None
