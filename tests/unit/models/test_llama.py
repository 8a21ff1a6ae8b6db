import dataclasses
import functools
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from lockstep.errors import ConfigError
from lockstep.models import LlamaConfig, LlamaLMHeadModel, Qwen2Config, Qwen3Config, RotaryConfig, Variant
from lockstep.models.named_block import look_up
from lockstep.models.trainable import skeleton
from lockstep.placement import COMPUTE_AXES, PARAMETER_AXES, make_mesh, place

GOLDEN = Path(__file__).parents[2] / "golden"
Vocab = hax.Axis("vocab", 32)
SIZES: dict[str, Any] = {
    "max_seq_len": 16,
    "hidden_dim": 24,
    "intermediate_dim": 40,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.3,
}
CONFIG = LlamaConfig(**SIZES)


def mesh_of(shape: str) -> Mesh:
    return make_mesh(shape, jax.devices()[:4])


@functools.cache
def build(config: LlamaConfig) -> LlamaLMHeadModel:
    """As from `LlamaLMHeadModel.init`, but without the seconds that its random draws take to compile."""
    draw = np.random.default_rng(0)
    return jax.tree.map(
        lambda leaf: jnp.asarray(0.3 * draw.standard_normal(leaf.shape, np.float32)), skeleton(Vocab.size, config)
    )


def place_on(mesh: Mesh, model: LlamaLMHeadModel) -> LlamaLMHeadModel:
    with jax.set_mesh(mesh):
        return hax.shard(model, PARAMETER_AXES)


def tokens(batch: int = 4, positions: int = 12) -> hax.NamedArray:
    ids = np.random.default_rng(0).integers(0, Vocab.size, (batch, positions)).astype(np.int32)
    return hax.named(ids, ("batch", "position"))


forward = hax.named_jit(lambda model, ids: model(ids))
"""Compiled once for each configuration and shape, whichever test asks."""


def logits_of(model: LlamaLMHeadModel, ids: hax.NamedArray) -> np.ndarray:
    return np.asarray(forward(model, ids).array)


def loss_of(model: LlamaLMHeadModel, ids: hax.NamedArray, mapping: Any = None) -> jax.Array:
    with hax.axis_mapping(mapping or {}):
        logits = model(ids).astype(jnp.float32)
        targets = hax.nn.one_hot(hax.roll(ids, -1, "position"), Vocab)
        return hax.nn.cross_entropy_loss(logits, Vocab, targets).scalar()


def test_axes_and_dtype_of_the_logits() -> None:
    logits = forward(build(CONFIG), tokens())
    assert [(a.name, a.size) for a in logits.axes] == [("batch", 4), ("position", 12), ("vocab", 32)]
    assert logits.dtype == jnp.float32


def test_computes_in_the_dtype_of_the_parameters_and_keeps_logits_in_float32() -> None:
    model = build(CONFIG)
    half = jax.tree.map(lambda x: jnp.asarray(np.asarray(x).astype(jnp.bfloat16)), model)
    activations = hax.named_jit(lambda m, i: m.activations(i))(half, tokens())
    assert activations.dtype == jnp.bfloat16
    logits = forward(half, tokens())
    assert logits.dtype == jnp.float32
    # Products of bfloat16 numbers, summed in float32: nothing is rounded to bfloat16 in between.
    exact = np.asarray(activations.array, np.float64) @ np.asarray(half.lm_head.array, np.float64)
    np.testing.assert_allclose(logits.array, exact, atol=1e-5)
    full = logits_of(model, tokens())
    assert np.abs(logits.array - full).max() < 0.1 * np.abs(full).max()


@pytest.mark.parametrize("config", [CONFIG, Qwen2Config(**SIZES), Qwen3Config(**SIZES)], ids=lambda c: type(c).__name__)
def test_a_token_changes_nothing_before_it(config: LlamaConfig) -> None:
    model, ids = build(config), tokens()
    other = np.array(ids.array)
    other[:, 7] = (other[:, 7] + 1) % Vocab.size
    changed = hax.named(other, ids.axes)
    before, after = logits_of(model, ids), logits_of(model, changed)
    np.testing.assert_array_equal(before[:, :7], after[:, :7])
    assert np.abs(before[:, 7:] - after[:, 7:]).max(axis=-1).min() > 0


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(Variant(sliding_window=3, attention_soft_cap=2.0), marks=pytest.mark.slow),
        Variant(
            sliding_window=3,
            layer_types=("sliding_attention", "full_attention"),
            sliding_rope=RotaryConfig(theta=100.0),
        ),
    ],
    ids=["alike", "layers differ"],
)
def test_packed_documents_are_computed_as_alone(variant: Variant) -> None:
    model = build(dataclasses.replace(CONFIG, variant=variant))
    ids = tokens(batch=2)
    segments = np.array([[1] * 5 + [2] * 4 + [0] * 3, [1] * 12], np.int32)
    packed = hax.named_jit(lambda m, i, s: m(i, s))(model, ids, hax.named(segments, ids.axes)).array
    for row, begin, end in ((0, 0, 5), (0, 5, 9), (1, 0, 12)):
        one = np.zeros((1, 12), np.int32)  # the same shape for all; a token changes nothing before it
        one[0, : end - begin] = np.asarray(ids.array)[row, begin:end]
        alone = logits_of(model, hax.named(one, ("batch", "position")))
        np.testing.assert_allclose(packed[row, begin:end], alone[0, : end - begin], atol=2e-5)
    assert np.abs(packed[0, 5:9] - logits_of(model, ids)[0, 5:9]).max() > 0.1


