"""Layers whose heads differ, in one pool: Gemma 4."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.engine import Engine, EngineConfig
from lockstep.engine.decoder.heads import device_heads
from lockstep.engine.sizing.memory_model import MemoryModel
from lockstep.errors import LockstepError
from lockstep.models import RotaryConfig, check_reader
from lockstep.models.attention import page_ops
from lockstep.models.attention.tpu import TpuAttention
from lockstep.models.families.gemma4 import Gemma4Config, Gemma4Variant, NormedExperts, ProportionalRotary, WideHeads
from lockstep.placement import make_decode_mesh
from lockstep.types import Drafts
from tests.oracle import assert_same_logprobs, assert_same_tokens, oracle_completions
from tests.unit.engine.models import SIZES, VOCAB, mesh_of, mixed_requests, model_on

GEMMA4 = Gemma4Config(
    **SIZES | {"num_layers": 3, "num_heads": 8, "num_kv_heads": 4},
    tie_word_embeddings=False,
    rope=ProportionalRotary(theta=1000.0, rotated_part=0.5),
    variant=Gemma4Variant(
        sliding_window=6, full_attention_every=3, sliding_rope=RotaryConfig(theta=100.0), logit_soft_cap=3.0
    ),
    wide=WideHeads(num_kv_heads=2, head_dim=12),
)


GEMMA4_MOE = dataclasses.replace(
    GEMMA4,
    experts=NormedExperts(num_experts=4, num_experts_per_tok=2, intermediate_dim=12, shared_intermediate_dim=24),
)


@pytest.mark.parametrize("read_kv", [page_ops.gather_kv, page_ops.read_kv_page_by_page])
def test_heads_of_another_size_are_the_first_numbers_of_a_position(read_kv: Any) -> None:
    rng, page = np.random.default_rng(0), np.array([[5, 0, 5], [2, 1, 3]], np.int32)
    kept = rng.standard_normal((6, 2, 4, 9)).astype(np.float32)  # two heads of 9, in rows of 6
    pool = page_ops.as_rows(jnp.asarray(kept), (8, 6))
    assert pool.shape == (6, 2, 8, 6) and not pool[:, :, 6:].any()
    np.testing.assert_array_equal(page_ops.as_rows(pool, (4, 9)), kept)
    k, v = read_kv(pool, jnp.asarray(page), 2, (4, 9))
    positions = kept[page].reshape(2, 3 * 2, 4, 9)
    np.testing.assert_array_equal(k, positions[:, :, 0::2].swapaxes(1, 2))
    np.testing.assert_array_equal(v, positions[:, :, 1::2].swapaxes(1, 2))


def assert_answers(mesh: str, config: Gemma4Config, **engine: Any) -> Engine:
    """The tokens are those of forward passes without a cache; with drafts, too."""
    runner = Engine(EngineConfig(page_size=8, max_seqs=4, **engine), mesh_of(mesh), vocab_size=VOCAB)
    model, requests = model_on(mesh, config), mixed_requests()
    answers = runner.generate(model, requests)
    expected = oracle_completions(model_on("1,1,1", config), requests, fp8_cache="kv_cache_dtype" in engine)
    assert_same_tokens(expected, answers)
    assert assert_same_logprobs(expected, answers) < 1e-4
    drafted = [dataclasses.replace(request, drafts=Drafts(ngrams=True)) for request in requests]
    assert [answer.tokens for answer in runner.generate(model, drafted)] == [answer.tokens for answer in answers]
    return runner


def test_the_engine_answers_as_passes_without_a_cache() -> None:
    engine = assert_answers("1,1,1", GEMMA4)
    model, sizes, sizing = engine.decode_model, engine.sizes, engine.sizing
    assert model is not None and sizes is not None and sizing is not None and sizes.page_copies
    pool = engine.programs["new_cache"].memory().output_size_in_bytes
    positions = sizes.pages * sizes.page_size
    # K and V of four heads of 8 in each layer, of which two of 12 leave a quarter.
    assert pool == positions * 3 * 2 * 4 * 8 * 4 == MemoryModel(model).footprint(sizes).pool
    text = "K and V of 4 heads of 8 in 2 layers, K and V of 2 heads of 12 (in pages of which 25% is unused) in 1 layers"
    assert text in sizing.describe()
    read = [layer.step_bytes(100.0, jnp.dtype(jnp.float32)) for layer in model.kept]
    assert read == [6 * 2 * 4 * 8 * 4] * 2 + [100 * 2 * 2 * 12 * 4]


@pytest.mark.slow  # its sibling is the test above
@pytest.mark.parametrize(
    ("mesh", "config", "engine"),
    [
        ("1,2,2", GEMMA4, {"layout": {"tensor": 4}}),  # wide heads are repeated, and have more numbers than others
        ("1,2,2", GEMMA4_MOE, {"layout": {"tensor": 4, "expert": 4}}),
        ("2,1,2", GEMMA4_MOE, {"layout": "training"}),
        ("1,1,2", GEMMA4, {"layout": {"tensor": 2}, "kv_cache_dtype": "fp8"}),
    ],
)
def test_layouts_repeat_and_split_both_kinds_of_heads(mesh: str, config: Any, engine: dict[str, Any]) -> None:
    assert_answers(mesh, config, **engine)


def test_a_kernel_of_one_shape_refuses_the_heads() -> None:
    heads = device_heads(GEMMA4, make_decode_mesh(mesh_of("1,1,2"), 2))
    assert heads.by_layer is not None and [own.head_size for own in heads.by_layer] == [8, 8, 12]
    assert TpuAttention.refusal(heads) == ("takes heads of one shape, and layers here have heads of 8 and 12 numbers")


def test_what_takes_heads_of_one_size_alone_is_refused() -> None:
    engine = Engine(EngineConfig(layout={"tensor": 4, "context": 2}), mesh_of("1,2,2"), vocab_size=VOCAB)
    with pytest.raises(LockstepError, match="has context, and the model's layers have heads of two sizes"):
        engine.prepare(model_on("1,2,2", GEMMA4), mixed_requests())
    with pytest.raises(LockstepError, match="Gemma4Config, whose layers have heads of two sizes; check_reader"):
        check_reader(model_on("1,1,1", GEMMA4), lambda ids: ids)
