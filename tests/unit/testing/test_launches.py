"""Checks of what is compiled; launches of several processes are compared in tests/multiprocess/test_pool.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.check import cache_miss_logger
from lockstep.testing import assert_no_retrace


@jax.jit
def scaled(batch, factor):
    return batch * factor


def test_the_same_shapes_pass():
    batch = np.ones((3, 5), np.float32)
    scaled(batch, 2.0)
    with assert_no_retrace():
        scaled(2 * batch, 3.0)


def test_another_shape_is_named_with_the_argument_that_changed():
    scaled(np.ones((3, 5), np.float32), 2.0)
    with pytest.raises(AssertionError) as caught, assert_no_retrace():
        scaled(np.ones((4, 5), np.float32), 2.0)
    text = str(caught.value)
    assert text.startswith("compiled inside: jit(scaled). Call each program once before"), text
    assert "batch" in text and "f32[4,5]" in text and "f32[3,5]" in text, text


def test_a_function_that_is_made_anew_at_each_step_is_found():
    def step():
        return jax.jit(lambda x: x + 1)(1.0)

    step()
    with pytest.raises(AssertionError, match=r"compiled inside: jit\(<lambda>\)"), assert_no_retrace():
        step()


def test_a_first_eager_operation_is_found_and_the_next_is_not():
    with pytest.raises(AssertionError, match="compiled inside: "), assert_no_retrace():
        jnp.ones((7, 3, 1, 2)).sum()
    with assert_no_retrace():
        jnp.ones((7, 3, 1, 2)).sum()


def test_nothing_of_it_stays_and_errors_pass_through():
    logger = cache_miss_logger()
    before = (list(logger.handlers), logger.propagate, jax.config.jax_explain_cache_misses)
    with pytest.raises(KeyError), assert_no_retrace():
        raise KeyError
    assert (list(logger.handlers), logger.propagate, jax.config.jax_explain_cache_misses) == before
