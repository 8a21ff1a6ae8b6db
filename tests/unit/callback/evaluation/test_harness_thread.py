"""The thread that asks: questions and answers, errors before and after the last answers, work that hangs."""

import threading

import jax
import jax.numpy as jnp
import pytest

from lockstep.callback.evaluation.harness_thread import HarnessThread
from lockstep.errors import LaunchMismatchError, LockstepError


class Done:
    """What the thread reported at its end."""

    def __init__(self):
        self.found = []

    def __call__(self, result, error):
        self.found.append((result, error))


def started(work):
    done = Done()
    return HarnessThread(work, done), done


def test_questions_are_answered_and_the_result_comes_after_the_last():
    thread, done = started(lambda ask: [ask(["a"], False), ask(["b"], True)])
    first = thread.next_question(60)
    assert (first.requests, first.last) == (["a"], False)
    thread.answer(["A"])
    second = thread.next_question(60)
    assert (second.requests, second.last) == (["b"], True)
    thread.answer(["B"])
    assert thread.wait(60) and done.found == [([["A"], ["B"]], None)]


def test_work_that_ends_after_a_question_that_was_not_its_last_releases_the_hosts():
    thread, done = started(lambda ask: ask(["a"], False))
    thread.next_question(60)
    thread.answer(["A"])
    last = thread.next_question(60)
    assert (last.requests, last.last, done.found) == ([], True, [])
    thread.answer([])
    assert thread.wait(60) and done.found == [(["A"], None)]


def test_no_question_yet_is_none():
    free = threading.Event()
    thread, _ = started(lambda ask: free.wait(60) and ask(["a"], True))
    assert thread.next_question(0.01) is None and thread.alive
    free.set()
    assert thread.next_question(60).requests == ["a"]
    thread.give_up()
    assert thread.wait(60)


def test_an_error_before_the_last_answers_is_raised_where_questions_are_awaited():
    def work(ask):
        ask(["a"], False)
        raise KeyError("no such field")

    thread, done = started(work)
    thread.next_question(60)
    thread.answer([])
    with pytest.raises(KeyError, match="no such field"):
        thread.next_question(60)
    assert thread.wait(60) and done.found == []


def test_an_error_after_the_last_answers_is_reported():
    thread, done = started(lambda ask: ask(["a"], True)[7])
    thread.next_question(60)
    thread.answer([])
    assert thread.wait(60)
    ((result, error),) = done.found
    assert result is None and isinstance(error, IndexError)


def test_work_that_is_given_up_says_nothing():
    asked = []
    thread, done = started(lambda ask: asked.append(ask(["a"], False)))
    thread.next_question(60)
    thread.give_up()
    assert thread.wait(60) and asked == done.found == []


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (lambda ask: None, "the tasks have no questions"),
        (lambda ask: exit(3), "SystemExit: 3"),
    ],
)
def test_work_that_ends_without_a_question_is_an_error(work, message):
    with pytest.raises(LockstepError, match=message):
        started(work)[0].next_question(60)


def test_it_asks_nothing_after_its_last_question():
    thread, done = started(lambda ask: [ask(["a"], True), ask(["b"], True)])
    thread.next_question(60)
    thread.answer(["A"])
    assert thread.wait(60) and "asked again after its last question" in str(done.found[0][1])


def test_a_launch_in_it_raises():
    with pytest.raises(LaunchMismatchError, match="was launched inside leader-only work"):
        started(lambda ask: jax.block_until_ready(jnp.ones(3) + 1))[0].next_question(20)
