"""The choice of a replica: the same as that of a rule which asks one replica after the other."""

from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.engine.schedule.admission import Admission
from lockstep.engine.schedule.replica import Replica
from tests.unit.engine.schedule.placements import choose
from tests.unit.engine.schedule.test_replica import PAGE, sequence_of
from tests.unit.engine.schedule.test_scheduler import capacity_of

PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=8).map(tuple)


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(6, 16),
    st.booleans(),
    st.lists(st.tuples(PROMPTS, st.integers(1, 4), st.booleans(), st.integers(0, 20)), max_size=30),
)
def test_it_is_the_choice_of_one_after_the_other(replicas, slots, pages, copies, steps):
    capacity = capacity_of(page_size=PAGE, slots=slots, pages=pages, replicas=replicas, page_copies=int(copies))
    made = [Replica(index, capacity) for index in range(replicas)]
    admission, active = Admission(capacity, made), []
    for number, (prompt, new, crowded, leaves) in enumerate(steps):
        sequence = sequence_of(number, prompt, new)
        found = admission.choose(sequence, crowded=crowded)
        assert found is choose(made, sequence, crowded)
        if found is not None:
            found.admit(sequence)
            active.append(sequence)
        elif active:
            sequence = active.pop(leaves % len(active))
            found = made[sequence.replica]
            found.release(sequence)
        if found is not None:
            admission.update(found)
    for sequence in active:
        made[sequence.replica].release(sequence)
    assert not made[0].holders, "what nobody has is listed nowhere"


def test_replicas_that_are_idle_are_given_nothing() -> None:
    capacity = capacity_of(page_size=PAGE, slots=2, replicas=4, idle_replicas=2)
    made = [Replica(index, capacity) for index in capacity.active_replicas]
    admission, found = Admission(capacity, made), []
    for number in range(5):
        sequence = sequence_of(number, (number, number))
        replica = admission.choose(sequence, crowded=False)
        found.append(None if replica is None else replica.index)
        if replica is not None:
            replica.admit(sequence)
            admission.update(replica)
    assert found == [0, 2, 0, 2, None]
