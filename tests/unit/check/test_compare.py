import dataclasses
import random

import pytest

from lockstep.check.compare import NEAR, End, Gap, LaunchComparison, gaps
from lockstep.check.findings import Frame
from lockstep.check.log import Launch, ProcessLog, Program


def at(line, file="train.py"):
    return (Frame(file=file, line=line, function="main", text="", own=True),)


def program(name, digest="1", *, shared=True, text="", arguments=()):
    processes = (0, 1) if shared else (0,)
    fields = {"name": name, "digest": digest, "processes": processes, "local": (0,), "text": text}
    return Program(number=0, arguments=arguments, **fields)


def launches(*names):
    """Launches of programs of these names, each on a line of its own."""
    return [Launch(program=program(name), stack=at(sum(map(ord, name)))) for name in names]


def compared(left, right, end=End.DONE, *, piece=None):
    """The findings, where both come in pieces of so many launches (all at once by default)."""
    logs = [ProcessLog(index=index, ended=True) for index in (0, 1)]
    comparison = LaunchComparison(*logs)
    found, step = [], piece or max(len(left), len(right), 1)
    for begin in range(0, max(len(left), len(right)), step):
        found += comparison.add(left[begin : begin + step], right[begin : begin + step])
    return [*found, *comparison.rest(end)]


def kinds(left, right, end=End.DONE):
    return [finding.kind for finding in compared(left, right, end)]


def test_one_process_only_names_both_places():
    (finding,) = compared(launches("a", "log", "b", "c"), launches("a", "b", "c"))
    assert finding.kind == "one_process"
    assert [(place.process, place.line.line) for place in finding.places] == [(0, sum(map(ord, "log"))), (1, ord("b"))]
    assert "launches b next" in finding.places[1].text


def test_another_order_is_no_missing_program():
    assert kinds(launches("a", "x", "y", "b", "c", "d"), launches("a", "y", "x", "b", "c", "d")) == ["order"]
    assert kinds(launches(*"axbcdefghz"), launches(*"abcdefghxz")) == ["order"]


def test_the_same_name_with_another_program_says_what_differs():
    one = [Launch(program=program("step", "1", text="a\nadd", arguments=("f32[4]",)), stack=at(1))]
    other = [Launch(program=program("step", "2", text="a\nmul", arguments=("f32[5]",)), stack=at(1))]
    (finding,) = compared(one, other)
    assert finding.kind == "different_program"
    assert finding.details[:2] == ("-add", "+mul")
    assert "step(f32[4])" in finding.places[0].text and "step(f32[5])" in finding.places[1].text


def test_on_its_own_devices_each_process_may_run_a_program_of_its_own():
    """As JAX does where it cuts the part of each process out of a batch that all of them have."""
    one = [Launch(program=program("_multi_slice", "1", shared=False, text="slice 0:2"), stack=at(1))]
    other = [Launch(program=program("_multi_slice", "2", shared=False, text="cut 2:4"), stack=at(1))]
    assert kinds(one, other) == []


def test_the_same_program_from_the_branches_of_an_if_is_fine():
    first, other = launches("a", "b"), launches("a", "b")
    other[1] = dataclasses.replace(other[1], stack=at(7))
    assert compared(first, other) == []


def test_lambdas_of_two_lines_are_two_programs():
    first, other = launches("a", "b"), launches("a", "b")
    first[1] = Launch(program=program("<lambda>", "1"), stack=at(7))
    other[1] = Launch(program=program("<lambda>", "2"), stack=at(8))
    assert kinds(first, other) == ["one_process", "one_process"]


def test_programs_that_differ_in_a_number_alone_are_different_values():
    one, other = (
        [Launch(program=program("step", digest, text=f"constant dense<0.{digest}> : tensor<f32>"), stack=at(1))]
        for digest in "12"
    )
    assert kinds(one, other) == ["values"]


@pytest.mark.parametrize(("end", "kind"), [(End.DONE, "one_process"), (End.HUNG, "some_enter"), (End.FAILED, None)])
def test_what_a_missing_last_launch_means_depends_on_the_end(end, kind):
    assert kinds(launches("a", "b", "c"), launches("a"), end)[:1] == ([kind] if kind else [])


def test_one_that_waits_is_found_once_and_the_other_is_said_to_have_ended():
    (finding,) = compared(launches("a", "b", "c"), launches("a"), End.HUNG)
    assert finding.places[0].text.startswith("waits in b")
    assert finding.places[1].text == "has come to its end"


