from lockstep.check.findings import KINDS, Finding, Findings, Place
from lockstep.check.stack import Frame


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
