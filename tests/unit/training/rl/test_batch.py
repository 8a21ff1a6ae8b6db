import dataclasses

import numpy as np
import pytest

from lockstep.errors import ConfigError
from lockstep.training.objectives import GrpoConfig
from lockstep.training.rl.batch import make_columns
from tests.unit.training.rl.made_up import completion


def test_a_row_is_prompt_answer_padding():
    config = GrpoConfig(use_rollout_logprobs=False, importance_cap=2.0, kl_coefficient=0.1)
    columns = config.columns(7, on_policy=False)
    answers = [completion(0, 0, (4, 5)), completion(0, 1, (6,))]
    rows = make_columns(columns, [(1, 2, 3), (1, 2, 3)], answers, np.array([0.5, -0.5]))
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
    rows = make_columns(columns, [(1, 2, 3)] * 2, answers, np.array([0.5, -0.5]), np.array([False, True]))
    assert rows["loss_mask"].sum(axis=1).tolist() == [0, 1] and rows["tokens"][0].tolist() == [1, 2, 3, 4, 5, 0, 0]


def test_an_engine_that_does_not_say_what_it_drew_with():
    answer = dataclasses.replace(completion(0, 0, (4, 5)), sampled_logprobs=())
    with pytest.raises(ConfigError, match="an answer of the engine has 2 tokens and 0 sampled_logprobs"):
        make_columns(GrpoConfig().columns(7, on_policy=True), [(1, 2, 3)], [answer], np.zeros(1))
