"""`numerics: exact` proves itself where it runs, and is refused where it is not exact."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.engine import Engine, EngineConfig, exact_logprobs
from lockstep.engine.decoder import exact_proof
from lockstep.engine.decoder.exact_proof import AGREED, Numerics, ProductShape, prove_exact
from lockstep.errors import ConfigError, PeerError
from lockstep.models import LlamaConfig, read_decoder
from tests.exact import EXACT, REQUESTS, completed, model_of
from tests.unit.engine.models import EXACT as EXACT_FAMILIES
from tests.unit.engine.models import FAMILIES, VOCAB, mesh_of

pytestmark = pytest.mark.optimized

CASES = [(family, dtype) for family in sorted(EXACT_FAMILIES) for dtype in ("bfloat16", "float32")]
FAST = {("llama", "bfloat16"), ("gpt_oss", "bfloat16")}
IN_SLOW = {("apertus", "bfloat16"), ("gemma", "float32")}
"""In float32 sums of three terms are not exact with the flags of `make test`."""


@pytest.fixture
def _anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proofs of other tests do not count, nor do those of this one in others."""
    monkeypatch.setattr(exact_proof, "_prove", exact_proof._prove.__wrapped__)


def weighed(case: tuple[str, str]) -> Any:
    heavier = pytest.mark.slow if case in IN_SLOW else pytest.mark.nightly
    return pytest.param(*case, marks=[] if case in FAST else heavier)


@pytest.mark.parametrize(("family", "dtype"), [weighed(case) for case in CASES])
def test_it_holds_here_and_its_bits_do_not_depend_on_the_run(family: str, dtype: str, _anew: None) -> None:
    digests = [prove_exact(FAMILIES[family], VOCAB, dtype, "cpu") for _ in range(2)]
    assert digests[0] == digests[1]


def test_products_are_those_of_the_model_cut_to_whole_blocks() -> None:
    """Kinds of the rows: queries, K and V, MLP, output layer."""
    small = LlamaConfig(hidden_dim=96, intermediate_dim=172, num_heads=6, num_kv_heads=2, head_dim=20)
    assert Numerics.of(small, 100, "bfloat16").products == (
        ProductShape(96, 120, outer=2),
        ProductShape(96, 40, outer=2),
        ProductShape(96, 172, outer=4),
        ProductShape(120, 96, inner=2),
        ProductShape(172, 96, inner=4),
        ProductShape(96, 100, outer=4),
    )
    large = LlamaConfig(num_kv_heads=8, intermediate_dim=14336, tie_word_embeddings=True)
    assert Numerics.of(large, 128_257, "float32").products == (
        ProductShape(1024, 1024, outer=8),
        ProductShape(1024, 1024, inner=8),
        ProductShape(1024, 1024, transposed=True),
    )


def plain(x: Any, weight: Any, *, columns: int = 1, inner: int = 1, transposed: bool = False) -> Any:
    """The product as XLA makes it of all rows: ADR 38 says how its bits depend on their number."""
    axes = (((1,), (1 if transposed else 0,)), ((), ()))
    return jax.lax.dot_general(x, weight, axes, preferred_element_type=jnp.float32)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_a_product_that_is_not_exact_is_refused_by_engine_and_trainer(
    dtype: str, monkeypatch: pytest.MonkeyPatch, _anew: None
) -> None:
    monkeypatch.setattr(exact_proof, "product", plain)
    # One of its own: neither has made a program of it before.
    config = dataclasses.replace(EXACT, max_seq_len=EXACT.max_seq_len + 1)
    text = (
        rf"numerics is exact, and here it is not: a product of \d+ terms for \d+ columns in {dtype} on cpu gives [1-4] "
        r"of 4 rows other bits alone than beside others, with jaxlib [\d.]+ on this machine. Set numerics to fast; or "
        r"take away what differs from a machine where it is exact: XLA_FLAGS, "
    )
    model = model_of("1,1,1", dtype, config)
    with pytest.raises(ConfigError, match=text):
        Engine(EngineConfig(), mesh_of("1,1,1")).prepare(model, REQUESTS)
    with pytest.raises(PeerError, match=text):
        completed("1,1,1", model)
    _, weights = read_decoder(model)
    tokens = np.zeros((2, 8), np.int32)
    with jax.set_mesh(mesh_of("1,1,1")), pytest.raises(ConfigError, match=text):
        jax.jit(lambda weights, tokens: exact_logprobs(config, weights, tokens).logprobs)(weights, tokens)


def test_hosts_agree_on_the_bits() -> None:
    """Each of machines of two kinds may be exact, with other bits than the other."""
    model = model_of("1,1,1", "bfloat16")
    agreed = Engine(EngineConfig(), mesh_of("1,1,1")).prepare(model, REQUESTS[:1])
    assert agreed[AGREED] == prove_exact(EXACT, VOCAB, "bfloat16", "cpu")
    assert agreed[AGREED] != prove_exact(EXACT, VOCAB + 8, "bfloat16", "cpu")
    assert re.fullmatch("[0-9a-f]{64}", agreed[AGREED])


def test_nothing_is_proved_for_devices_that_are_only_compiled_for() -> None:
    assert prove_exact(EXACT, VOCAB, "bfloat16", "tpu") is None
