"""What a process prints of an error."""

import jax.numpy as jnp

from lockstep.testing.failure import SHOWN_CHARACTERS, print_failure, shown


def fail(loss):
    text = "x" * 1000
    assert loss == 1.5, text[:1]


def test_the_stack_and_the_variables_of_the_test_are_printed(capsys):
    try:
        fail(jnp.zeros((2, 3)).sum().item())
    except AssertionError as error:
        print_failure(error, __file__)
    text = capsys.readouterr().err
    assert "AssertionError: x" in text and "in fail\n    assert loss == 1.5" in text
    assert "where fail had:\n    loss = 0.0\n    text = '" in text
    assert all(len(line) < SHOWN_CHARACTERS + 30 for line in text.splitlines())


def test_an_error_from_elsewhere_has_its_stack_alone(capsys):
    try:
        fail(0)
    except AssertionError as error:
        print_failure(error, "another.py")
    text = capsys.readouterr().err
    assert "AssertionError" in text and "had:" not in text


def test_arrays_are_shown_by_shape_and_bad_values_by_their_type():
    class Bad:
        def __repr__(self):
            raise ValueError("no")

    assert shown({"a": jnp.ones((2, 3))}) == "{'a': f32[2,3]}"
    assert shown(Bad()) == "<a Bad that cannot be shown: ValueError>"
