import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.errors import ConfigError
from lockstep.training import OptimizerConfig
from lockstep.training.step.schedules import build_schedule


def rates(steps, **values):
    schedule = OptimizerConfig(**values).schedule(steps)
    return [float(schedule(step)) for step in range(steps)]


def test_wsd_is_stable_and_falls_with_one_minus_the_root():
    found = rates(20, learning_rate=2.0, warmup=2, lr_schedule="wsd", min_lr_ratio=0.25)
    np.testing.assert_allclose(found[:16], [0, 1, *[2.0] * 14], rtol=1e-6)
    np.testing.assert_allclose(found[16:], [2 - 1.5 * (i / 4) ** 0.5 for i in range(4)], rtol=1e-6)
    assert rates(20, learning_rate=2.0, warmup=0, lr_schedule="wsd", decay=10)[9:11] == [2.0, 2.0]


def test_inv_sqrt_falls_from_step_10000_and_stops_at_the_minimum():
    schedule = OptimizerConfig(learning_rate=1.0, warmup=8, lr_schedule="inv_sqrt", min_lr_ratio=0.25).schedule(10**6)
    found = [float(schedule(step)) for step in (8, 10_000, 40_000, 10**6 - 1)]
    assert found == [1.0, 1.0, pytest.approx(0.5), 0.25]
    schedule = OptimizerConfig(learning_rate=1.0, warmup=100, lr_schedule="inv_sqrt", decay=0.5).schedule(60_000)
    found = [float(schedule(step)) for step in (39_900, 59_999)]  # those of warm-up and decay are 10,000 and 30,099
    assert found == [1.0, pytest.approx((10_000 / 30_099) ** 0.5)]


def test_steps_beyond_the_run_stay_at_the_end():
    for shape in ("cosine", "linear", "wsd"):
        schedule = build_schedule(shape, peak=1.0, min_ratio=0.5, warmup=0, decay=4, total=8)
        assert float(schedule(8)) == float(schedule(20)) == pytest.approx(0.5)


def halving(decay):
    """A schedule of a user's own: half as large after each step of the decay."""
    return lambda step: jnp.maximum(decay.peak * 0.5**step, decay.last)


def test_one_of_a_users_own_has_warm_up_and_decay_as_all_others():
    found = rates(8, learning_rate=2.0, warmup=2, decay=4, min_lr_ratio=0.2, lr_schedule=f"{__name__}:halving")
    assert found == pytest.approx([0, 1, 2, 2, 2, 1, 0.5, 0.4])


def test_one_that_is_not_there_is_an_error():
    with pytest.raises(ConfigError, match="lr_schedule is 'cosin'; it must be cosine, linear, constant, wsd"):
        OptimizerConfig(lr_schedule="cosin")
    config = OptimizerConfig(lr_schedule="no_such_module:f")  # nothing is imported to read a configuration
    with pytest.raises(ConfigError, match="optimizer.lr_schedule 'no_such_module:f': module"):
        config.schedule(10)
