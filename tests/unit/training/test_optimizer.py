import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.errors import ConfigError
from lockstep.training import OptimizerConfig, parse_precision
from lockstep.training.optimizer import decay_mask


def rates(config, steps):
    schedule = config.schedule(steps)
    return [float(schedule(step)) for step in range(steps)]


def test_warmup_rises_from_the_first_step_and_cosine_falls_to_the_minimum():
    found = rates(OptimizerConfig(learning_rate=1.0, warmup=4, min_lr_ratio=0.1), 101)
    np.testing.assert_allclose(found[:5], [0.2, 0.4, 0.6, 0.8, 1.0], rtol=1e-6)
    assert found[5] < 1.0 and found == sorted(found[:5]) + sorted(found[5:], reverse=True)
    assert found[-1] == pytest.approx(0.1, abs=2e-3)


def test_fractions_linear_decay_and_a_stable_phase():
    config = OptimizerConfig(learning_rate=1.0, warmup=0.1, decay=0.5, lr_schedule="linear", min_lr_ratio=0.0)
    found = rates(config, 20)
    assert found[2:10] == [1.0] * 8
    np.testing.assert_allclose(found[10:], [1 - i / 10 for i in range(10)], rtol=1e-6)


def test_constant():
    assert rates(OptimizerConfig(learning_rate=0.5, warmup=0, lr_schedule="constant"), 5) == [0.5] * 5


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"learning_rate": -1.0}, "optimizer.learning_rate is -1.0; it must be at least 0"),
        ({"beta1": 1.0}, "optimizer.beta1 is 1.0"),
        ({"max_grad_norm": 0.0}, "Use null for no clipping"),
        ({"decay": 0.0}, "lr_schedule: constant"),
    ],
)
def test_values_out_of_range(values, text):
    with pytest.raises(ConfigError, match=text):
        OptimizerConfig(**values)


def test_a_schedule_longer_than_the_run():
    with pytest.raises(ConfigError, match=r"warmup \(30 steps\).*num_train_steps = 20"):
        OptimizerConfig(warmup=30).schedule(20)


def test_norms_and_biases_are_not_decayed():
    parameters = {"attn_norm": jnp.ones((2, 3)), "q_bias": jnp.ones(3), "embed": jnp.ones((4, 3)), "mlp": {"up": 1.0}}
    assert decay_mask(parameters) == {"attn_norm": False, "q_bias": False, "embed": True, "mlp": {"up": True}}


def test_large_gradients_are_clipped():
    parameters = {"embed": jnp.zeros(2)}
    config = OptimizerConfig(learning_rate=1.0, warmup=0, lr_schedule="constant", weight_decay=0.0, epsilon=1e-2)

    def first_update(scale):
        optimizer = config.build(10)
        gradients = {"embed": jnp.array([0.6, 0.8]) * scale}
        return jax.tree.leaves(optimizer.update(gradients, optimizer.init(parameters), parameters)[0])[0]

    np.testing.assert_allclose(first_update(100.0), first_update(1.0), rtol=1e-6)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("f32", ("float32", "float32")),
        ("p=f32,c=bf16", ("float32", "bfloat16")),
        ("params=float32, compute=bfloat16", ("float32", "bfloat16")),
        ("c=bf16", ("float32", "bfloat16")),
        ("p=bfloat16", ("bfloat16", "bfloat16")),
    ],
)
def test_precision(policy, expected):
    precision = parse_precision(policy)
    assert (precision.param.name, precision.compute.name) == expected


@pytest.mark.parametrize("policy", ["fp32", "p=f32,c=int8", "p=f32,p=f32", "o=f32", "x=f32", ""])
def test_unknown_precision(policy):
    with pytest.raises(ConfigError, match="mp is .*'p=f32,c=bf16'"):
        parse_precision(policy)
