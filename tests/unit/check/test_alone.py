import dataclasses

from lockstep.check.alone import ProcessChecks
from lockstep.check.findings import Frame
from lockstep.check.log import Comparison, Launch, ProcessLog, Program


def at(line):
    return (Frame(file="train.py", line=line, function="main", text="", own=True),)


STEP = Program(number=0, name="step", digest="1", processes=(0, 1), local=(0,), arguments=("f32[8]", "f32[]"), text="")


def look(*events):
    log = ProcessLog(index=0)
    alone, found = ProcessChecks(log), []
    for event in events:
        if isinstance(event, Launch) and event.program.shared and event.thread not in log.shared_threads:
            log.shared_threads.append(event.thread)
        found += alone.see(event)
    return [*found, *alone.rest()]


def test_a_loop_of_one_program_is_fine():
    assert look(*[Launch(program=STEP, stack=at(1), live=10, keys=3)] * 20) == []


def test_a_second_thread_is_found_only_for_programs_of_several_processes():
    main, second = Launch(program=STEP, stack=at(1)), Launch(program=STEP, stack=at(9), thread="loader")
    (finding,) = look(main, second)
    assert finding.kind == "thread" and finding.places[0].line.line == 9
    own = dataclasses.replace(STEP, processes=(0,))
    assert look(main, dataclasses.replace(second, program=own)) == []
    assert look(second, second) == []  # all from one thread
    (finding,) = look(second, main)  # found when the main thread launches one too
    assert finding.places[0].line.line == 9 and finding.places[1].line.line == 1


def test_a_comparison_is_a_finding_from_a_mebibyte_on_a_pod():
    (finding,) = look(Comparison(size=1 << 14, stack=at(4)), Comparison(size=(1 << 14) - 1, stack=at(5)))
    assert finding.kind == "comparison" and "1.00 MiB" in finding.text and finding.places[0].line.line == 4


def test_a_program_compiled_again_says_which_argument_changed():
    other = dataclasses.replace(STEP, number=1, digest="2", arguments=("f32[6]", "f32[]"))
    launches = [Launch(program=STEP, stack=at(1))] * 3
    (finding,) = look(*launches, Launch(program=other, stack=at(1)))
    assert finding.kind == "retrace" and finding.details == ("argument 0: f32[8] became f32[6]",)
    assert look(*launches[:2], Launch(program=other, stack=at(1))) == []  # still warming up
    assert look(*launches, Launch(program=other, stack=at(2))) == []  # another line


def test_shapes_of_what_is_made_before_the_first_step_are_no_retrace():
    """An optimizer's state: one eager operation per parameter, more of them than there are steps."""
    cast = dataclasses.replace(STEP, name="convert_element_type", digest="3", number=3, arguments=("float32[]",))
    count = dataclasses.replace(cast, digest="4", number=4, arguments=("int32[]",))
    made = [Launch(program=cast, stack=at(7))] * 20 + [Launch(program=count, stack=at(7))]
    steps = [Launch(program=STEP, stack=at(1))] * 10
    assert look(*made, *steps) == []
    assert [finding.kind for finding in look(*steps, *made, *steps)] == ["retrace"]


def test_an_operation_may_have_a_second_shape_but_not_a_third():
    first, second, third = (
        dataclasses.replace(
            STEP, name="jit(add)", operation=True, number=number, digest=str(number), arguments=(shape,)
        )
        for number, shape in enumerate(["f32[8]", "f32[6]", "f32[5]"])
    )
    launches = [Launch(program=first, stack=at(1))] * 3 + [Launch(program=second, stack=at(1))] * 3
    assert look(*launches) == []
    (finding,) = look(*launches, Launch(program=third, stack=at(1)))
    assert finding.details == ("argument 0: f32[6] became f32[5]",)


def test_a_function_object_made_anew_is_named_as_such():
    again = [Launch(program=dataclasses.replace(STEP, number=number), stack=at(1)) for number in range(4)]
    (finding,) = look(*again)
    assert "another function object" in finding.details[0]


def test_growth_of_arrays_names_where_they_are_made_and_growth_of_keys_a_key():
    steps = [
        Launch(
            program=STEP,
            stack=at(1),
            live=10 + n,
            kinds=(("f32[]", at(7), n + 1),),
            keys=n,
            setters=((f"metrics/{n}", at(9), n), ("heartbeat", at(8), 1)),
        )
        for n in range(12)
    ]
    assert len(look(*steps[:10])) == 2 and not look(*steps[:6])
    arrays, keys = look(*steps)
    assert arrays.kind == keys.kind == "growth"
    assert arrays.places[0].line.line == 7 and "11 more f32[]" in arrays.places[0].text
    assert "'metrics/11'" in keys.places[0].text and keys.places[0].line.line == 9


def test_a_loop_that_initialises_parameters_and_ends_is_no_growth():
    layers = [Launch(program=STEP, stack=at(1), live=n) for n in range(20)]
    training = [Launch(program=STEP, stack=at(2), live=20) for _ in range(10)]
    assert look(*layers, *training) == []


def test_an_operation_for_each_leaf_at_the_end_is_no_growth_but_a_loop_of_operations_can_grow():
    """What saves a model copies it leaf by leaf, more often than there were steps."""
    copy = dataclasses.replace(STEP, name="jit(copy)", operation=True, number=1, digest="2")
    training = [Launch(program=STEP, stack=at(1), live=20) for _ in range(10)]
    leaves = [Launch(program=copy, stack=at(2), live=20 + n) for n in range(30)]
    assert look(*training, *leaves) == []
    assert [finding.kind for finding in look(*leaves)] == ["growth"]


def test_what_is_freed_now_and_then_does_not_grow():
    assert look(*[Launch(program=STEP, stack=at(1), live=10 + n % 5) for n in range(20)]) == []


def test_a_donated_array_names_both_lines():
    (finding,) = look(Launch(program=STEP, stack=at(5), donated=((0, at(2)),)))
    assert finding.kind == "donated" and [place.line.line for place in finding.places] == [5, 2]
