import json
import sys
import threading

from lockstep.check import stack


def test_the_innermost_own_line_is_found_below_libraries():
    keys = []
    json.loads("{}", object_hook=lambda found: keys.append(stack.here()))
    found = stack.frames(keys[0])
    own = stack.own_line(found)
    assert own.file == __file__ and "keys.append" in own.text
    assert any(frame.file == json.decoder.__file__ and not frame.own for frame in found)


def test_without_an_own_line_it_is_the_innermost():
    library = stack.Frame(file="/x/site-packages/y.py", line=1, function="f", text="", own=False)
    assert stack.own_line((library,)) is library and stack.own_line(()) is None


def test_jax_and_what_only_calls_others_are_left_out():
    assert stack.is_hidden("/x/site-packages/jax/_src/pjit.py") and stack.is_hidden("<frozen runpy>")
    assert stack.is_hidden(threading.__file__) and not stack.is_hidden("/x/site-packages/optax/base.py")
    assert not stack.is_hidden("/home/me/jax/train.py")
    assert len(stack.walk(sys._getframe())) <= stack.DEEPEST
