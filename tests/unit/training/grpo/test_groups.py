"""Which groups are learned from, with and without dynamic sampling."""

import numpy as np

from lockstep.training.grpo.groups import Groups, choose_groups
from lockstep.training.grpo.rewarding import Rewards
from tests.unit.training.grpo.made_up import completion


def groups(first, rewards):
    """Groups of two answers to the questions from ``first`` on."""
    total = np.array(rewards, float).reshape(-1)
    answers = [completion(place // 2, place % 2, (first + place // 2, place % 2)) for place in range(len(total))]
    return Groups(
        questions=np.arange(first, first + len(rewards)),
        completions=answers,
        rewards=Rewards(total=total, components={"a": total * 2}, failed={"a": 1}, late={"a": 2}),
    )


def test_one_sampling_is_taken_as_it_is():
    chosen = choose_groups([groups(10, [[1, 1], [0, 1]])], 2)
    assert chosen.questions.tolist() == [10, 11] and chosen.signal.tolist() == [False, True]


def test_groups_with_a_signal_come_first_and_others_fill_up():
    parts = [groups(10, [[1, 1], [0, 1], [0, 0]]), groups(20, [[1, 0], [2, 2], [3, 4]])]
    for wanted, expected in ((3, [11, 20, 22]), (5, [10, 11, 12, 20, 22]), (2, [11, 20])):
        chosen = choose_groups(parts, wanted)
        assert chosen.questions.tolist() == expected
        # Answers and rewards go with their questions.
        assert [each.tokens[0] for each in chosen.completions[::2]] == expected
        assert (chosen.rewards.components["a"] == 2 * chosen.rewards.total).all()
    assert choose_groups(parts, 3).totals.tolist() == [[0, 1], [1, 0], [3, 4]]


def test_failures_of_all_samplings_are_counted():
    rewards = Groups.concatenate([groups(0, [[1, 2]]), groups(5, [[3, 4]])]).rewards
    assert rewards.failed == {"a": 2} and rewards.late == {"a": 4}