def test_rows_may_have_several_axes_or_none() -> None:
    model, ids = build(CONFIG), tokens(batch=4)
    many = hax.named(np.asarray(ids.array).reshape(2, 2, 12), ("row", "side", "position"))
    one = hax.named(np.asarray(ids.array)[1], ("position",))
    expected = logits_of(model, ids)
    np.testing.assert_allclose(logits_of(model, many).reshape(expected.shape), expected, atol=1e-5)
    np.testing.assert_allclose(logits_of(model, one), expected[1], atol=1e-5)


def test_the_head_on_the_activations_is_the_logits() -> None:
    for config in (CONFIG, dataclasses.replace(CONFIG, tie_word_embeddings=True)):
        model = build(config)
        assert (model.lm_head is None) == config.tie_word_embeddings
        assert model.lm_head_array() is (model.embed if config.tie_word_embeddings else model.lm_head)
        two_steps = hax.named_jit(lambda m, i: hax.dot(m.activations(i), m.lm_head_array(), axis="embed"))
        np.testing.assert_array_equal(two_steps(model, tokens()).array, logits_of(model, tokens()))


def test_more_positions_than_max_seq_len_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"the input has 17 positions; max_seq_len is 16\..*raise model\.max_seq_len"):
        logits_of(build(CONFIG), tokens(positions=17))


@pytest.mark.slow
def test_init_draws_the_same_weights_on_any_mesh() -> None:
    def init(key: jax.Array) -> LlamaLMHeadModel:
        return LlamaLMHeadModel.init(Vocab, dataclasses.replace(CONFIG, num_layers=3), key=key)

    one = hax.named_jit(init)(jax.random.key(0))
    with jax.set_mesh(mesh_of("1,2,2")):
        many = hax.named_jit(init, axis_resources=PARAMETER_AXES)(jax.random.key(0))
    for ours, theirs in zip(jax.tree.leaves(many), jax.tree.leaves(one), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)
    q = many.layers.stacked.attention.q.array
    assert q.sharding.spec == jax.P(None, "fsdp", "tp", None, None)
    assert np.std(q) == pytest.approx(CONFIG.initializer_range, rel=0.1)
    assert len({float(row.std()) for row in np.asarray(q)}) == 3
    np.testing.assert_array_equal(many.final_norm.array, 1)


@pytest.mark.parametrize("shape", ["1,2,2", pytest.param("2,2,1", marks=pytest.mark.slow)])
def test_logits_are_the_same_on_a_mesh(shape: str) -> None:
    mesh, reference = mesh_of(shape), build(CONFIG)
    model = place_on(mesh, reference)
    with jax.set_mesh(mesh):
        logits = hax.named_jit(lambda m, i: m(i), axis_resources=COMPUTE_AXES)(model, tokens())
    expected = logits_of(reference, tokens())
    assert np.abs(np.asarray(logits.array) - expected).max() < 1e-5 * np.abs(expected).max()
    assert logits.array.sharding.spec == jax.P(("dp", "fsdp"), None, "tp")


