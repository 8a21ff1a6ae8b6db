"""Which questions a rollout has, by past success."""

import json

import numpy as np
import pytest

from lockstep.errors import ConfigError
from lockstep.training.rl.solve_rates import SolveRates


def answered(rates):
    """Question 0 always right, 1 never, 2 half, 3 with a reward beyond 1, all eight times; 4 was never asked."""
    for question, rewards in enumerate([[1.0] * 8, [0.0] * 8, [1.0, 0.0] * 4, [5.0] * 8]):
        rates.add(question, np.array(rewards))
    return rates


def test_the_weight_of_a_question_is_that_of_its_solve_rate():
    weights = answered(SolveRates(5, seed=0)).weights
    np.testing.assert_allclose(weights, [0.9 * 0.1, 0.1 * 0.9, 0.25, 0.9 * 0.1, 0.25])


def test_earlier_answers_count_half():
    rates = SolveRates(1, seed=0)
    rates.add(0, np.ones(4))
    rates.add(0, np.zeros(4))
    rate = (2 + 1) / (2 + 4 + 2)
    assert rates.weights[0] == pytest.approx(rate * (1 - rate))


def test_questions_are_drawn_as_often_as_their_weights_say():
    """The first of a rollout with the probability of its weight by the sum of all; 4,000 rollouts, four deviations."""
    rates = answered(SolveRates(5, seed=3))
    first = np.bincount([rates.drawn(rollout, 1)[0] for rollout in range(4000)], minlength=5) / 4000
    expected = rates.weights / rates.weights.sum()
    assert (np.abs(first - expected) < 4 * np.sqrt(expected / 4000)).all()


def test_no_question_comes_again_within_a_rollout_unless_there_are_too_few():
    rates = answered(SolveRates(20, seed=1))
    attempts = np.concatenate([rates.drawn(5, 6, attempt) for attempt in range(3)])
    assert len(set(attempts.tolist())) == 18
    assert sorted(np.bincount(answered(SolveRates(4, seed=1)).drawn(0, 8)).tolist()) == [2, 2, 2, 2]


def test_a_run_that_goes_on_draws_the_same():
    rates, later, other = answered(SolveRates(20, seed=1)), SolveRates(20, seed=1), answered(SolveRates(20, seed=2))
    later.load_state(json.loads(json.dumps(rates.state())))
    for rollout in range(5):
        np.testing.assert_array_equal(rates.drawn(rollout, 8), later.drawn(rollout, 8))
    assert rates.drawn(0, 8).tolist() != other.drawn(0, 8).tolist() != rates.drawn(1, 8).tolist()


def test_a_checkpoint_of_other_questions_is_refused():
    with pytest.raises(ConfigError, match="solve rates of 20 questions, and now there are 19. Use the same"):
        SolveRates(19, seed=1).load_state(SolveRates(20, seed=1).state())
