import json

import numpy as np

from lockstep.training.rl import Rollout


def make():
    rng = np.random.default_rng(0)
    columns = {"tokens": rng.integers(0, 9, (8, 5)).astype(np.int32), "advantage": rng.random(8).astype(np.float32)}
    return Rollout(number=3, columns=columns, lengths=np.arange(8))


def test_each_iteration_takes_all_minibatches():
    found = [(part.start, part.stop) for part in (make().minibatch(update, 4) for update in range(4))]
    assert found == [(0, 4), (4, 8), (0, 4), (4, 8)]


def test_a_checkpoint_keeps_it_bit_for_bit():
    before = make()
    after = Rollout.from_json(json.loads(json.dumps(before.to_json())))
    assert after.number == 3 and set(after.columns) == set(before.columns)
    for name, column in before.columns.items():
        assert after.columns[name].dtype == column.dtype
        np.testing.assert_array_equal(after.columns[name], column)
    np.testing.assert_array_equal(after.lengths, before.lengths)
