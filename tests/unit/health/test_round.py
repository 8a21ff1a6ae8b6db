"""The health of a round: the same answer to different prompts, and the share of each state."""

from lockstep.health import Share, State, measure_round
from tests.unit.health.test_answer import CHATML, answered

REFUSAL = "I am sorry, but I can not help you with that request today."


def states(*answers):
    return [list(health.states) for health in measure_round(answers, CHATML).answers]


def test_the_same_answer_to_different_prompts():
    assert states(answered(REFUSAL, "a"), answered(f" {REFUSAL}\n", "b"), answered("Paris.", "c")) == [
        [State.SAME_ANSWER],
        [State.SAME_ANSWER],
        [],
    ]


def test_answers_to_one_prompt_and_short_ones_may_be_the_same():
    assert states(answered(REFUSAL, "a"), answered(REFUSAL, "a")) == [[], []]
    assert states(answered("Yes", "a"), answered("Yes", "b"), answered("", "c"), answered("", "d")) == [
        [],
        [],
        [State.EMPTY],
        [State.EMPTY],
    ]


def test_shares_have_every_state_and_how_many_answers_there_are():
    round_ = measure_round([answered(""), answered("Paris."), answered("x" + " ha" * 50), answered("Rome.")], CHATML)
    assert list(round_.shares) == [state.value for state in State]
    assert round_.shares["loop"] == Share(count=1, total=4) and round_.shares["empty"].value == 0.25
    assert round_.scalars() == {f"health/{state}": 0.25 * (state in ("loop", "empty")) for state in State}
    assert measure_round([], CHATML).scalars() == {} and Share(count=0, total=0).value == 0.0
