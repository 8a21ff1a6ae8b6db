import numpy as np
import pytest

from lockstep.errors import ConfigError
from lockstep.training.objectives import GrpoConfig
from lockstep.training.rl.rollout import Rollout, make_columns
from lockstep.training.rl.rollout_state import read_state, saved_state
from lockstep.training.rl.segments import single_turn
from tests import rollouts as runs
from tests.saved_states import as_saved
from tests.unit.training.rl.made_up import completion

COLUMNS = GrpoConfig().columns(7, on_policy=True)
FIELDS = runs.fields(num_iterations=2)


def saved(fields=FIELDS):
    samples = [single_turn((1, 2, 3), completion(0, 0, (4, 5)))]
    rollout = Rollout(number=3, columns=make_columns(COLUMNS, samples, np.ones(1)), lengths=np.array([5]))
    return as_saved(saved_state(fields, 4, rollout))


def test_a_rollout_is_what_it_was():
    rollout = read_state(saved(), FIELDS, 4, COLUMNS)
    assert (
        rollout is not None and rollout.number == 3 and rollout.columns["tokens"][0].tolist() == [1, 2, 3, 4, 5, 0, 0]
    )
    assert read_state(saved_state(FIELDS, 4, None), FIELDS, 4, COLUMNS) is None


@pytest.mark.parametrize(
    ("fields", "questions", "columns", "text"),
    [
        (runs.fields(num_iterations=4), 4, COLUMNS, "a run with 2 updates per rollout"),
        (FIELDS, 8, COLUMNS, "a run with 4 questions per rollout"),
        (runs.fields(num_iterations=2, rollout={"temperature": 0.5}), 4, COLUMNS, "with rollout.temperature 1.0"),
        (FIELDS, 4, GrpoConfig().columns(9, on_policy=True), "rows have 7 tokens .* now they have 9 tokens"),
    ],
)
def test_a_rollout_of_other_settings_is_refused(fields, questions, columns, text):
    with pytest.raises(ConfigError, match=text):
        read_state(saved(), fields, questions, columns)
