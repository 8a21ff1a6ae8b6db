"""Sums of a softmax that is computed in parts."""

import numpy as np
import pytest

from lockstep.training.objectives.softmax import LOWEST, SoftmaxSums, softmax_inputs, weighted


def test_sums_for_another_highest_score_are_those_of_the_same_scores():
    scores = np.random.default_rng(0).standard_normal((5, 7)).astype(np.float32)

    def sums(highest):
        distance = scores - highest[:, None]
        return SoftmaxSums(highest, np.exp(distance).sum(1), weighted(np.exp(distance), distance).sum(1))

    highest = scores.max(1)
    for value, expected in zip(sums(highest).below(highest + 3), sums(highest + 3), strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_ids_that_are_no_tokens_have_no_probability(temperature):
    scores = softmax_inputs(np.ones((2, 4), np.float32), np.arange(4), temperature, 3)
    np.testing.assert_array_equal(scores, [[1 / temperature] * 3 + [LOWEST]] * 2)
