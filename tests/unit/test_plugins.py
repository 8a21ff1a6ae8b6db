"""What a user's own module:name may be."""

import pytest

from lockstep.errors import ConfigError
from lockstep.plugins import load_object


def test_a_function_of_a_module_is_found():
    assert load_object("math:sqrt", "metric")(9) == 3


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("sqrt", "metric is 'sqrt'; one of your own is module:name"),
        (":sqrt", "metric is ':sqrt'"),
        ("no_such_module:f", r"module 'no_such_module' could not be imported \(ModuleNotFoundError"),
        ("math:squareroot", "module 'math' has no function 'squareroot'"),
        ("math:pi", "module 'math' has no function 'pi'"),
    ],
)
def test_what_is_not_there_is_named(name, text):
    with pytest.raises(ConfigError, match=text):
        load_object(name, "metric")
