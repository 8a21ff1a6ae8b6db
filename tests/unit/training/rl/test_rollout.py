import dataclasses

import numpy as np
import pytest

from lockstep.errors import ConfigError
from lockstep.training.objectives import GrpoConfig, routing_column
from lockstep.training.rl.rollout import Rollout, answer_mask, make_columns
from lockstep.training.rl.segments import Segment, single_turn
from lockstep.types import RoutedExperts
from tests.rollouts import EXPERTS
from tests.saved_states import as_saved
from tests.unit.training.rl.made_up import completion


def make():
    rng = np.random.default_rng(0)
    columns = {"tokens": rng.integers(0, 9, (8, 5)).astype(np.int32), "advantage": rng.random(8).astype(np.float32)}
    return Rollout(number=3, columns=columns, lengths=np.arange(8))


def samples(answers):
    return [single_turn((1, 2, 3), answer) for answer in answers]


def test_each_iteration_takes_all_minibatches():
    found = [(part.start, part.stop) for part in (make().minibatch(update, 4) for update in range(4))]
    assert found == [(0, 4), (4, 8), (0, 4), (4, 8)]


def test_a_checkpoint_keeps_it_bit_for_bit():
    before = make()
    after = Rollout.from_state(as_saved(before.state()))
    assert after.number == 3 and set(after.columns) == set(before.columns)
    for name, column in before.columns.items():
        assert after.columns[name].dtype == column.dtype
        np.testing.assert_array_equal(after.columns[name], column)
    np.testing.assert_array_equal(after.lengths, before.lengths)


def test_a_checkpoint_of_something_else_is_an_error():
    with pytest.raises(TypeError, match="'UEsDBA==', which is not ndarray"):
        Rollout.from_state({**make().state(), "columns": {"tokens": "UEsDBA=="}})


def test_a_row_is_prompt_answer_padding():
    config = GrpoConfig(use_rollout_logprobs=False, importance_cap=2.0, kl_coefficient=0.1)
    columns = config.columns(7, on_policy=False)
    answers = [completion(0, 0, (4, 5)), completion(0, 1, (6,))]
    rows = make_columns(columns, samples(answers), np.array([0.5, -0.5]))
    assert {name: (column.shape, column.dtype) for name, column in rows.items()} == {
        name: ((2, *one.shape), one.dtype) for name, one in columns.items()
    }
    assert rows["tokens"].tolist() == [[1, 2, 3, 4, 5, 0, 0], [1, 2, 3, 6, 0, 0, 0]]
    assert rows["loss_mask"].tolist() == [[False] * 3 + [True] * 2 + [False] * 2, [False] * 3 + [True] + [False] * 3]
    assert rows["rollout_logprobs"].tolist() == [[0, 0, 0, -9, -11, 0, 0], [0, 0, 0, -13, 0, 0, 0]]
    assert not rows["old_logprobs"].any() and not rows["reference_logprobs"].any()
    assert rows["advantage"].tolist() == [0.5, -0.5]


def test_what_is_not_learned_from_has_no_targets():
    answers = [completion(0, 0, (4, 5)), completion(0, 1, (6,))]
    columns = GrpoConfig().columns(7, on_policy=True)
    rows = make_columns(columns, samples(answers), np.array([0.5, -0.5]), np.array([False, True]))
    assert rows["loss_mask"].sum(axis=1).tolist() == [0, 1] and rows["tokens"][0].tolist() == [1, 2, 3, 4, 5, 0, 0]


def conversation():
    """A question, an answer, what an environment says, and a second answer; each answer says its tokens' experts."""
    answers = [completion(0, 0, (4, 5)), completion(0, 0, (7,))]
    numbers = [np.arange(6 * n, dtype="<i2").reshape(n, 3, 2) + 100 * turn for turn, n in enumerate((3, 6))]
    routed = [RoutedExperts(each.shape, each.tobytes()) for each in numbers]
    answers = [dataclasses.replace(a, routed_experts=r) for a, r in zip(answers, routed, strict=True)]
    given = [(1, 2), (6, 6)]
    pairs = zip(given, answers, strict=True)
    return [each for g, a in pairs for each in (Segment(tokens=g), Segment(tokens=a.tokens, completion=a))], numbers


def test_a_conversation_is_learned_from_where_the_model_spoke():
    (sample, numbers), columns = conversation(), GrpoConfig().columns(9, on_policy=True)
    columns |= routing_column(EXPERTS, 9, replayed=True)
    rows = make_columns(columns, [sample], np.array([0.5]))
    assert rows["tokens"].tolist() == [[1, 2, 4, 5, 6, 6, 7, 0, 0]]
    spoken = [[False, False, True, True, False, False, True, False, False]]
    assert rows["loss_mask"].tolist() == answer_mask([sample], 9).tolist() == spoken
    assert rows["rollout_logprobs"].tolist() == [[0, 0, -9, -11, 0, 0, -15, 0, 0]]
    experts = rows["replayed_experts"][0]
    assert (experts[:3] == numbers[0]).all() and (experts[3:6] == numbers[1][3:]).all() and (experts[6:] == -1).all()


def test_an_engine_that_does_not_say_what_it_drew_with():
    answer = dataclasses.replace(completion(0, 0, (4, 5)), sampled_logprobs=())
    with pytest.raises(ConfigError, match="an answer of the engine has 2 tokens and 0 sampled_logprobs"):
        make_columns(GrpoConfig().columns(7, on_policy=True), samples([answer]), np.zeros(1))


def test_the_experts_of_an_engine_are_a_column():
    wanted = GrpoConfig().columns(7, on_policy=True)
    numbers = np.arange(24, dtype="<i2").reshape(4, 3, 2)
    routed = dataclasses.replace(completion(0, 0, (4, 5)), routed_experts=RoutedExperts((4, 3, 2), numbers.tobytes()))
    answers = [routed, completion(0, 1, (6,))]
    compared = wanted | routing_column(EXPERTS, 7, replayed=False)
    assert {*routing_column(EXPERTS, 7, replayed=True)} == {"replayed_experts"}, "which the model takes"
    rows = make_columns(compared, samples(answers), np.zeros(2))["rollout_experts"]
    assert rows.dtype == np.int16 and (rows[0, :4] == numbers).all() and (rows[0, 4:] == -1).all()
    assert (rows[1] == -1).all(), "an engine that does not say is not compared with"
    with pytest.raises(ConfigError, match="replay_routing is true and an answer of the engine has no routed_experts"):
        make_columns(wanted | routing_column(EXPERTS, 7, replayed=True), samples(answers), np.zeros(2))
