"""Rewards by worker threads: values, failures, and what comes too late."""

import asyncio
import threading

import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.training.rl.scoring import LATE, Scoring, as_number, try_rewards
from tests.unit.training.rl.made_up import prompt, row


async def waits(answer, question):
    await asyncio.sleep(0.01)
    return answer.num_tokens


def test_every_answer_has_every_component():
    scoring = Scoring({"sync": lambda answer, question: answer.num_tokens / 2, "async": waits}, workers=3)
    for number in range(20):
        scoring.submit(number, row("", num_tokens=number), prompt())
    assert all(thread.daemon for thread in scoring._threads), "a process that ends would wait for one that hangs"
    assert scoring.finish(30) == {number: {"sync": number / 2, "async": float(number)} for number in range(20)}


def test_one_that_raises_costs_its_own_value_alone():
    def odd(answer, question):
        if answer.num_tokens % 2:
            raise RuntimeError("the judge is out")
        return 1

    async def fails(answer, question):
        raise SystemExit("no")

    scoring = Scoring({"odd": odd, "fails": fails, "fine": lambda answer, question: np.float32(3)}, workers=2)
    for number in range(4):
        scoring.submit(number, row("", num_tokens=number), prompt())
    found = scoring.finish(30)
    assert [found[number]["odd"] for number in range(4)] == [1.0, "RuntimeError: the judge is out"] * 2
    assert {each["fails"] for each in found.values()} == {"SystemExit: no"}
    assert {each["fine"] for each in found.values()} == {3.0}


def test_one_that_hangs_holds_up_nothing():
    """The other worker computes the rest; when the time is over, the value is late."""
    released = threading.Event()

    def hangs(answer, question):
        if answer.num_tokens == 0:
            released.wait(600)
        return 1.0

    scoring = Scoring({"hangs": hangs}, workers=2)
    for number in range(6):
        scoring.submit(number, row("", num_tokens=number), prompt())
    found = scoring.finish(2.0)
    released.set()
    assert {number: each["hangs"] for number, each in found.items()} == {0: LATE, **dict.fromkeys(range(1, 6), 1.0)}


def test_a_reward_cannot_launch_a_program():
    def launches(answer, question):
        return float(jnp.zeros(3).sum())

    assert "no_execution" in try_rewards({"launches": launches}, row(""), prompt(), 30)["launches"]


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (None, "None, which is not a number"),
        ("1", "'1', which is not a number"),
        ([1], r"\[1\], which is not a number"),
        (float("nan"), "nan, which is not finite"),
        (float("inf"), "inf, which is not finite"),
    ],
)
def test_what_is_no_number(value, error):
    with pytest.raises((TypeError, ValueError), match=error):
        as_number(value)


def test_what_is_a_number():
    assert [as_number(each) for each in (True, 2, np.float32(0.5), np.array(3))] == [1.0, 2.0, 0.5, 3.0]
