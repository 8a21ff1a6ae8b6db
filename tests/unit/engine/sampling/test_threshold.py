"""What the filters keep: the same tokens as the search over all of them, on every number of devices."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lockstep.engine.sampling.filters import FILTERS, Candidates
from lockstep.engine.sampling.threshold import SIZE, Shortlist, _threshold, find_threshold, scopes_needed
from lockstep.placement.decode_mesh import make_decode_mesh
from lockstep.xla import Hlo, collectives
from tests.filters_oracle import kept_tokens
from tests.unit.engine.models import mesh_of

P = jax.sharding.PartitionSpec
SLOTS, TINY, LARGE = 3, 5, 3 * SIZE + 2
"""Numbers that neither two nor four devices share evenly."""


@functools.cache
def finder(tensor: int) -> Any:
    """The mask of the kept tokens as the devices of a replica find it."""
    decode_mesh = make_decode_mesh(mesh_of("1,4,1"), tensor)

    def mask(scores: Any, parameters: Any) -> Any:
        features = {each.name: jnp.any(each.narrows(parameters[each.name])) for each in FILTERS}
        threshold = find_threshold(scores, parameters, features, decode_mesh)
        part = jax.lax.axis_index(decode_mesh.tensor_axes) if tensor > 1 else 0
        ids = part * scores.shape[1] + jnp.arange(scores.shape[1])
        return threshold.mask(Candidates.of(scores, ids))

    split = P(None, decode_mesh.tensor_axes or None)
    return jax.jit(jax.shard_map(mask, mesh=decode_mesh.mesh, in_specs=(split, P()), out_specs=split, check_vma=False))


def padded(scores: np.ndarray, tensor: int) -> np.ndarray:
    return np.pad(scores, ((0, 0), (0, -scores.shape[1] % tensor)), constant_values=-np.inf)


def assert_kept_as_before(scores: np.ndarray, k: Any, p: Any, min_p: Any) -> None:
    log_min_p = np.array([math.log(each) if each else -math.inf for each in min_p], np.float32)
    k, p = np.array(k, np.int32), np.array(p, np.float32)
    expected = np.asarray(kept_tokens(scores, k, p, log_min_p))
    assert expected.any(axis=1).all()
    for tensor in (1, 2, 4):
        found = finder(tensor)(padded(scores, tensor), {"top_k": k, "top_p": p, "min_p": log_min_p})
        np.testing.assert_array_equal(np.asarray(found)[:, : scores.shape[1]], expected, err_msg=f"tensor {tensor}")


SCORES = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, -2.5, -math.inf, 1e-30, -1e-40, 80.0]), st.floats(-30, 30, width=32)
)
SHARES = [1.0, 1 - 2**-24, 0.999, 0.9, 0.5, 0.25, 1e-6, 1e-30]


@st.composite
def tiny(draw: st.DrawFn) -> tuple[Any, ...]:
    rows = np.array(draw(st.lists(SCORES, min_size=SLOTS * TINY, max_size=SLOTS * TINY)), np.float32)
    rows = rows.reshape(SLOTS, TINY)
    rows[:, draw(st.integers(0, TINY - 1))] = draw(st.floats(-5, 5, width=32))  # one at least is finite

    def each(values: Any) -> list[Any]:
        return draw(st.lists(values, min_size=SLOTS, max_size=SLOTS))

    return rows, each(st.integers(0, TINY + 2)), each(st.sampled_from(SHARES)), each(st.sampled_from([0, 0.01, 0.5, 1]))


@pytest.mark.slow
@settings(max_examples=50)
@given(tiny())
def test_a_tiny_vocabulary(case: tuple[Any, ...]) -> None:
    assert_kept_as_before(*case)


@st.composite
def large(draw: st.DrawFn) -> tuple[Any, ...]:
    """Scores flat and peaked, rounded so that many are equal, or not."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows = rng.standard_normal((SLOTS, LARGE)) * draw(st.sampled_from([0.0, 0.1, 1.0, 4.0, 20.0]))
    steps = draw(st.sampled_from([0, 2, 32]))
    rows = np.round(rows * steps) / steps if steps else rows
    rows = np.where(rng.random(rows.shape) < draw(st.sampled_from([0.0, 0.5, 0.9])), -np.inf, rows)
    rows[:, rng.integers(LARGE)] = draw(st.sampled_from([0.0, 3.0, 30.0]))

    def each(values: Any) -> list[Any]:
        return draw(st.lists(values, min_size=SLOTS, max_size=SLOTS))

    ks = st.sampled_from([0, 1, 2, 50, SIZE - 1, SIZE, SIZE + 1, LARGE - 1, LARGE, LARGE + 5])
    return rows.astype(np.float32), each(ks), each(st.sampled_from(SHARES)), each(st.sampled_from([0, 0.01, 0.5, 1]))


FLAT = np.zeros((SLOTS, LARGE), np.float32)


@pytest.mark.slow
@settings(max_examples=50)
@given(large())
@example((FLAT, [0, SIZE, SIZE + 1], [0.1, 0.5, 1.0], [0, 0, 0]))
@example((FLAT, [0, 0, 0], [SIZE / LARGE, (SIZE + 1) / LARGE, 1 - 2**-24], [0, 1, 0]))
def test_a_vocabulary_beyond_the_short_list(case: tuple[Any, ...]) -> None:
    assert_kept_as_before(*case)


