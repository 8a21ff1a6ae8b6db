"""What is decided about a model for each layout, once."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.engine import EngineConfig
from lockstep.engine.config import Layout
from lockstep.engine.decode_model import DecodeModels, check_layout, signature_of
from lockstep.errors import ConfigError
from lockstep.models import LlamaConfig, read_decoder, view
from lockstep.placement import make_decode_mesh, sources, tensor_sizes
from tests.unit.engine.models import LLAMA, mesh_of, model_on


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
    for tensor in tensor_sizes(mesh_of(shape).shape):
        try:
            check_layout(model, make_decode_mesh(mesh_of(shape), tensor))
            works.append(tensor)
        except ConfigError as error:
            assert f"layout {{tensor: {tensor}}} splits" in str(error)
            said.add(str(error).split("Set tensor to one of ")[1])
    assert works and said <= {f"{works}."}
