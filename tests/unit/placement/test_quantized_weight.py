"""Weights in 8 bits: how far they are from the weights, the same on any mesh, and the tokens of the rounded model."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

import lockstep
from lockstep.engine import Engine, EngineConfig
from lockstep.models import TENSOR_DIMS, quantized_dims, read_decoder
from lockstep.placement import place
from lockstep.placement.decode_mesh import make_decode_mesh
from lockstep.placement.device import FP8
from lockstep.placement.lazy_weight import sources, view
from lockstep.placement.leaf_layout import LeafLayout, leaf_layouts, partition_specs
from lockstep.placement.quantized_weight import INT8, QuantizedLayout, QuantizedWeight, matmul, quantized_layouts
from lockstep.placement.reshard import assembly_function, reshard_function
from lockstep.types import Drafts
from tests import tiny
from tests.oracle import INPUTS, assert_same_logprobs, assert_same_tokens, oracle_completions, rounded
from tests.unit.engine.decoder.test_decode import every_launch_verifies
from tests.unit.engine.models import FAMILIES, mesh_of, mixed_requests, model_on
from tests.unit.placement.layouts import check_shards, decode_mesh_of, weights_on

SLOW = pytest.mark.slow


def quantize(block: np.ndarray, dtype: jnp.dtype) -> QuantizedWeight:
    """On one device, the first axis being that of the inputs."""
    layout = LeafLayout(decode_mesh_of("1,4,1", 1), ((),) * block.ndim, None)
    return QuantizedLayout(layout, (-block.ndim,), dtype).quantize(jnp.asarray(block))


def widened(weight: QuantizedWeight) -> np.ndarray:
    values = np.asarray(weight.values)
    return np.asarray(values.view(FP8) if values.dtype == np.uint8 else values).astype(np.float64)


@given(exponents=st.lists(st.integers(-30, 35), min_size=1, max_size=6), seed=st.integers(0, 99))
@settings(max_examples=25)
def test_a_number_is_off_by_no_more_than_its_channel_allows(exponents: list[int], seed: int) -> None:
    """int8: half a step of the channel; fp8: a sixteenth of the number, or half of the type's smallest step."""
    exact = np.random.default_rng(seed).standard_normal((33, len(exponents))).astype(np.float32)
    exact *= np.float32(10.0) ** np.array(exponents, np.float32)
    exact[:, 0] *= seed != 0  # a channel of zeros
    for dtype, largest in ((INT8, 127), (FP8, 448)):
        found = quantize(exact, dtype)
        scale = np.asarray(found.scale, np.float64)
        np.testing.assert_allclose(scale, np.maximum(np.abs(exact).max(0) / largest, 2.0**-126), rtol=1e-6)
        gap = np.abs(widened(found) * scale - exact)
        allowed = 0.5 * scale if dtype == INT8 else np.maximum(np.abs(exact) / 16, scale * 2.0**-10)
        assert np.all(gap <= 1.0001 * allowed)
        assert np.abs(widened(found)).max() <= largest


@pytest.mark.parametrize("dtype", [INT8, FP8], ids=str)
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_not_hidden(dtype: jnp.dtype, wrong: float) -> None:
    block = np.ones((4, 3), np.float32)
    block[2, 1] = wrong
    found = np.asarray(matmul(jnp.ones((1, 4)), quantize(block, dtype)))[0]
    assert not np.isfinite(found[1])
    np.testing.assert_allclose(found[[0, 2]], 4.0, rtol=1e-6)


