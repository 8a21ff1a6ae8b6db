"""The results of a launch in one array."""

import numpy as np

from lockstep.engine.schedule import DecodeResults, as_floats
from lockstep.engine.schedule.results import DraftCounts


def test_each_array_is_a_part_and_numbers_keep_their_bits() -> None:
    shape = (2, 3, 4)
    tokens = np.arange(24, dtype=np.int32).reshape(shape)
    logprobs = np.float32(-0.1) * tokens.astype(np.float32)
    logprobs[1, 2, 3] = np.nan
    top_ids = np.arange(48, dtype=np.int32).reshape(*shape, 2)
    packed = DecodeResults.of(tokens, logprobs, 2 * logprobs, top_ids, top_ids.astype(np.float32)).packed
    assert packed.shape == (2, 7, 3, 4) and packed.dtype == np.int32
    np.testing.assert_array_equal(packed[:, 0], tokens)
    np.testing.assert_array_equal(as_floats(packed[:, 1]), logprobs)
    np.testing.assert_array_equal(as_floats(packed[:, 2]), 2 * logprobs)
    np.testing.assert_array_equal(np.moveaxis(packed[:, 3:5], 1, -1), top_ids)
    np.testing.assert_array_equal(as_floats(np.moveaxis(packed[:, 5:], 1, -1)), top_ids)


def test_without_other_probabilities_there_are_zeros() -> None:
    one = np.ones((1, 1, 1), np.int32)
    results = DecodeResults.of(one, one.astype(np.float32))
    assert results.packed.shape == (1, 3, 1, 1) and results.packed[0, 2, 0, 0] == 0
    assert results.tokens.tolist() == [[[1]]]


def test_counts_of_several_rounds_are_added_and_told() -> None:
    rounds = [DraftCounts(tokens=10, steps=4, drafted=8, right=5), DraftCounts(tokens=20, steps=16, drafted=2, right=1)]
    total = DraftCounts.sum(rounds)
    assert total == DraftCounts(tokens=30, steps=20, drafted=10, right=6)
    assert total.metrics() == {"drafts/accepted_share": 0.6, "drafts/steps_saved": 10, "drafts/tokens_per_step": 1.5}
    assert str(total) == "60% right, 10 of 30 steps saved"


def test_nothing_was_sampled() -> None:
    nothing = DraftCounts.sum([])
    assert set(nothing.metrics().values()) == {0} and str(nothing) == "0% right, 0 of 0 steps saved"
