"""Which groups are learned from, and which answers of them."""

import dataclasses
import json

import numpy as np
import pytest

from lockstep.errors import ConfigError
from lockstep.training import StepInfo
from lockstep.training.rl.groups import Groups, Sampled, choose_groups, completions_from_json
from lockstep.training.rl.rewarding import Rewards, Scoring
from lockstep.training.rl.rewards import FunctionReward
from lockstep.types import FinishReason, RoutedExperts
from tests import rollouts as runs
from tests.unit.training.rl.made_up import completion
from tests.unit.training.rl.parrot import Cut, Parrot


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


def shaped(judged, totals, dropped=None):
    """One sampling whose groups of two have a reward for being right, another one in all, and answers without one."""
    made = groups(10, totals)
    flat = np.array(judged, float).reshape(-1)
    lost = np.zeros(len(flat), bool) if dropped is None else np.array(dropped).reshape(-1)
    return dataclasses.replace(made, rewards=dataclasses.replace(made.rewards, judged=flat, dropped=lost))


def test_groups_that_are_all_wrong_are_filtered_though_their_lengths_are_rewarded_differently():
    part = shaped([[0, 0], [0, 1], [1, 1]], [[0, -0.5], [0, 1], [1, 1]])
    assert part.mixed.tolist() == [False, True, False], "0 < right answers < G, DAPO's equation 11"
    assert part.signal.tolist() == [True, True, False]
    other = dataclasses.replace(part, questions=part.questions + 10)
    assert choose_groups([part, other], 2).questions.tolist() == [11, 21]
    taken = choose_groups([part, other], 4)
    assert taken.rewards.judged.reshape(-1, 2).tolist() == [[0, 0], [0, 1], [1, 1], [0, 1]]


def test_groups_with_a_reward_that_failed_are_dropped_and_taken_last():
    part = shaped([[0, 1], [0, 1], [1, 1]], [[0, 1], [0, 1], [1, 1]], [[True, False], [False, False], [False, False]])
    assert part.dropped.tolist() == [True, False, False]
    assert part.mixed.tolist() == part.signal.tolist() == [False, True, False]
    other = dataclasses.replace(part, questions=part.questions + 10)
    assert choose_groups([part, other], 4).questions.tolist() == [11, 12, 21, 22]
    assert choose_groups([part, other], 5).dropped.tolist() == [True, False, False, False, False]


def test_failures_of_all_samplings_are_counted():
    rewards = Groups.concatenate([groups(0, [[1, 2]]), groups(5, [[3, 4]])]).rewards
    assert rewards.failed == {"a": 2} and rewards.late == {"a": 4}


def rollout_of(engine, **run):
    """The columns of a rollout without devices, by group, and its scalars."""
    tracker = runs.Recorder()
    trainer, rollouts, model = runs.make(engine=engine, run=run, tracker=tracker)
    assert rollouts.batch(0, model) is not None and trainer.tracker.flush(60)
    columns = {
        name: column.reshape(-1, runs.GROUP, *column.shape[1:]) for name, column in rollouts.rollout.columns.items()
    }
    return columns, tracker.scalars[1]


def test_answers_that_were_cut_give_no_gradient_and_count_for_the_others():
    plain, _ = rollout_of(Cut({0}))
    masked, _ = rollout_of(Cut({0}), mask_truncated=True)
    assert plain["loss_mask"].any(axis=-1).all()
    assert (masked["loss_mask"].any(axis=-1) == [False, True, True, True]).all()
    np.testing.assert_array_equal(masked["advantage"], plain["advantage"])


def test_dynamic_sampling_never_has_to_ask_a_question_again():
    text = (
        r"max_attempts is 4 and a rollout has 4 questions, each asked once: it may ask 16, and there are 12\. .* most 3"
    )
    with pytest.raises(ConfigError, match=text):
        runs.make(engine=Parrot(), run={"rollout": {"max_attempts": 4}})
    runs.make(engine=Parrot(), run={"rollout": {"max_attempts": 3}})


def choosy(row, prompt):
    """A reward that cannot be had for one answer to the second question."""
    if prompt.text == CHOSEN[1] and row.generation_id == 2:
        raise RuntimeError("no opinion")
    return float(row.generation_id)


CHOSEN: list[str] = []


def test_a_failed_reward_can_drop_its_group_from_the_loss():
    CHOSEN[:] = [
        runs.questions().prompts[number].text for number in runs.questions().drawn(0, runs.BATCH // runs.GROUP)
    ]
    reward = FunctionReward(function=f"{__name__}:choosy", on_failure="drop_group")
    columns, scalars = rollout_of(Parrot(), rewards=[reward])
    learned = columns["loss_mask"].any(axis=(1, 2))
    assert learned.tolist() == [True, False, True, True]
    assert scalars["rollout/groups_dropped"] == scalars["rollout/groups_without_signal"] == 0.25
    assert scalars["reward/choosy/failed"] == 1


def test_gspo_with_the_clipping_of_tokens_says_that_it_clips_nothing(caplog):
    runs.make(loss={"loss": "gspo"}, engine=Parrot())
    assert "loss is gspo and clip_epsilon is 0.2, which clips nothing" in caplog.text
    caplog.clear()
    runs.make(loss={"loss": "gspo", "clip_epsilon": 3e-4, "clip_epsilon_high": 4e-4}, engine=Parrot())
    assert "clips nothing" not in caplog.text


def test_much_clipping_of_answers_that_are_new_is_said_once(caplog):
    _, rollouts, model = runs.make(engine=Parrot())

    def step(number, clipped):
        rollouts.batch(number, model)
        info = StepInfo(
            step=number, model=model, loss=1.0, step_duration=0.1, metrics={"clipped": clipped, "logprob_gap": 0.5}
        )
        rollouts.on_step(info)
        return caplog.text.count("clipping takes away the gradient")

    assert [step(0, 0.2), step(1, 0.21), step(2, 0.9)] == [0, 1, 1]
    assert "step 2: clipping takes away the gradient of 21 % of the tokens" in caplog.text
    assert "train/logprob_gap is 0.5" in caplog.text


def test_a_checkpoint_keeps_every_answer_bit_for_bit():
    values = [completion(0, 0, [7, 3]), completion(0, 1, []), completion(1, 0, [9], FinishReason.LENGTH)]
    odd = float(np.float32(0.1))
    values.append(dataclasses.replace(values[0], prompt_id=1, generation_id=1, logprobs=(-odd, -1e-30)))
    values[2:] = [dataclasses.replace(each, routed_experts=RoutedExperts((2, 1, 2), bytes(8))) for each in values[2:]]
    before = Sampled(number=3, questions=[5, 2], completions=values, scoring=Scoring({}, workers=0))
    kept = json.loads(json.dumps(before.to_json()))
    assert kept["number"] == 3 and kept["questions"] == [5, 2]
    assert completions_from_json(kept) == values
