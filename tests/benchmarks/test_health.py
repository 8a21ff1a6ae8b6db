"""The benchmark of the health of answers measures what it says."""

from benchmarks import health
from lockstep.health import State, Vocabulary, measure_round


def test_the_answers_have_1000_tokens_and_most_states_of_a_long_answer():
    answers = health.answers()
    assert {len(answer.completion.tokens) for answer in answers} == {health.TOKENS} == {1_000}
    found = measure_round(answers, Vocabulary()).shares
    assert all(found[state].count for state in (State.LOOP, State.CUT, State.SPECIAL_TOKEN, State.OTHER_SCRIPT))
    assert found[State.CUT].value == 1
