"""What a user's own module:name may be."""

import pytest

from lockstep.errors import ConfigError
from lockstep.plugins import load_object, modules_beside


def test_a_function_of_a_module_is_found():
    assert load_object("math:sqrt", "metric")(9) == 3


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("sqrt", "metric is 'sqrt'; one of your own is module:name"),
        (":sqrt", "metric is ':sqrt'"),
        ("no_such_module:f", r"module 'no_such_module' could not be imported \(ModuleNotFoundError"),
        ("no_such_module.py:f", "Write no_such_module:f, and put the module beside the configuration"),
        ("math:squareroot", "module 'math' has no function 'squareroot'"),
        ("math:pi", "module 'math' has no function 'pi'.*it came from"),
    ],
)
def test_what_is_not_there_is_named(name, text):
    with pytest.raises(ConfigError, match=text):
        load_object(name, "metric")


def test_the_modules_beside_a_configuration_are_those_that_it_names(tmp_path):
    for name in ("judge.py", "unnamed.py", "parts/__init__.py", "data/train.jsonl", "http.py", "type.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    text = "{type: parts.inner:Reward, function: 'judge:score', url: http://x, more: data:f, none: missing:f}"
    assert modules_beside(str(tmp_path / "run.yaml"), text) == [str(tmp_path / "judge.py"), str(tmp_path / "parts")]
