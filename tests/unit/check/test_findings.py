import json
import sys
import threading

from lockstep.check import findings
from lockstep.check.findings import KINDS, Finding, Findings, Frame, Place


def finding(line, *processes, kind="order"):
    frame = Frame(file="train.py", line=line, function="main", text="step()", own=True)
    places = tuple(Place(process=process, text="launches", stack=(frame,)) for process in processes)
    return Finding(kind=kind, text="", places=places)


def merged(findings):
    """What is left of them, one at a time."""
    found = Findings()
    for each in findings:
        found.add(each)
    return list(found)


def test_the_first_at_its_line_is_told_from_those_that_follow():
    found = Findings()
    assert [found.add(each) for each in (finding(3, 0), finding(3, 1), finding(4, 0))] == [True, False, True]


def test_the_same_at_each_step_is_one_finding_with_a_count():
    (one,) = merged([finding(3, 0, 1)] * 5)
    assert one.count == 5 and len(one.places) == 2


def test_the_same_on_another_process_adds_its_place():
    (one,) = merged([finding(3, 0), finding(3, 0), finding(3, 1), finding(3, 1)])
    assert [place.process for place in one.places] == [0, 1] and one.count == 2


def test_other_lines_and_kinds_stay_apart():
    assert len(merged([finding(3, 0), finding(4, 0), finding(3, 0, kind="donated")])) == 3


def test_json_has_the_line_the_stack_and_what_to_change():
    (place,) = finding(3, 1).as_json()["places"]
    assert place == {
        "process": 1,
        "text": "launches",
        "line": "train.py:3",
        "source": "step()",
        "stack": ["train.py:3 main"],
    }
    assert finding(3, 1).as_json()["fix"] == KINDS["order"].fix


def test_the_innermost_own_line_is_found_below_libraries():
    keys = []
    json.loads("{}", object_hook=lambda found: keys.append(findings.here()))
    found = findings.frames(keys[0])
    own = findings.own_line(found)
    assert own.file == __file__ and "keys.append" in own.text
    assert any(frame.file == json.decoder.__file__ and not frame.own for frame in found)


def test_without_an_own_line_it_is_the_innermost():
    library = findings.Frame(file="/x/site-packages/y.py", line=1, function="f", text="", own=False)
    assert findings.own_line((library,)) is library and findings.own_line(()) is None


def test_jax_and_what_only_calls_others_are_left_out():
    assert findings.is_hidden("/x/site-packages/jax/_src/pjit.py") and findings.is_hidden("<frozen runpy>")
    assert findings.is_hidden(threading.__file__) and not findings.is_hidden("/x/site-packages/optax/base.py")
    assert not findings.is_hidden("/home/me/jax/train.py")
    assert len(findings.walk(sys._getframe())) <= findings.DEEPEST