@pytest.mark.slow
def test_a_vocabulary_of_a_model() -> None:
    rows = np.random.default_rng(0).standard_normal((SLOTS, 32_000)).astype(np.float32)
    for spread in (0.5, 5.0):
        for k, p in (([50, 0, 50], [0.95, 0.9, 1.0]), ([500, 0, 1], [0.9, 1.0, 0.1])):
            assert_kept_as_before(spread * rows, k, p, [0, 0.05, 0])


@pytest.mark.slow
def test_weights_that_sums_of_floats_lose_beside_a_large_one() -> None:
    rows = -15 - np.random.default_rng(0).random((SLOTS, 32_000)).astype(np.float32)
    rows[:, 0] = 0
    assert_kept_as_before(rows, [0, 0, 0], [0.9985, 0.999, 0.9995], [0, 0, 0])


def without_list(scores: Any, parameters: Any) -> Any:
    """The mask of the kept tokens as one TPU finds it."""
    features = {each.name: jnp.any(each.narrows(parameters[each.name])) for each in FILTERS}
    threshold = _threshold(scores, parameters, features, with_list=False)
    return threshold.mask(Candidates.of(scores, jnp.arange(scores.shape[1])))


@pytest.mark.parametrize("mask", [jax.jit(without_list), finder(2)], ids=["as on TPU", "two devices"])
def test_the_same_is_kept_without_a_list_and_with_the_slots_shared(mask: Any) -> None:
    scores = np.round(2 * np.random.default_rng(0).standard_normal((SLOTS, LARGE), np.float32))  # many are equal
    given = {"top_k": np.array([50, 0, 2], np.int32), "top_p": np.array([1.0, 0.8, 0.5], np.float32)}
    given["min_p"] = np.log(np.array([1e-9, 1e-2, 1e-9], np.float32))
    expected = kept_tokens(scores, *(given[each.name] for each in FILTERS))
    assert 0 < expected.sum() < expected.size
    np.testing.assert_array_equal(mask(scores, given), expected)


@pytest.mark.parametrize("tensor", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_all_filters_together_take_two_collectives(tensor: int) -> None:
    decode_mesh = make_decode_mesh(mesh_of("1,4,1"), tensor)
    parameters = {"top_k": np.zeros(SLOTS, np.int32), "top_p": np.ones(SLOTS, np.float32)}
    parameters["min_p"] = np.zeros(SLOTS, np.float32)
    scores = np.zeros((SLOTS, 4 * LARGE), np.float32)
    program = Hlo(finder(tensor).lower(scores, parameters).compile().as_text())
    assert len(collectives(program, decode_mesh.mesh.size)) == 2


def test_scopes_are_needed_as_their_filters_are() -> None:
    assert scopes_needed({"top_k": False, "top_p": True, "min_p": False}) == {"filters": True, "shortlist": True}
    assert scopes_needed({"top_k": False, "top_p": False, "min_p": True}) == {"filters": True, "shortlist": False}
    assert not any(scopes_needed({"top_k": False, "top_p": False, "min_p": False}).values())


VOCAB = 3 * SIZE


def test_a_shortlist_says_where_it_ends_too_early() -> None:
    flat = np.zeros((1, VOCAB), np.float32)
    peaked = 4 * np.random.default_rng(0).standard_normal((1, VOCAB)).astype(np.float32)

    @jax.jit
    def find(scores: Any, k: Any, p: Any) -> Any:
        candidates = Candidates.of(scores, jnp.arange(scores.shape[1]))
        return Shortlist.of(candidates).threshold(candidates, k, p)[1]

    def decides(scores: np.ndarray, k: int, p: float) -> bool:
        return bool(find(scores, np.array([k], np.int32), np.array([p], np.float32))[0])

    assert decides(peaked, 0, 1.0) and decides(peaked, VOCAB, 1.0) and decides(peaked, SIZE, 1.0)
    assert decides(peaked, 0, 0.9) and decides(peaked, SIZE, 0.999)
    assert not decides(peaked, SIZE + 1, 1.0) and not decides(peaked, SIZE + 1, 0.5)
    assert decides(flat, SIZE, 0.9) and not decides(flat, 0, 0.9)
    assert decides(flat, 0, SIZE / VOCAB) and not decides(flat, 0, (SIZE + 1) / VOCAB)
    assert decides(flat[:, :SIZE], 0, 0.999), "the list is the vocabulary"


@pytest.mark.parametrize("vocab", [100, 2000, 5001, 32000])
def test_a_list_is_the_head_of_the_whole_order(vocab):
    """Few different scores, so that equal ones are on both sides of every border; -0 is 0; some may not be drawn."""
    draw = np.random.default_rng(vocab)
    scores = np.round(draw.normal(size=(3, vocab)) * 3).astype(np.float32) / 3
    scores[1] = np.where(draw.random(vocab) < 0.99, -np.inf, -0.0)
    scores[2] = 0.0
    found = jax.jit(lambda each: Shortlist.of(Candidates.of(each, jnp.arange(vocab))))(scores)
    order = np.argsort(-scores, axis=1, kind="stable")[:, :SIZE]
    np.testing.assert_array_equal(found.ids, order)
    np.testing.assert_array_equal(found.scores, np.take_along_axis(scores, order, axis=1))