@pytest.mark.parametrize("dtype", [INT8, FP8], ids=str)
def test_the_product_is_that_of_the_rounded_weight(dtype: jnp.dtype) -> None:
    rng = np.random.default_rng(0)
    weight, x = rng.standard_normal((2, 3, 4, 5)).astype(np.float32), rng.standard_normal((7, 24)).astype(np.float32)
    layout = LeafLayout(decode_mesh_of("1,4,1", 1), ((),) * 4, None)
    found = QuantizedLayout(layout, (-4, -3, -2), dtype).quantize(jnp.asarray(weight))
    assert found.values.shape == weight.shape and found.values.dtype.itemsize == 1 and found.scale.shape == (5,)
    want = x @ (widened(found) * np.asarray(found.scale)).reshape(24, 5)
    np.testing.assert_allclose(matmul(jnp.asarray(x), found, axes=-1), want, rtol=1e-4, atol=1e-4)
    half = matmul(jnp.asarray(x, jnp.bfloat16), found, axes=-1)
    assert half.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(half, np.float32), want, rtol=0.02, atol=0.1)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_a_whole_weight_is_one_plain_product(dtype: Any) -> None:
    """The default traces what it would without 8 bits."""
    x, weight = jnp.ones((7, 24), dtype), jnp.ones((2, 3, 4, 5), dtype)
    found = jax.make_jaxpr(lambda x, w: matmul(x, w, axes=-1))(x, weight)
    assert str(found) == str(jax.make_jaxpr(lambda x, w: x @ w.reshape(24, 5))(x, weight))
    found = jax.make_jaxpr(matmul)(x[:, :2], weight)
    assert str(found) == str(jax.make_jaxpr(lambda x, w: x @ w.reshape(2, 60))(x[:, :2], weight))


LAYER_SPLIT = {"q": PartitionSpec("fsdp", None, "tp"), "down": PartitionSpec("fsdp")}


@pytest.mark.parametrize(
    ("shape", "tensor", "dtype", "gather", "lazy", "specs"),
    [
        ("1,2,2", 2, INT8, True, False, {}),
        pytest.param("1,2,2", 4, FP8, True, True, {}, marks=SLOW),
        ("1,4,1", 1, INT8, False, False, {}),
        ("1,2,2", 2, INT8, True, False, LAYER_SPLIT),
        pytest.param("1,4,1", 4, FP8, True, False, {}, marks=SLOW),
        pytest.param("1,4,1", 1, FP8, False, True, {}, marks=SLOW),
        pytest.param("2,2,1", 2, INT8, True, True, LAYER_SPLIT, marks=SLOW),
    ],
)
def test_values_and_scales_are_the_same_on_any_mesh(
    shape: str, tensor: int, dtype: jnp.dtype, gather: bool, lazy: bool, specs: dict[str, Any]
) -> None:
    host, placed, mesh = weights_on(shape, 8, **specs)
    if lazy:
        turned = place(np.swapaxes(host.layers.up, 1, 2), NamedSharding(mesh, PartitionSpec(None, "tp", "fsdp")))
        up = view(turned, "layer mlp embed -> layer embed mlp")
        placed = dataclasses.replace(placed, layers=dataclasses.replace(placed.layers, up=up))
    decode_mesh = make_decode_mesh(mesh, tensor)
    layouts = quantized_layouts(leaf_layouts(placed, decode_mesh, TENSOR_DIMS), dtype, quantized_dims)
    if lazy:
        function, target = assembly_function(placed, layouts, np.float32, gather=gather)
    else:
        function, target = reshard_function(layouts, np.float32, gather=gather)
    shardings = jax.tree.map(lambda spec: NamedSharding(decode_mesh.mesh, spec), partition_specs(target))
    with jax.set_mesh(decode_mesh.mesh):
        made = jax.jit(function, out_shardings=shardings)(sources(placed) if lazy else placed)
    want = rounded(host, dtype)
    for name, dims in INPUTS.items():
        found, layout = getattr(made.layers, name), getattr(target.layers, name)
        if found is None:
            continue  # it has no experts
        assert found.values.dtype.itemsize == 1
        exact = getattr(host.layers, name)
        scale = np.maximum(np.abs(exact).max(dims) / {INT8: 127, FP8: 448}[dtype], 2.0**-126).astype(np.float32)
        np.testing.assert_allclose(np.asarray(found.scale), scale, rtol=2e-7, err_msg=name)
        back = (widened(found) * np.expand_dims(np.asarray(found.scale, np.float64), dims)).astype(np.float32)
        np.testing.assert_allclose(back, getattr(want.layers, name), rtol=1e-6, err_msg=name)
        if gather:
            check_shards(found.values, np.asarray(found.values), layout.values)
            check_shards(found.scale, np.asarray(found.scale), layout.scale)
        assert layout.bytes(exact.shape) == exact.size + 4 * scale.size
    np.testing.assert_array_equal(np.asarray(made.embed), host.embed)
    np.testing.assert_array_equal(np.asarray(made.layers.attn_norm), host.layers.attn_norm)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "mesh", "layout", "weight_dtype", "options"),
    [
        ("qwen2", "1,2,2", {"tensor": 2}, "int8", {"page_size": 8, "max_prefill_size": 16}),
        pytest.param("llama", "1,1,1", "auto", "int8", {}, marks=pytest.mark.nightly),
        pytest.param("gemma", "1,4,1", "training", "fp8", {"page_size": 16}, marks=pytest.mark.nightly),
        # Replicated kv heads.
        pytest.param("llama", "1,4,1", {"tensor": 4}, "fp8", {"max_seqs": 3}, marks=pytest.mark.nightly),
        pytest.param(
            "experts", "1,2,2", {"tensor": 2}, "int8", {"page_size": 8}, marks=pytest.mark.nightly
        ),  # whole experts
        # Gathered at each step.
        pytest.param("experts", "1,4,1", "training", "fp8", {"max_seqs": 3}, marks=pytest.mark.nightly),
        pytest.param("apertus", "2,2,1", {"tensor": 1}, "int8", {"max_steps_per_launch": 5}, marks=pytest.mark.nightly),
    ],
)
def test_tokens_are_those_of_the_rounded_model(
    family: str, mesh: str, layout: Any, weight_dtype: str, options: dict[str, Any]
) -> None:
    model, requests = model_on(mesh, FAMILIES[family]), mixed_requests()
    engine = Engine(EngineConfig(layout=layout, weight_dtype=weight_dtype, **options), mesh_of(mesh))
    got = engine.generate(model, requests)
    config, weights = read_decoder(model)
    local = jax.tree.map(np.asarray, weights)
    want = oracle_completions((config, rounded(local, engine.config.quantized_dtype)), requests)
    ties, worst = assert_same_tokens(want, got), assert_same_logprobs(want, got, atol=5e-5)

    # The audit computes with the weights themselves: what rounding costs.
    gap = lockstep.audit(model, requests, got).logprob_gap
    print(
        f"{ties} ties; log-probabilities differ by {worst:.1e} from the rounded model's, by {gap:.3f} from the model's"
    )
    assert 1e-3 < gap < 2.0
    assert f"decode weights in {'int8' if weight_dtype == 'int8' else 'float8_e4m3fn'}" in engine.sizing.describe()
    # On CPU the compiler counts a pointer of 8 bytes for each array that a program returns: of those in 8 bits two.
    arrays = len(jax.tree.leaves(local)) + sum(getattr(local.layers, name) is not None for name in INPUTS)
    assert engine.sizing.compiled.weights == engine.sizing.predicted.weights + 8 * arrays