def test_a_table_split_over_two_axes_is_looked_up_inside_a_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row once, and its gradient in its place; that XLA would abort is tested with its compiler for TPUs."""
    monkeypatch.setenv("MEGASCALE_NUM_SLICES", "2")
    mesh, ids = make_mesh("1,1,2"), tokens(8)
    draw = np.random.default_rng(1)
    table, weights = (draw.standard_normal(shape, np.float32) for shape in ((32, 8), (8, 12, 8)))
    Row = hax.Axis("embed", 8)
    specs = (jax.P("tp", "fsdp"), jax.P(("dcn", "fsdp")), jax.P(("dcn", "fsdp")))

    def slice_loss(table: jax.Array, ids: jax.Array, weights: jax.Array) -> jax.Array:
        found = look_up(hax.named(table, (Vocab, Row)), hax.named(ids, ("batch", "position")))
        return jax.lax.psum(jnp.sum(found.array * weights), "dcn")

    loss = jax.shard_map(
        slice_loss, mesh=mesh, axis_names={"dcn"}, in_specs=(jax.P(), jax.P("dcn"), jax.P("dcn")), out_specs=jax.P(),
        check_vma=False,
    )  # fmt: skip
    given = [
        place(x, jax.NamedSharding(mesh, spec)) for x, spec in zip((table, ids.array, weights), specs, strict=True)
    ]
    with jax.set_mesh(mesh):
        value, gradient = jax.jit(jax.value_and_grad(loss))(*given)
    assert value == pytest.approx(np.sum(table[ids.array] * weights), rel=1e-5)
    expected = np.zeros_like(table)
    np.add.at(expected, ids.array, weights)
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_rematerialisation_changes_no_gradient_and_saves_memory() -> None:
    ids, results = tokens(), []
    for remat in ("nothing", "full", "dots"):
        model = build(dataclasses.replace(CONFIG, num_layers=6, gradient_checkpointing=remat))
        compiled = jax.jit(jax.grad(loss_of)).lower(model, ids).compile()
        results.append((jax.tree.leaves(compiled(model, ids)), compiled.memory_analysis().temp_size_in_bytes))
    (kept, kept_bytes), (again, again_bytes), (dots, dots_bytes) = results
    for ours, theirs, others in zip(kept, again, dots, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(ours, others, rtol=1e-4, atol=1e-6)
        assert np.abs(ours).max() > 0
    assert again_bytes < kept_bytes / 2
    assert again_bytes < dots_bytes < kept_bytes


def test_fsdp_gathers_weights_layer_by_layer_and_never_activations() -> None:
    mesh = mesh_of("1,4,1")
    model = place_on(mesh, build(CONFIG))
    ids = tokens(batch=8)
    batch = place(np.asarray(ids.array), jax.NamedSharding(mesh, jax.P(("dp", "fsdp"))))
    gradient = eqx.filter_grad(functools.partial(loss_of, mapping=COMPUTE_AXES))
    step = hax.named_jit(gradient, in_axis_resources=None, out_axis_resources=PARAMETER_AXES)
    with jax.set_mesh(mesh):
        text = step.lower(model, hax.named(batch, ids.axes)).compile().as_text()
    gathers = re.findall(r"= f32\[([\d,]+)\]\S* all-gather\(.*?op_name=\"([^\"]*)\"", text)
    exchanges = re.findall(r" all-to-all\(.*?op_name=\"([^\"]*)\"", text)
    assert gathers
    # 12 positions occur in no weight; stacked weights would show their 2 layers in front.
    stacked_or_activation = [shape for shape, _ in gathers if "12" in shape.split(",") or shape.startswith("2,24,")]
    assert not stacked_or_activation
    # The embedding stays split by columns: devices exchange those of the rows of their tokens, and gradients back.
    assert len(exchanges) == 2 and not [name for name in exchanges if "layer" in name]
    assert "32,24" not in [shape for shape, _ in gathers]


_LOWERED = """
import hashlib, sys
import equinox as eqx, haliax as hax, jax, jax.numpy as jnp
from lockstep.models import LlamaLMHeadModel, load_config

def total(model, ids):
    return model(hax.named(ids, ("batch", "position"))).array.sum()

for path in sys.argv[1:]:
    config, ids = load_config(path), jnp.zeros((2, 16), jnp.int32)
    init = jax.jit(lambda key: LlamaLMHeadModel.init(hax.Axis("vocab", 64), config, key=key))
    model = eqx.filter_eval_shape(init, jax.random.key(0))
    for lowered in init.lower(jax.random.key(0)), jax.jit(jax.grad(total)).lower(model, ids):
        print(path, hashlib.sha256(lowered.as_text().encode()).hexdigest())
"""


@pytest.mark.slow
def test_programs_do_not_depend_on_the_order_of_sets():
    """Which is another one in each process: hosts would disagree about their programs, and refuse to start."""
    families = ("llama3", "qwen3_moe_mixed", "qwen3_next", "gemma4_moe")
    command = [sys.executable, "-c", _LOWERED, *(str(GOLDEN / family) for family in families)]
    processes = [
        subprocess.Popen(command, env=os.environ | {"PYTHONHASHSEED": seed}, stdout=subprocess.PIPE, text=True)
        for seed in ("1", "2")
    ]
    first, second = (process.communicate()[0].splitlines() for process in processes)
    assert len(first) == 2 * len(families) and second == first
