"""Which axis of a parameter FSDP splits."""

import jax
import pytest
from haliax import Axis, NamedArray
from jax.sharding import PartitionSpec as P

from lockstep.errors import ConfigError
from lockstep.models.hf.names import skeleton
from lockstep.models.presets import PRESETS
from lockstep.placement.parameter_spec import ParameterSpec, parameter_spec

LAYER = Axis("layer", 80)
EMBED, MLP = Axis("embed", 8192), Axis("mlp", 28672)
OUT = (LAYER, Axis("kv_head", 8), Axis("q_heads_per_group", 8), Axis("head_size", 128), EMBED)


def mesh(dp: int = 1, fsdp: int = 1, tp: int = 1) -> dict[str, int]:
    return {"dp": dp, "fsdp": fsdp, "tp": tp}


def test_embed_is_split_where_its_pieces_fill_a_tile() -> None:
    assert parameter_spec((LAYER, MLP, EMBED), mesh(fsdp=64)) == ParameterSpec(spec=P(None, None, "fsdp"))
    assert parameter_spec((LAYER, EMBED, MLP), mesh(fsdp=128)) == ParameterSpec(spec=P(None, "fsdp", None))


def test_another_axis_is_split_where_pieces_of_embed_would_be_thin() -> None:
    assert parameter_spec((LAYER, MLP, EMBED), mesh(fsdp=128)) == ParameterSpec(spec=P(None, "fsdp", None))
    vocab = Axis("vocab", 128256)
    assert parameter_spec((vocab, EMBED), mesh(fsdp=128)) == ParameterSpec(spec=P("fsdp", None))
    # Rows of a tile are fewer than its columns.
    narrow = (LAYER, Axis("embed", 1024), MLP)
    assert parameter_spec(narrow, mesh(fsdp=128)) == ParameterSpec(spec=P(None, None, "fsdp"))


def test_an_axis_that_tensor_parallelism_splits_is_split_again_inside_its_part() -> None:
    chosen = parameter_spec((LAYER, MLP, EMBED), mesh(fsdp=128, tp=2))
    assert chosen == ParameterSpec(spec=P(None, ("tp", "fsdp"), None))


def test_pieces_that_no_axis_can_make_wide_enough_are_named() -> None:
    assert parameter_spec(OUT, mesh(fsdp=128)) == ParameterSpec(
        spec=P(None, "tp", None, None, "fsdp"), thin="embed", piece=64
    )
    assert parameter_spec(OUT, mesh(fsdp=64)).thin is None


def test_a_vector_stays_whole_rather_than_in_thin_pieces() -> None:
    assert parameter_spec((LAYER, EMBED), mesh(fsdp=128)).spec == P(None, None)
    assert parameter_spec((LAYER, EMBED), mesh(fsdp=64)).spec == P(None, "fsdp")


def test_one_device_splits_nothing_thinly() -> None:
    tiny = (Axis("mlp", 48), Axis("embed", 32))
    assert parameter_spec(tiny, mesh()) == ParameterSpec(spec=P("tp", "fsdp"))


@pytest.mark.parametrize(("model", "fsdp"), [("llama-3-8b", 32), ("qwen2.5-3b", 16)])
def test_no_parameter_of_a_shipped_configuration_is_in_thin_pieces(model: str, fsdp: int) -> None:
    preset = PRESETS[model]
    leaves = jax.tree.leaves(
        skeleton(preset.vocab_size, preset.config), is_leaf=lambda leaf: isinstance(leaf, NamedArray)
    )
    for leaf in leaves:
        assert parameter_spec(leaf.axes, mesh(fsdp=fsdp)).thin is None, leaf.axes


def test_an_axis_that_the_mesh_does_not_divide_is_named() -> None:
    with pytest.raises(ConfigError, match=r"parameter w: its axis 'embed' has size 8192.*'fsdp' of size 3 does not"):
        parameter_spec((EMBED, MLP), mesh(fsdp=3), "w")
    with pytest.raises(ConfigError, match=r"parameter w: its axis 'mlp' has size 28672.*'tp' of size 5 does not"):
        parameter_spec((EMBED, MLP), mesh(tp=5), "w")


def test_what_has_no_embed_is_split_by_tensor_parallelism_alone() -> None:
    bias = (LAYER, Axis("kv_head", 8), Axis("head_size", 128))
    assert parameter_spec(bias, mesh(fsdp=8, tp=2)).spec == P(None, "tp", None)