@SLOW
def test_drafts_are_verified_with_the_rounded_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    model, requests = model_on("1,1,1"), mixed_requests()
    engine = Engine(EngineConfig(weight_dtype="int8"), mesh_of("1,1,1"))
    plain = engine.generate(model, requests)
    answers: dict[int, list[tuple[int, ...]]] = {}
    for one in plain:
        answers.setdefault(one.prompt_id, []).append(one.tokens)
    drafted = [dataclasses.replace(r, drafts=Drafts(answers=tuple(answers[r.prompt_id]))) for r in requests]
    with every_launch_verifies(monkeypatch):
        verified = engine.generate(model, drafted)
    assert any(name.startswith("verify_") for name in engine.ledger.launches)
    assert [c.tokens for c in plain] == [c.tokens for c in verified]


@SLOW
def test_programs_differ_from_those_of_whole_weights() -> None:
    """Hosts agree on the digests, so that none decodes with other weights than its peers."""
    weights = tiny.placed_weights(mesh_of("1,1,1"))
    digests = []
    for weight_dtype in ("auto", "int8", "fp8"):
        engine = Engine(EngineConfig(weight_dtype=weight_dtype), mesh_of("1,1,1"))
        digests.append(engine.prepare((tiny.CONFIG, weights), tiny.requests()))
    for name in ("reshard: StableHLO", "prefill: StableHLO", "decode: StableHLO"):
        assert len({each.get(name) for each in digests}) == 3, name
