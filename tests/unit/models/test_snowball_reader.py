"""Levanter's Snowball: the tokens of Levanter's own forward, from its meshes of explicit axes, on any layout."""

import dataclasses
import functools
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from levanter.models import snowball

import lockstep
from lockstep.engine.config import Layout
from lockstep.errors import ConfigError
from lockstep.models import (
    LlamaConfig,
    ReaderMismatchError,
    check_reader,
    layer_kinds,
    read_decoder,
    rotary_frequencies,
)
from lockstep.placement import mesh_of
from lockstep.types import Drafts
from tests import levanter_models as models
from tests.multiprocess.launches import record_launches
from tests.oracle import Expected, assert_same_logprobs, assert_same_tokens
from tests.tiny import requests

CONFIG = snowball.SnowballConfig(
    vocab_size=66,
    hidden_dim=20,
    intermediate_dim=14,
    shared_expert_intermediate_dim=22,
    num_experts=5,
    num_experts_per_token=3,
    num_layers=5,
    num_heads=8,
    num_kv_heads=2,
    head_dim=12,
    max_seq_len=64,
    sliding_window=9,
)
ONE = (1, 1, 1, 1, 1)


@functools.cache
def skeleton(config: snowball.SnowballConfig, sizes: tuple[int, ...] = ONE) -> Any:
    """A model of shapes, with the shardings that Levanter gives it."""
    with jax.set_mesh(models.snowball_mesh(*sizes)), pytest.MonkeyPatch.context() as patch:
        patch.setattr(snowball, "_GATED_NORM_RANK", 7)
        vocab = hax.Axis("vocab", config.vocab_size)
        return eqx.filter_eval_shape(lambda: config.build(vocab, key=jax.random.key(0)))


@functools.cache
def model_on(config: snowball.SnowballConfig, *sizes: int) -> Any:
    """A model with random weights, the same on every mesh; nothing is compiled."""
    rng, where = np.random.default_rng(0), models.snowball_mesh(*sizes)

    def draw(leaf: Any) -> Any:
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        values = (leaf.ndim == 1) + 0.3 * rng.standard_normal(leaf.shape).astype(np.float32)
        return jax.device_put(values.astype(np.float32), NamedSharding(where, leaf.sharding.spec))

    return jax.tree.map(draw, skeleton(config, sizes))


@functools.cache
def expected(config: snowball.SnowballConfig) -> list[Expected]:
    return models.dense_completions(model_on(config, *ONE), requests())


def test_a_model_is_read_by_reference_with_its_settings() -> None:
    with record_launches() as launches:
        config, weights = read_decoder(skeleton(CONFIG))
    assert launches == []
    blocks = skeleton(CONFIG).transformer.blocks[:1]
    assert weights.layers.attn_norm_down.shape == (5, 20, 7) and weights.final_norm_up.shape == (7, 20)
    assert config.experts.scoring == "sigmoid" and config.experts.routed_scaling_factor == 2.5
    kinds = layer_kinds(config)
    assert [kind.window for kind in kinds] == [9, 9, 9, None, None]
    rotates = [bool(np.any(rotary_frequencies(config, kind.rope))) for kind in kinds]
    assert rotates == [True, True, True, False, False]
    assert {len(rotary_frequencies(config, kind.rope)) for kind in kinds} == {3}, "pairs of half a head"
    one, _ = read_decoder(eqx.tree_at(lambda model: model.transformer.blocks, skeleton(CONFIG), blocks))
    assert [kind.window for kind in layer_kinds(one)] == [None]


def test_exact_numerics_refuse_it_by_name() -> None:
    config, _ = read_decoder(skeleton(CONFIG))
    with pytest.raises(ConfigError, match="numerics is exact and variant.gated_norm_rank is 7, which is not"):
        dataclasses.replace(config, numerics="exact")
    fields = ("gated_norm_rank", "unit_qk_norm", "exclusive_attention", "head_gates")
    for name in fields:
        variant = lockstep.models.Variant(**{name: getattr(config.variant, name)})
        with pytest.raises(ConfigError, match=f"numerics is exact and variant.{name} is"):
            LlamaConfig(variant=variant, numerics="exact")


WHOLE = dataclasses.replace(CONFIG, num_experts=4, shared_expert_intermediate_dim=20)


@pytest.mark.nightly  # in make slow: unit/models/test_levanter_reader.py
@pytest.mark.parametrize(
    ("config", "sizes", "layout"),
    [
        (CONFIG, ONE, {"tensor": 1}),
        (CONFIG, (1, 1, 1, 1, 2), {"tensor": 2}),  # by width: 5 experts
        (WHOLE, (1, 1, 1, 2, 2), {"tensor": 2}),
        (WHOLE, (1, 2, 1, 1, 2), {"tensor": 4}),  # two devices share a kv head
        (CONFIG, (1, 2, 1, 1, 1), "training"),
    ],
)
def test_tokens_are_those_of_levanters_forward(
    config: snowball.SnowballConfig, sizes: tuple[int, ...], layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_on(config, *sizes)
    engine = lockstep.Engine(lockstep.EngineConfig(layout=layout), mesh_of(read_decoder(model)[1].embed))
    want = expected(config)
    assert len({answer.tokens for answer in want}) > 3
    with jax.set_mesh(models.snowball_mesh(*sizes)):  # as in a hook of Levanter's trainer
        got = engine.generate(model, requests())
    assert assert_same_tokens(want, got) == 0
    assert_same_logprobs(want, got, atol=3e-5)  # as for the other models of Levanter: float32 in another order
    # As if a wide step took no longer than a narrow one.
    monkeypatch.setattr(
        "lockstep.engine.sizing.result.verify_costs", lambda sizes, _: dict.fromkeys(sizes.verify_widths, 0.01)
    )
    drafted = [
        dataclasses.replace(each, drafts=Drafts(answers=((*answer.tokens[:-1], 3),)))
        for each, answer in zip(requests(), want, strict=True)
    ]
    assert assert_same_tokens(want, engine.generate(model, drafted)) == 0
    assert any(name.startswith("verify_") for name in engine.ledger.launches)


@pytest.mark.nightly
def test_the_reader_is_right_and_the_audit_agrees() -> None:
    model = model_on(CONFIG, 1, 2, 1, 1, 1)

    @jax.jit
    def forward(model: Any, ids: jax.Array) -> jax.Array:
        found = model(hax.named(ids, ("batch", "position")))
        return found.rearrange(("batch", "position", "vocab")).array.astype(jnp.float32)

    def theirs(ids: jax.Array) -> np.ndarray:
        one = model_on(CONFIG, *ONE)
        with jax.set_mesh(models.snowball_mesh(*ONE)):
            return np.asarray(forward(one, np.asarray(ids)))

    found = check_reader(model, theirs, length=16)
    assert found.gap < 1e-4 and not found.unseen and len(found.tried) > 20
    config, weights = read_decoder(model)
    wrong = dataclasses.replace(config, experts=dataclasses.replace(config.experts, num_experts_per_tok=2))
    with pytest.raises(ReaderMismatchError, match="num_experts_per_tok is 2: it should be 3"):
        check_reader((wrong, weights), theirs, length=16)
    got = lockstep.Engine(lockstep.EngineConfig(), mesh_of(weights.embed)).generate(model, requests())
    assert lockstep.audit(model, requests(), got).logprob_gap < 3e-5
