"""The functions of the block do what their sources say; the models that use them are compared elsewhere."""

import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.models import block

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("axes", [1, 2])
def test_a_norm_is_over_the_axes_of_its_weight(offset: float, axes: int) -> None:
    x = RNG.standard_normal((3, 4, 6)).astype(np.float32)
    weight = RNG.standard_normal((4, 6)[2 - axes :]).astype(np.float32)
    mean = (x.astype(np.float64) ** 2).mean(tuple(range(-axes, 0)), keepdims=True)
    want = x / np.sqrt(mean + 1e-3) * (weight + offset)
    np.testing.assert_allclose(block.Norm(1e-3, offset)(x, weight), want, rtol=1e-5)
    assert block.Norm(1e-3)(x, None) is x
    assert block.Norm(1e-3)(jnp.asarray(x, jnp.bfloat16), weight.astype(jnp.bfloat16)).dtype == jnp.bfloat16


def test_rotation_turns_each_pair_by_its_angle() -> None:
    x, angles = RNG.standard_normal((5, 6)), block.rope_angles(jnp.arange(5), [np.array([1.0, 0.5, 0.1], np.float32)])
    turned = (x[:, :3] + 1j * x[:, 3:]) * np.exp(1j * np.asarray(angles))
    got = np.asarray(block.rotate(jnp.asarray(x, jnp.float32), jnp.cos(angles), jnp.sin(angles)))
    np.testing.assert_allclose(got, np.concatenate([turned.real, turned.imag], axis=1), atol=1e-5)
    assert block.rope_angles(jnp.arange(5), [np.ones(3), np.ones(3)]).shape == (2, 5, 3)
    factors = np.array([1, 2, 4], np.float32), 2
    assert block.rope_angles(jnp.arange(5), [np.ones(3)], [factors])[:, 3].tolist() == [1, 1, 2, 2, 4]
    queries = block.Rotary(jnp.ones((5, 3)), jnp.zeros((5, 3)), jnp.full((5, 1), 2.0)).of_queries
    assert [float(part[0, 0]) for part in queries] == [2, 0]


def test_a_gated_norm_is_times_a_gate_of_low_rank() -> None:
    x, down, up = (RNG.standard_normal(shape).astype(np.float32) for shape in ((3, 6), (6, 2), (2, 6)))
    low = x @ down
    want = x / (1 + np.exp(-((low / (1 + np.exp(-low))) @ up)))
    np.testing.assert_allclose(block.gated_norm(x, down, up), want, rtol=1e-5)
    assert block.gated_norm(x, None, None) is x


def test_exclusive_attention_has_no_part_along_its_own_value() -> None:
    attended, v = (RNG.standard_normal(shape).astype(np.float32) for shape in ((3, 4, 6), (3, 1, 6)))
    left = block.exclusive(jnp.asarray(attended), jnp.asarray(v))
    np.testing.assert_allclose((left * v).sum(-1), 0, atol=1e-5)
    # What is gone is a multiple of the value.
    gone = attended - np.asarray(left)
    np.testing.assert_allclose(gone, (gone * v).sum(-1, keepdims=True) / (v * v).sum(-1, keepdims=True) * v, atol=1e-5)
    assert not np.any(block.exclusive(jnp.ones((2, 6)), jnp.zeros((2, 6))) - 1), "a value of zeros takes nothing"


def test_unit_norms_and_gates_of_heads() -> None:
    x = RNG.standard_normal((3, 6)).astype(np.float32)
    np.testing.assert_allclose(
        block.unit_norm(jnp.asarray(x), 1e-3), x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-3), rtol=1e-5
    )
    assert block.unit_norm(x, None) is x
    np.testing.assert_allclose(block.head_gates(jnp.array([0.0, 50.0, -50.0])), [1, 2, 0], atol=1e-6)


def test_scales_and_caps() -> None:
    q = jnp.ones((2, 4))
    assert block.scale_queries(q, None) is q and block.scaled(q, None) is q and block.soft_cap(q, None) is q
    np.testing.assert_allclose(block.scale_queries(q, 0.25), 0.5)
    np.testing.assert_allclose(block.scaled(q, 3.0), 3.0)
    np.testing.assert_allclose(block.soft_cap(q, 2.0), 2 * np.tanh(0.5), rtol=1e-6)


def test_the_gate_is_activated() -> None:
    np.testing.assert_allclose(block.hidden("relu", jnp.full(3, 2.0), jnp.array([-1.0, 0.0, 3.0])), [0, 0, 6])
    np.testing.assert_allclose(block.hidden("relu2", jnp.array([-1.0, 0.0, 3.0]), None), [0, 0, 9])
    p, n, beta, eps = (jnp.float32(each) for each in (0.2, -1.0, 0.5, -1e-6))
    x = jnp.array([-1.0, 2.0])
    alpha_p, alpha_n = np.log1p(np.exp(0.2)), 0.5 + np.log1p(np.exp(-1.0))
    want = [(np.expm1(-1.0) + 1.0) * alpha_n - 0.5, alpha_p * 4 + 0.5 * 2]
    np.testing.assert_allclose(block.hidden("xielu", x, None, (p, n, beta, eps)), want, rtol=1e-5)


def test_a_part_of_a_head_is_rotated_and_the_rest_kept():
    x = np.random.default_rng(0).standard_normal((3, 10)).astype(np.float32)
    angles = np.random.default_rng(1).standard_normal((3, 3)).astype(np.float32)
    got = block.rotate(x, np.cos(angles), np.sin(angles))
    np.testing.assert_array_equal(got[:, 6:], x[:, 6:])
    np.testing.assert_array_equal(got[:, :6], block.rotate(x[:, :6], np.cos(angles), np.sin(angles)))
