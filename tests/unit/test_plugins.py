"""What a user's own module:name may be."""

import json
import os
import re
import sys

import pytest

from lockstep.errors import ConfigError
from lockstep.plugins import go_back, load_object, modules_beside, own_error_text, working_directory


def test_a_function_of_a_module_is_found():
    assert load_object("math:sqrt", "metric")(9) == 3


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("sqrt", "metric is 'sqrt'; one of your own is module:name"),
        (":sqrt", "metric is ':sqrt'"),
        ("no_such_module:f", r"module 'no_such_module' could not be imported \(ModuleNotFoundError"),
        ("no_such_module.py:f", "Write no_such_module:f, and put the module beside the configuration"),
        ("./parts/judge.py:f", "it must be module:name, no path. Write parts.judge:f"),
        ("/home/me/judge.py: f", "Write judge:f, and put the module beside"),
        ("math:squareroot", "module 'math' has no function 'squareroot'"),
        ("math:pi", "module 'math' has no function 'pi'.*it came from"),
    ],
)
def test_what_is_not_there_is_named(name, text):
    with pytest.raises(ConfigError, match=text):
        load_object(name, "metric")


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("import sys\n\nsys.exit('no key')", r"failed with SystemExit: no key \(pieces.py, line 3\)\. Correct"),
        ("import no_such_package", r"No module named 'no_such_package' \(pieces.py, line 1\)\. Correct"),
        ("def f(row, prompt)\n", r"SyntaxError: expected ':' \(pieces.py, line 1\)"),
        ("def __getattr__(name):\n    raise OSError(name)", r"OSError: f \(pieces.py, line 2\)"),
    ],
)
def test_a_module_that_fails_is_not_one_that_is_missing(source, text, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "pieces", raising=False)
    (tmp_path / "pieces.py").write_text(source)
    with pytest.raises(ConfigError, match=f"reward 'pieces:f': module 'pieces' was found, but importing it .*{text}"):
        load_object("pieces:f", "reward")


def test_a_module_that_changes_the_directory_has_no_say_in_where_the_run_writes(tmp_path, monkeypatch, caplog):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "wanderer.py").write_text(f"import os\n\nos.chdir({str(tmp_path)!r})\nf = print\n")
    before = os.getcwd()
    load_object("wanderer:f", "reward")
    assert os.getcwd() == before
    assert f"module 'wanderer' changed the working directory of the whole process to '{tmp_path}'" in caplog.text


def test_a_working_directory_that_was_removed_is_none_to_return_to(tmp_path, monkeypatch, caplog):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert working_directory() == ""
    go_back(working_directory(), "a metric")
    assert not caplog.text


def test_the_line_is_of_the_users_code_also_where_a_library_or_a_group_raised():
    def by_library():
        json.loads("{")

    def in_group():
        try:
            by_library()
        except ValueError as error:
            raise ExceptionGroup("two", [error, KeyError("b")]) from None

    for function, names in ((by_library, ("JSONDecodeError: ",)), (in_group, ("two", "; JSONDecodeError: ", "'b'"))):
        with pytest.raises(Exception) as caught:
            function()
        text = own_error_text(caught.value)
        assert all(name in text for name in names)
        assert re.search(r" \(test_plugins\.py, line \d+\)$", text)
    assert own_error_text(ValueError("x" * 50), 20) == "ValueError: xxxxx..."


def test_the_modules_beside_a_configuration_are_those_that_it_names(tmp_path):
    for name in ("judge.py", "unnamed.py", "parts/__init__.py", "data/train.jsonl", "http.py", "type.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    text = "{type: parts.inner:Reward, function: 'judge:score', url: http://x, more: data:f, none: missing:f}"
    assert modules_beside(str(tmp_path / "run.yaml"), text) == [str(tmp_path / "judge.py"), str(tmp_path / "parts")]