def test_a_difference_is_decided_while_the_run_goes_on_and_said_at_every_step():
    comparison = LaunchComparison(ProcessLog(index=0), ProcessLog(index=1))
    found, most = [], 0
    for _ in range(500):
        found += comparison.add(launches("step", "log"), launches("step"))
        most = max(most, *comparison.ahead)
    assert {finding.kind for finding in found} == {"one_process"} and len(found) > 300
    assert most <= 6 * NEAR  # what waits does not grow with the run


@pytest.mark.parametrize("piece", [1, 7, 1000])
def test_it_does_not_matter_how_much_comes_at_a_time(piece):
    names = [chr(ord("a") + index % 23) for index in range(400)]
    changed = [*names[:60], "log", *names[60:200], *names[201:300], names[301], names[300], *names[302:]]
    found = compared(launches(*names), launches(*changed), piece=piece)
    assert sorted(finding.kind for finding in found) == ["one_process", "one_process", "order"]


def test_one_that_is_far_ahead_is_no_difference():
    comparison = LaunchComparison(ProcessLog(index=0), ProcessLog(index=1))
    assert list(comparison.add(launches("a") * 5000, launches("a"))) == []
    assert comparison.ahead == (4999, 0) and not comparison.differs
    assert list(comparison.rest(End.GOES_ON)) == []


@pytest.mark.parametrize("extra", [["log"], ["log"] * 3])
def test_what_is_known_of_a_difference_before_others_follow(extra):
    comparison = LaunchComparison(ProcessLog(index=0), ProcessLog(index=1))
    assert list(comparison.add(launches("a", *extra, "b"), launches("a", "b"))) == []
    for _ in range(2):  # looking changes nothing
        found = list(comparison.rest(End.GOES_ON))
        assert [(each.kind, each.text.partition(",")[0]) for each in found] == [("one_process", "log")] * len(extra)
    assert comparison.differs


def test_processes_that_have_nothing_in_common_are_given_up_in_pieces(monkeypatch):
    monkeypatch.setattr("lockstep.check.compare.MOST", 400)
    comparison = LaunchComparison(ProcessLog(index=0), ProcessLog(index=1))
    found = list(comparison.add(launches("a") * 1000, launches("b") * 1000))
    assert found and max(comparison.ahead) < 400


def stretches(left, right):
    return [(left[slice(*gap.left)], right[slice(*gap.right)]) for gap in gaps(left, right)]


@pytest.mark.parametrize(
    ("left", "right", "gap"),
    [
        ("abcabc", "abcabc", []),
        ("abxcabc", "abcabc", [("x", "")]),
        ("abcabc", "abcabcy", [("", "y")]),
        ("ab" + "z" * 300, "ab", [("z" * 300, "")]),
        ("stepLstepLstepL", "stepstepstep", [("L", "")] * 3),
        ("abxycdef", "abyxcdef", [("x", ""), ("", "x")]),
        ("aaa", "bbbb", [("aaa", "bbbb")]),
    ],
)
def test_only_what_differs_is_in_a_gap(left, right, gap):
    assert stretches(left, right) == gap


def longest_common(left, right):
    """The length of a longest common subsequence, by the table of all prefixes."""
    table = [[0] * (len(right) + 1) for _ in range(len(left) + 1)]
    for i, x in enumerate(left):
        for j, y in enumerate(right):
            table[i + 1][j + 1] = table[i][j] + 1 if x == y else max(table[i][j + 1], table[i + 1][j])
    return table[-1][-1]


@pytest.mark.parametrize("most", [0, 1, 3, 1000])
def test_what_is_between_gaps_is_equal_and_as_much_as_can_be(most):
    draw = random.Random(most)
    for _ in range(200):
        left, right = ("".join(draw.choices("abc", k=draw.randrange(12))) for _ in range(2))
        same = i = j = 0
        for gap in [*gaps(left, right, most), Gap(left=(len(left), 0), right=(len(right), 0))]:
            assert left[i : gap.left[0]] == right[j : gap.right[0]]
            same += gap.left[0] - i
            i, j = gap.left[1], gap.right[1]
        assert most < 1000 or same == longest_common(left, right)


def test_where_more_may_follow_what_one_has_left_is_the_last_gap():
    found = gaps("slslslsl", "ssssssss", open_end=True)
    assert [(gap.left, gap.right) for gap in found] == [
        ((1, 2), (1, 1)),
        ((3, 4), (2, 2)),
        ((5, 6), (3, 3)),
        ((7, 8), (4, 8)),
    ]
