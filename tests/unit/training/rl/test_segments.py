from lockstep.training.rl.segments import Segment, single_turn
from tests.unit.training.rl.made_up import completion


def test_a_single_turn_is_the_case_of_two_segments():
    answer = completion(0, 0, (4, 5))
    assert single_turn((1, 2), answer) == (Segment(tokens=(1, 2)), Segment(tokens=(4, 5), completion=answer))
