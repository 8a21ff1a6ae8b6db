"""What is decided about a model for each layout, once."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from lockstep.engine import EngineConfig
from lockstep.engine.config import Layout
from lockstep.engine.decode_model import DecodeModels, check_layout, signature_of
from lockstep.errors import ConfigError
from lockstep.models import LlamaConfig, Variant, read_decoder, view
from lockstep.placement import make_decode_mesh, place, sources, tensor_sizes
from tests import tiny
from tests.unit.engine.models import FAMILIES, LLAMA, mesh_of, model_on


def models_on(mesh: str, config: LlamaConfig = LLAMA, **options: object) -> DecodeModels:
    return DecodeModels(EngineConfig(**options), *read_decoder(model_on(mesh, config)), mesh_of(mesh))


@pytest.mark.parametrize(
    ("mesh", "layout", "dtype", "moves", "copies"),
    [
        ("1,2,2", {"tensor": 2}, None, True, True),
        ("1,2,2", "training", None, False, False),
        ("1,2,2", "training", "bfloat16", False, True),
        ("1,1,1", {"tensor": 1}, None, False, False),
        ("1,1,1", {"tensor": 1}, "bfloat16", False, True),
    ],
)
def test_whether_weights_move_and_are_copied(
    mesh: str, layout: Layout, dtype: str | None, moves: bool, copies: bool
) -> None:
    model = models_on(mesh, dtype=dtype)[layout]
    assert (model.moves, model.copies, model.copied_bytes > 0) == (moves, copies, copies)
    assert model.dtype == jnp.dtype(dtype or "float32") == model.kv_dtype
    assert bool(model.gathered) == (layout == "training"), "FSDP splits weights that decoding wants whole"


def test_lazy_weights_are_copied_even_where_nothing_moves() -> None:
    config, weights = read_decoder(model_on("1,1,1"))
    turned = jnp.swapaxes(weights.layers.up, 1, 2)
    layers = dataclasses.replace(weights.layers, up=view(turned, "layer mlp embed -> layer embed mlp"))
    lazy = dataclasses.replace(weights, layers=layers)
    model = DecodeModels(EngineConfig(), config, lazy, mesh_of("1,1,1"))[{"tensor": 1}]
    assert model.lazy and not model.moves and not model.casts and model.copies


def test_experts_alone_have_kv_heads_replicated_without_being_asked() -> None:
    layouts = {name: models_on("1,4,1", FAMILIES[name]).layouts for name in ("llama", "experts")}
    assert {"tensor": 2} in layouts["llama"] and {"tensor": 4} not in layouts["llama"]
    assert {"tensor": 4} in layouts["experts"]
    # The trainer has halves of kv heads on some devices: there is nothing to copy whole ones from.
    config, weights = read_decoder(model_on("1,4,1", FAMILIES["experts"]))
    cut = NamedSharding(mesh_of("1,4,1"), PartitionSpec(None, None, None, "fsdp"))
    weights = dataclasses.replace(
        weights, layers=dataclasses.replace(weights.layers, k=place(np.asarray(weights.layers.k), cut))
    )
    assert {"tensor": 4} not in DecodeModels(EngineConfig(), config, weights, mesh_of("1,4,1")).layouts


def test_positions_are_split_over_devices_that_would_have_the_same_kv_head() -> None:
    models = models_on("1,2,2")
    assert {"tensor": 4, "context": 2} in models.layouts
    split, repeated = models[{"tensor": 4, "context": 2}], models[{"tensor": 4}]
    assert 2 * split.kv_bytes == repeated.kv_bytes and split.leaves == repeated.leaves
    assert (split.heads.group, split.heads.at_own_positions.group) == (1, 2)


@pytest.mark.parametrize(
    ("layout", "options", "config", "words"),
    [
        ({"tensor": 2, "context": 2}, {}, {}, "over 2 devices, and each kv head is on 1. Set context to"),
        ({"tensor": 4, "context": 4}, {}, {}, "over 4 devices, and each kv head is on 2."),
        ({"tensor": 4, "context": 3}, {}, {}, r"those that split positions are a part .* to one of \[1, 2, 4\]"),
        ({"tensor": 4, "context": 2}, {"page_size": 5}, {}, "splits page_size = 5, which 2 does not divide"),
        ({"tensor": 4, "context": 2}, {}, {"variant": Variant(sliding_window=7)}, "splits a sliding window = 7"),
        ({"tensor": 4, "context": 2}, {}, {"numerics": "exact"}, "numerics is exact and context in layout sums"),
    ],
)
def test_what_cannot_split_positions(layout: Layout, options: Any, config: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        models_on("1,2,2", dataclasses.replace(LLAMA, **config), **options)[layout]


def test_both_ways_to_split_experts_are_compared_unless_the_layout_names_one() -> None:
    model = FAMILIES["experts"]  # 6 experts of width 12
    assert models_on("1,2,2", model, layout={"tensor": 2}).layouts == [
        {"tensor": 2, "expert": 2},
        {"tensor": 2, "expert": 1},
    ]
    for layout in ({"tensor": 2, "expert": 1}, {"expert": 2}, {"tensor": 4}, {"tensor": 1}, "training"):
        assert models_on("1,2,2", model, layout=layout).layouts == [layout]
    ways = models_on("1,2,2", model)
    assert all(each in ways.layouts for each in ({"tensor": 2, "expert": 2}, {"tensor": 2, "expert": 1}))
    whole, parts = ways[{"expert": 2}], ways[{"tensor": 2, "expert": 1}]
    assert (whole.layouts.layers.expert_up.tensor_dim, parts.layouts.layers.expert_up.tensor_dim) == (1, 3)
    assert (whole.whole_experts, parts.whole_experts, ways[{"tensor": 4}].whole_experts) == (True, False, False)
    with pytest.raises(ConfigError, match=r"\{tensor: 4, expert: 4\} splits experts.num_experts = 6.*, without expert"):
        ways[{"tensor": 4, "expert": 4}]
    with pytest.raises(ConfigError, match=r"layout is \{tensor: 2, expert: 1\} and the model has no experts"):
        models_on("1,2,2")[{"tensor": 2, "expert": 1}]


def test_a_layout_is_made_once_and_keeps_no_array() -> None:
    models = models_on("1,2,2")
    model = models[{"tensor": 2}]
    assert models[{"tensor": 2}] is model and models["training"] is not model
    assert not any(isinstance(leaf, jax.Array | np.ndarray) for leaf in jax.tree.leaves(model.weights))
    replicated = models_on("1,2,2")[{"tensor": 4}]
    assert replicated.config.num_kv_heads == 4 and replicated.lazy
    assert all(isinstance(part, jax.ShapeDtypeStruct) for part in jax.tree.leaves(sources(replicated.weights)))


def test_the_signature_is_that_of_a_later_state_and_of_no_other_model() -> None:
    config, weights = read_decoder(model_on("1,2,2"))
    later = jax.tree.map(lambda leaf: leaf + 1, weights)
    assert signature_of(config, later) == signature_of(config, weights)
    assert signature_of(*read_decoder(model_on("2,2,1"))) != signature_of(config, weights)
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), weights)
    assert signature_of(config, half) != signature_of(config, weights)


@pytest.mark.parametrize("shape", ["1,4,1", "1,2,2", "2,2,1", "1,1,1"])
@pytest.mark.parametrize(("kv_heads", "mlp"), [(1, 24), (2, 24), (4, 24), (4, 6), (3, 24)])
def test_a_refused_layout_names_exactly_the_sizes_that_work(shape: str, kv_heads: int, mlp: int) -> None:
    model = dataclasses.replace(LLAMA, num_heads=12, num_kv_heads=kv_heads, intermediate_dim=mlp)
    works, said = [], set()
    for tensor in tensor_sizes(mesh_of(shape)):
        try:
            check_layout(model, {"tensor": tensor}, make_decode_mesh(mesh_of(shape), tensor))
            works.append(tensor)
        except ConfigError as error:
            assert f"layout {{tensor: {tensor}}} splits" in str(error)
            said.add(str(error).split("Set tensor to one of ")[1])
    assert works and said <= {f"{works}."}


@pytest.mark.parametrize(
    ("vocab", "heads", "kv_heads", "mlp", "works"),
    [
        (64, 4, 2, 48, (1, 2, 4)),
        (97, 4, 2, 48, (1,)),
        (66, 4, 2, 48, (1, 2)),
        (64, 3, 1, 48, (1,)),
        (64, 12, 3, 48, (1,)),
        (64, 4, 2, 50, (1, 2)),
        (64, 4, 2, 49, (1,)),
    ],
)
def test_exact_numerics_have_the_layouts_that_docs_name_and_refuse_others(
    vocab: int, heads: int, kv_heads: int, mlp: int, works: tuple[int, ...]
) -> None:
    """docs/exact.md: N divides vocabulary, query heads and MLP, and divides the KV heads or is a multiple of them."""
    config = dataclasses.replace(
        tiny.CONFIG, num_heads=heads, num_kv_heads=kv_heads, head_dim=8, intermediate_dim=mlp, numerics="exact"
    )
    mesh = mesh_of("1,4,1")
    models = DecodeModels(EngineConfig(), config, tiny.placed_weights(mesh, config=config, vocab=vocab), mesh)
    assert models["training"].config == config
    for tensor in (1, 2, 4):
        named = vocab % tensor == heads % tensor == mlp % tensor == 0 and 0 in (kv_heads % tensor, tensor % kv_heads)
        assert named == (tensor in works)
        if named:
            assert models[{"tensor": tensor}].config.numerics == "exact"
        else:
            with pytest.raises(ConfigError, match=rf"layout {{tensor: {tensor}}} splits .* Set tensor to "):
                check_layout(config, {"tensor": tensor}, make_decode_mesh(mesh, tensor))
                models[{"tensor": tensor}]
