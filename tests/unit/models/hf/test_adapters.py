"""Rows of a merged checkpoint, read from the base and the adapters."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.engine.decoder.forward import exact_merges
from lockstep.hosts import Hosts, MemoryClient
from lockstep.models import TENSOR_DIMS, LoraConfig, load_hf, merged_rows, read_decoder
from lockstep.models.hf.adapters import stored_factors
from lockstep.models.hf.saved_tensor import saved_tensors
from lockstep.models.lora import merge_adapters, weight_of
from lockstep.placement import make_decode_mesh
from lockstep.placement.lazy_weight import sources
from lockstep.placement.leaf_layout import leaf_layouts
from lockstep.placement.reshard import assembly_function
from tests.adapters import GATE_UP, MLPS, numpy_merged, with_adapters
from tests.golden.variants import VARIANTS
from tests.unit.engine.models import mesh_of

GOLDEN = Path(__file__).parents[3] / "golden"


@pytest.mark.parametrize(
    ("family", "modules"),
    [
        ("qwen3", ("all-linear",)),
        pytest.param("qwen3", ("o_proj",), marks=pytest.mark.slow),
        pytest.param("qwen3_moe_mixed", ("all-linear",), marks=pytest.mark.slow),
        ("qwen3_moe_mixed", ("v_proj", *MLPS.target_modules)),
        ("gpt_oss", GATE_UP.target_modules),
    ],
)
def test_rows_are_those_of_the_merged_weights(family, modules):
    lora = LoraConfig(r=2, alpha=3.0, target_modules=modules)
    base = load_hf(GOLDEN / family, mesh_of("1,1,1"))
    model = with_adapters(base, lora)
    arrays = numpy_merged(model)
    asked = []

    def read_pair(name, place):
        asked.append((name, place))
        return tuple(np.asarray(part.array[place]) for part in (model.pairs[name].a, model.pairs[name].b))

    read = merged_rows(str(GOLDEN / family), "float32", base.config, lora, read_pair)
    merged = model.with_weights({name: array.astype(np.float32) for name, array in arrays.items()})
    for tensor in saved_tensors(merged, "float32", base.Vocab.size):
        array = np.asarray(tensor.parameter.value.array)
        whole = tensor.to_stored(array if tensor.place is None else array[tensor.place])
        for start, stop in tensor.pieces(200):
            inner = len(whole) // tensor.rows
            rows = read(tensor, start, stop)
            assert rows.dtype == np.float32
            np.testing.assert_allclose(
                rows, whole[start * inner : stop * inner], rtol=1e-5, atol=1e-5, err_msg=tensor.name
            )
    assert set(asked) == {(name, place) for name, pair in model.pairs.items() for place in range(len(pair.a.array))}


@pytest.mark.parametrize("name", ["tied_with_own_head", "tied_with_head_alone_no_prefix", "qwen3_moe_fused_no_prefix"])
def test_rows_are_those_of_the_base_as_people_have_it(name, tmp_path):
    VARIANTS[name].write(tmp_path / name)
    base = load_hf(tmp_path / name, mesh_of("1,1,1"))
    read = merged_rows(str(tmp_path / name), "float32", base.config, LoraConfig(target_modules=("q_proj",)), None)
    tensors = [each for each in saved_tensors(base, "float32", base.Vocab.size) if each.parameter.name != "q"]
    assert ("lm_head.weight" in {name for tensor in tensors for name in tensor.names}) == (base.lm_head is not None)
    for tensor in tensors:
        array = np.asarray(tensor.parameter.value.array)
        whole = tensor.to_stored(array if tensor.place is None else array[tensor.place])
        np.testing.assert_array_equal(read(tensor, 0, tensor.rows), whole, err_msg=str(tensor.names))


@pytest.mark.nightly  # in make slow: the tests around it
@pytest.mark.optimized
@pytest.mark.parametrize(
    ("family", "modules", "dtype"),
    [
        ("qwen3", ("q_proj", "o_proj"), "float32"),
        ("qwen3_moe_mixed", ("up_proj",), "bfloat16"),
    ],
)
def test_exact_weights_are_exported_with_the_bits_that_are_sampled(family, modules, dtype):
    """By `save_hf`, and by `lockstep export`, in pieces; the adapters are in float32."""
    lora = LoraConfig(r=2, alpha=3.0, target_modules=modules)
    base = load_hf(GOLDEN / family, mesh_of("1,2,2"), dtype=jnp.dtype(dtype))
    base = dataclasses.replace(base, config=dataclasses.replace(base.config, numerics="exact"))
    model = with_adapters(base, lora)
    sampled = {name: np.asarray(leaf) for name, leaf in _sampled(model).items()}
    saved = merge_adapters(model, Hosts(MemoryClient.hub(1)[0]), "float32")
    assert {name: weight.dtype for name, weight in sampled.items()} == dict.fromkeys(sampled, dtype)

    def read_pair(name, place):
        return tuple(np.asarray(part.array[place]) for part in (model.pairs[name].a, model.pairs[name].b))

    read = merged_rows(str(GOLDEN / family), dtype, base.config, lora, read_pair)
    seen = set()
    for tensor in saved_tensors(saved, "float32", base.Vocab.size):
        if (name := tensor.parameter.name) in sampled:
            seen.add(name)
            array = np.asarray(tensor.parameter.value.array)
            np.testing.assert_array_equal(array, sampled[name])
            whole = tensor.to_stored(array[tensor.place])
            rows = np.concatenate([read(tensor, *piece) for piece in tensor.pieces(200)])
            np.testing.assert_array_equal(rows, whole)
    assert seen == set(sampled)


def _sampled(model):
    """The weights with adapters, by their names, as the engine makes them."""
    config, weights = read_decoder(model)
    weights = exact_merges(config, weights, weights.embed.dtype)
    decode_mesh = make_decode_mesh(mesh_of("1,2,2"), 2)
    layouts = leaf_layouts(weights, decode_mesh, TENSOR_DIMS)
    make, _ = assembly_function(weights, layouts, weights.embed.dtype, gather=True)
    with jax.set_mesh(decode_mesh.mesh):
        layers = jax.jit(make)(sources(weights)).layers
    return {weight_of(name): getattr(layers, weight_of(name)) for name in model.pairs}


def test_the_base_is_rounded_as_in_training():
    lora = LoraConfig(target_modules=("q_proj",))
    base = load_hf(GOLDEN / "llama3", mesh_of("1,1,1"))
    (tensor,) = [one for one in saved_tensors(base, "float32", base.Vocab.size) if one.name == "model.norm.weight"]
    rows = merged_rows(str(GOLDEN / "llama3"), "bfloat16", base.config, lora, lambda *_: ())(tensor, 0, tensor.rows)
    np.testing.assert_array_equal(rows, np.asarray(base.final_norm.array).astype("bfloat16").astype(np.float32))


def test_factors_are_stored_as_peft_has_them():
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 3, 5, 4)), rng.standard_normal((4, 7))
    low, high = stored_factors(a, b)
    assert low.shape == (4, 30) and high.shape == (7, 4)
    np.testing.assert_allclose(high @ low, (a.reshape(30, 4) @ b).T)
