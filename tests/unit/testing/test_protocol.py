"""How another process finds a function."""

import sys

import jax.numpy as jnp
import pytest

from lockstep.testing.protocol import SHOWN_CHARACTERS, Reference, print_failure, shown


class TestClass:
    def method(self):
        return type(self).__name__


def function():
    return "found"


def test_a_function_and_a_method_are_found():
    reference = Reference.to(function)
    assert reference.load() is function
    method = Reference(module=__name__, name="TestClass.method", file=__file__)
    assert method.load()() == "TestClass"


def test_a_module_that_is_not_on_the_import_path_is_found_by_its_file(tmp_path):
    (tmp_path / "test_stranger.py").write_text("def body():\n    return __name__\n")
    reference = Reference(module="test_stranger", name="body", file=str(tmp_path / "test_stranger.py"))
    try:
        assert reference.load()() == "test_stranger"
        assert reference.load() is sys.modules["test_stranger"].body
    finally:
        del sys.modules["test_stranger"]


def test_a_file_comes_before_another_module_of_its_name(tmp_path):
    (tmp_path / "json.py").write_text("def body():\n    return 'mine'\n")
    import json

    try:
        assert Reference(module="json", name="body", file=str(tmp_path / "json.py")).load()() == "mine"
    finally:
        sys.modules["json"] = json


def test_a_module_that_cannot_be_imported_says_why(tmp_path):
    (tmp_path / "test_broken.py").write_text("import no_such_library\n")
    reference = Reference(module="test_broken", name="body", file=str(tmp_path / "test_broken.py"))
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        reference.load()
    assert "test_broken" not in sys.modules


def test_a_function_inside_another_is_refused():
    def inside():
        pass

    with pytest.raises(ValueError, match=r"inside cannot run in other processes.*Define it at the top of its module"):
        Reference.to(inside)


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
