import json

import numpy as np
import pytest

from lockstep.training.checkpoints.hook_states import with_arrays, without_arrays


def test_states_come_back_with_arrays_in_their_places():
    array = np.arange(6).reshape(2, 3)
    states = {"a": {"rows": [array, {"part": array[0]}], "number": 1.5, "none": None}, "b": array[:0]}
    arrays = {}
    values = json.loads(json.dumps(without_arrays(states, arrays)))
    assert sorted(arrays) == ["hooks.a.rows.0", "hooks.a.rows.1.part", "hooks.b"]
    np.testing.assert_equal(with_arrays(values, arrays), states)


def test_an_array_that_is_not_there_is_an_error():
    values = without_arrays({"a": np.zeros(1)}, {})
    with pytest.raises(LookupError, match="hooks.a"):
        with_arrays(values, {})
