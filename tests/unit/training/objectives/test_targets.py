"""Work on the tokens that are targets alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.training.objectives.targets import NO_TARGET, for_targets

TOKENS = 64


@pytest.mark.parametrize(
    ("number", "computed"), [(0, 16), (1, 16), (16, 16), (17, 32), (33, 48), (48, 48), (49, 64), (64, 64)]
)
def test_as_many_quarters_are_computed_as_have_all_targets(number, computed):
    draw = np.random.default_rng(number)
    targets = np.full(TOKENS, NO_TARGET, np.int32)
    targets[draw.permutation(TOKENS)[:number]] = draw.integers(0, 9, number)
    values = draw.standard_normal((TOKENS, 3)).astype(np.float32)

    def function(own, columns):
        return {"own": own[:, None] * columns["values"], "none": None}, jnp.float32(len(own))

    result, tokens = jax.jit(lambda targets, values: for_targets(function, targets, {"values": values}))(
        targets, values
    )
    assert tokens == computed
    expected = np.where(targets[:, None] == NO_TARGET, 0, targets[:, None].astype(np.float32) * values)
    np.testing.assert_array_equal(result["own"], expected)


def test_parts_are_whole_tiles_and_never_more_than_all_tokens():
    sizes = []

    def function(own):
        sizes.append(len(own))
        return own, None

    for_targets(function, jnp.zeros(20, jnp.int32))
    assert sorted(set(sizes)) == [8, 16, 20]
