import dataclasses

import pytest

from lockstep.check.compare import End, compare_launches, compare_values, hints
from lockstep.check.log import Launch, ProcessLog, Program, Put
from lockstep.check.stack import Frame


def at(line, file="train.py"):
    return (Frame(file=file, line=line, function="main", text="", own=True),)


def program(name, digest="1", *, shared=True, text="", arguments=()):
    processes = (0, 1) if shared else (0,)
    fields = {"name": name, "digest": digest, "processes": processes, "local": (0,), "text": text}
    return Program(number=0, arguments=arguments, **fields)


def log(index, *names, ended=True):
    """A process that launches programs of these names, each on a line of its own."""
    launches = [Launch(program=program(name), stack=at(sum(map(ord, name)))) for name in names]
    return ProcessLog(index=index, launches=launches, ended=ended)


def kinds(first, other, end=End.DONE):
    return [finding.kind for finding in compare_launches(first, other, end)[0]]


def test_equal_processes_have_no_finding_and_all_launches_are_pairs():
    findings, pairs = compare_launches(log(0, "a", "b"), log(1, "a", "b"), End.DONE)
    assert findings == [] and len(pairs) == 2


def test_one_process_only_names_both_places():
    ((finding,), pairs) = compare_launches(log(0, "a", "log", "b", "c"), log(1, "a", "b", "c"), End.DONE)
    assert finding.kind == "one_process"
    assert [(place.process, place.line.line) for place in finding.places] == [(0, sum(map(ord, "log"))), (1, ord("b"))]
    assert "launches b next" in finding.places[1].text
    assert len(pairs) == 3


def test_another_order():
    assert kinds(log(0, "a", "x", "y", "b", "c", "d"), log(1, "a", "y", "x", "b", "c", "d")) == ["order"]


def test_an_order_of_many_is_no_missing_program():
    first, other = log(0, *"axbcdefghz"), log(1, *"abcdefghxz")
    assert kinds(first, other) == ["order"]


def test_the_same_name_with_another_program_says_what_differs():
    one, other = log(0, "step"), log(1, "step")
    one.launches = [Launch(program=program("step", "1", text="a\nadd", arguments=("f32[4]",)), stack=at(1))]
    other.launches = [Launch(program=program("step", "2", text="a\nmul", arguments=("f32[5]",)), stack=at(1))]
    ((finding,), _) = compare_launches(one, other, End.DONE)
    assert finding.kind == "different_program"
    assert finding.details[:2] == ("-add", "+mul")
    assert "step(f32[4])" in finding.places[0].text and "step(f32[5])" in finding.places[1].text


def test_on_its_own_devices_each_process_may_run_a_program_of_its_own():
    """As JAX does where it cuts the part of each process out of a batch that all of them have."""
    one, other = log(0, "step"), log(1, "step")
    one.launches = [Launch(program=program("_multi_slice", "1", shared=False, text="slice 0:2"), stack=at(1))]
    other.launches = [Launch(program=program("_multi_slice", "2", shared=False, text="cut 2:4"), stack=at(1))]
    assert kinds(one, other) == []


def test_the_same_program_from_the_branches_of_an_if_is_fine():
    first, other = log(0, "a", "b"), log(1, "a", "b")
    other.launches[1] = dataclasses.replace(other.launches[1], stack=at(7))
    findings, pairs = compare_launches(first, other, End.DONE)
    assert findings == [] and len(pairs) == 2


def test_lambdas_of_two_lines_are_two_programs():
    first, other = log(0, "a", "b"), log(1, "a", "b")
    first.launches[1] = Launch(program=program("<lambda>", "1"), stack=at(7))
    other.launches[1] = Launch(program=program("<lambda>", "2"), stack=at(8))
    assert kinds(first, other) == ["one_process", "one_process"]


def test_programs_that_differ_in_a_number_alone_are_different_values():
    one, other = log(0, "step"), log(1, "step")
    for process, digest in ((one, "1"), (other, "2")):
        text = f"constant dense<0.{digest}> : tensor<f32>"
        process.launches = [Launch(program=program("step", digest, text=text), stack=at(1))]
    assert kinds(one, other) == ["values"]


def test_launches_of_other_threads_have_no_order():
    first, other = log(0, "a", "b"), log(1, "a", "b")
    first.launches.insert(1, Launch(program=program("background"), stack=at(9), thread="loader"))
    assert kinds(first, other) == []


@pytest.mark.parametrize(("end", "kind"), [(End.DONE, "one_process"), (End.HUNG, "some_enter"), (End.FAILED, None)])
def test_what_a_missing_last_launch_means_depends_on_the_end(end, kind):
    assert kinds(log(0, "a", "b", "c"), log(1, "a"), end)[:1] == ([kind] if kind else [])


def test_one_that_waits_is_found_once_and_the_other_is_said_to_have_ended():
    ((finding,), _) = compare_launches(log(0, "a", "b", "c"), log(1, "a"), End.HUNG)
    assert finding.places[0].text.startswith("waits in b")
    assert finding.places[1].text == "has come to its end"


def test_copies_of_an_argument_that_differ():
    first, other = log(0, "step"), log(1, "step")
    first.launches = [dataclasses.replace(first.launches[0], values=((1, "aa", "0.1"),))]
    other.launches = [dataclasses.replace(other.launches[0], values=((1, "bb", "1.1"),))]
    _, pairs = compare_launches(first, other, End.DONE)
    (finding,) = compare_values(first, other, pairs)
    assert [place.text for place in finding.places] == ["passes 0.1", "passes 1.1"]
    assert list(compare_values(first, first, [(pairs[0][0], pairs[0][0])])) == []


def test_only_pieces_that_both_processes_have_must_be_equal():
    first, other = ProcessLog(index=0), ProcessLog(index=1)
    first.puts.append(Put(array="f32[8]", pieces={"0:4": "aa"}, stack=at(3)))
    other.puts.append(Put(array="f32[8]", pieces={"4:8": "bb"}, stack=at(3)))
    assert list(compare_values(first, other, [])) == []
    first.puts.append(Put(array="f32[8]", pieces={"0:8": "aa"}, stack=at(3)))
    other.puts.append(Put(array="f32[8]", pieces={"0:8": "bb"}, stack=at(3)))
    assert [finding.kind for finding in compare_values(first, other, [])] == ["values"]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("for name in set(names):", "set"),
        ("if time.monotonic() > limit:", "clocks"),
        ("for path in directory.iterdir():", "directory"),
        ("x = x + 1", None),
    ],
)
def test_hints_at_what_differs_between_processes(tmp_path, line, why):
    script = tmp_path / "train.py"
    script.write_text(f"{line}\n    launch()\n")
    (found) = hints(Launch(program=program("a"), stack=at(2, str(script))))
    assert (why is None and not found) or why in found[0]
