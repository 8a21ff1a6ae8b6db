"""Rewards over several hosts, each with its share of the answers."""

import asyncio
import itertools
import os
import threading
import urllib.error

import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.errors import ConfigError, HostTimeoutError
from lockstep.exits import is_retried
from lockstep.hosts import Hosts, MemoryClient
from lockstep.hosts.fault import failure_code
from lockstep.report import as_number
from lockstep.text import Prompt
from lockstep.training.rl import rewarding
from lockstep.training.rl.rewarding import LATE, Rewarder, Scoring, try_rewards
from lockstep.training.rl.rewards import FunctionReward, LengthReward
from tests.multiprocess.harness import run_threads
from tests.unit.report.made_up import row
from tests.unit.training.rl.made_up import prompt

ANSWERS = 8
HANGS = threading.Event()


def picky(answer, question):
    """Fails for one answer, hangs for another, and gives no number for a third."""
    if answer.num_tokens == 3:
        raise RuntimeError("no opinion")
    if answer.num_tokens == 4:
        HANGS.wait()
    return None if answer.num_tokens == 6 else 1.0


def make(timeout_s=2.0, **values):
    rewards = [FunctionReward(function=f"{__name__}:picky", default=-1.0, **values), LengthReward(weight=0.5)]
    return Rewarder(rewards, max_new_tokens=10, workers=4, timeout_s=timeout_s)


def rewarded(hosts):
    rewarder = make(weight=2.0, on_failure="drop_group")
    scoring = rewarder.begin()
    for number in range(hosts.index, ANSWERS, hosts.count):
        scoring.submit(number, row("", num_tokens=number), prompt())
    with hosts.scope("rollout") as scope:
        found = rewarder.finish(scope, scoring, ANSWERS)
    return (
        found.total.tolist(),
        found.components["picky"].tolist(),
        found.failed,
        found.late,
        found.dropped.nonzero()[0],
    )


@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_every_host_gets_the_weighted_sums_of_all_answers(count, caplog):
    picky_values = [1, 1, 1, -1, -1, 1, -1, 1]
    expected = (2.0 * np.array(picky_values) + 0.5 * np.arange(ANSWERS) / 10).tolist()
    for total, values, failed, late, dropped in run_threads(rewarded, count):
        assert total == pytest.approx(expected) and values == picky_values
        assert failed == {"picky": 2, "length": 0} and late == {"picky": 1, "length": 0}
        assert dropped.tolist() == [3, 4, 6], "raised, late and without a number"
    assert "reward picky failed on process" in caplog.text
    assert "nothing is learned from the answers to that question" in caplog.text


@pytest.mark.parametrize(
    ("num_tokens", "text"), [(3, "RuntimeError: no opinion"), (6, "returned None, which is not a number")]
)
def test_a_reward_that_cannot_work_is_found_before_training(num_tokens, text):
    with pytest.raises(ConfigError, match=rf"picky was tried on the reference answer .*{text}.* a finite number"):
        make().check(row("18", num_tokens=num_tokens), prompt())
    make().check(row("18", num_tokens=1), prompt())


def judged(hosts, rewards, filter_by):
    rewarder = Rewarder(rewards, max_new_tokens=10, workers=4, timeout_s=20.0, filter_by=filter_by)
    scoring = rewarder.begin()
    for number in range(hosts.index, ANSWERS, hosts.count):
        scoring.submit(number, row("", num_tokens=number), prompt())
    with hosts.scope("rollout") as scope:
        return rewarder.finish(scope, scoring, ANSWERS)


def even(answer, question):
    """Whether the answer has an even number of tokens; one of 4 cannot be judged."""
    if answer.num_tokens == 4:
        raise RuntimeError("no opinion")
    return answer.num_tokens % 2 == 0


EVEN = [1, 0, 1, 0, 0, 0, 1, 0]


@pytest.mark.parametrize(
    ("filter_by", "expected"),
    [(None, 2 * np.array(EVEN)), ("even", EVEN), ("length", np.arange(ANSWERS) / 10)],
    ids=["those that judge", "one by name", "a shaping one by name"],
)
def test_what_decides_whether_answers_are_equally_right(filter_by, expected):
    rewards = [FunctionReward(function=f"{__name__}:even", weight=2.0), LengthReward(weight=-0.5)]
    for found in run_threads(judged, 2, rewards, filter_by):
        np.testing.assert_allclose(found.judged, expected)
    (alone,) = run_threads(judged, 1, [LengthReward(weight=-0.5)], None)
    assert alone.judged is None, "nothing but shaping: the totals decide"


def test_a_component_that_fails_is_in_the_log_once(caplog):
    hosts = Hosts(MemoryClient.hub(1)[0])
    rewarder = Rewarder([FunctionReward(function=f"{__name__}:even")], max_new_tokens=10, workers=1, timeout_s=20.0)
    for _ in range(2):
        scoring = rewarder.begin()
        scoring.submit(0, row("", num_tokens=4), prompt())
        with hosts.scope("rollout") as scope:
            found = rewarder.finish(scope, scoring, 1)
        assert found.failed == {"even": 1} and not found.dropped.any()
    assert caplog.text.count("reward even failed on process 0, its default is used: RuntimeError: no opinion") == 1


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

    class Awaited:
        def __await__(self):
            return (yield from asyncio.sleep(0, 4.0).__await__())

    async def fails(answer, question):
        raise SystemExit("no")

    working = {"fine": lambda *_: np.float32(3), "awaited": lambda *_: Awaited()}
    scoring = Scoring({"odd": odd, "fails": fails, **working}, workers=2)
    for number in range(4):
        scoring.submit(number, row("", num_tokens=number), prompt())
    values = scoring.finish(30)
    odd_values = [str(values[number]["odd"]).partition(" (test_")[0] for number in range(4)]
    assert odd_values == ["1.0", "RuntimeError: the judge is out"] * 2
    assert {of_answer["fails"].partition(" (test_")[0] for of_answer in values.values()} == {"SystemExit: no"}
    assert {of_answer["fine"] for of_answer in values.values()} == {3.0}
    assert {of_answer["awaited"] for of_answer in values.values()} == {4.0}


def test_its_text_has_no_secret_of_the_environment_of_the_process(monkeypatch):
    monkeypatch.setenv("JUDGE_API_KEY", "sk-abcdef0123456789")

    def refused(answer, question):
        raise RuntimeError(f"401 for {os.environ['JUDGE_API_KEY']} of https://u:p@judge/?a=b")

    wrong = try_rewards({"refused": refused}, row(""), prompt(), 30)
    assert wrong["refused"].startswith("RuntimeError: 401 for <redacted> of https://judge/?… (test_rewarding.py, line")


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

    text = try_rewards({"launches": launches}, row(""), prompt(), 30)["launches"]
    assert "' was launched inside leader-only work" in text
    assert "Use NumPy" in text and "(test_rewarding.py, line" in text


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (None, "None, which is not a number"),
        ("1", "'1', which is not a number"),
        ([1], r"\[1\], which is not a number"),
        (np.array([1.0, 2.0]), r"array\(\[1\., 2\.\]\), which is not a number"),
        (np.complex64(1j), "1j.*, which is not a number"),
        (np.array(1j), r"1\.j.*, which is not a number"),
        (float("nan"), "nan, which is not finite"),
        (float("inf"), "inf, which is not finite"),
    ],
)
def test_what_is_no_number(value, error):
    with pytest.raises((TypeError, ValueError), match=error):
        as_number(value)


def test_what_is_a_number():
    assert [as_number(each) for each in (True, 2, np.float32(0.5), np.array(3))] == [1.0, 2.0, 0.5, 3.0]


def unavailable(times):
    """A reward whose server answers 500 so many times."""
    calls = itertools.count()

    def reward(answer, question):
        if next(calls) < times:
            raise urllib.error.HTTPError("http://judge", 500, "Internal Server Error", {}, None)
        return 1.0

    return reward


def test_a_server_that_fails_for_a_moment_is_asked_again(monkeypatch):
    monkeypatch.setattr(rewarding, "PAUSES_S", (0.01, 0.01))
    assert try_rewards({"judge": unavailable(2)}, row(""), prompt(), 60.0) == {}
    text = try_rewards({"judge": unavailable(3)}, row(""), prompt(), 60.0)["judge"]
    assert "HTTP Error 500" in text and isinstance(text, rewarding.Outage)


DOWN = unavailable(1 << 30)


@pytest.mark.parametrize("on_failure", ["default", "drop_group"])
def test_an_outage_before_the_first_step_is_no_mistake_of_the_configuration(monkeypatch, caplog, on_failure):
    monkeypatch.setattr(rewarding, "PAUSES_S", (0.01,))
    configs = [FunctionReward(function=f"{__name__}:DOWN", on_failure=on_failure)]
    rewarder = Rewarder(configs, max_new_tokens=10, workers=1, timeout_s=60.0)
    if on_failure == "default":
        rewarder.check(row(""), prompt())
        assert "failed 2 times before the first step: HTTPError: HTTP Error 500" in caplog.text
        return
    with pytest.raises(HostTimeoutError, match="set on_failure: default"):
        rewarder.check(row(""), prompt())


def hangs_at_first(times):
    calls = itertools.count()

    def reward(answer, question):
        if next(calls) < times:
            HANGS.wait()
        return 1.0

    return reward


ONCE, ALWAYS = hangs_at_first(2), hangs_at_first(1 << 30)


@pytest.mark.parametrize(
    ("reward", "on_failure", "wait_s", "text"),
    [
        ("ONCE", "drop_group", 60.0, None),
        ("ALWAYS", "default", 60.0, "hangs took more than 0.5 s before the first step, 3 times. Its default is used"),
        ("ALWAYS", "drop_group", 60.0, "hangs took more than 0.5 s before the first step, 3 times. Check"),
        ("ALWAYS", "drop_group", 0.6, "hangs took more than 0.5 s before the first step, 1 times. Check"),
    ],
)
def test_a_reward_that_hangs_at_the_start_is_tried_again(monkeypatch, caplog, reward, on_failure, wait_s, text):
    monkeypatch.setattr(rewarding, "PAUSES_S", (0.01, 0.01))
    config = FunctionReward(function=f"{__name__}:{reward}", name="hangs", on_failure=on_failure)
    rewarder = Rewarder([config, LengthReward()], max_new_tokens=10, workers=1, timeout_s=0.5)
    if text is None or on_failure == "default":
        rewarder.check(row(""), prompt(), wait_s)
        assert (text or "") in caplog.text and ("default is used" in caplog.text) == (text is not None)
    else:
        with pytest.raises(HostTimeoutError, match=text) as caught:
            rewarder.check(row(""), prompt(), wait_s)
        assert is_retried(failure_code(caught.value))


class Untold(Exception):
    def __str__(self):
        raise RuntimeError("not even this")


@pytest.mark.parametrize("error", [asyncio.CancelledError, KeyboardInterrupt, GeneratorExit, Untold])
def test_whatever_a_reward_raises_its_worker_goes_on(error):
    async def cancelled(answer, question):
        raise error

    def raising(answer, question):
        raise error

    rewards = {"cancelled": cancelled, "raising": raising, "good": lambda answer, question: 1.0}
    scoring = Scoring(rewards, workers=1)
    for number in range(2):
        scoring.submit(number, row(""), prompt())
    for found in scoring.finish(60.0).values():
        assert found["good"] == 1.0 and error.__name__ in found["cancelled"] and error.__name__ in found["raising"]


def wanders(answer, question):
    os.chdir("/")
    return 1.0


def test_a_reward_that_changes_the_directory_has_no_say_in_where_the_run_writes(caplog):
    before = os.getcwd()
    config = FunctionReward(function=f"{__name__}:wanders")
    Rewarder([config], max_new_tokens=10, workers=1, timeout_s=60.0).check(row(""), prompt())
    assert os.getcwd() == before and "a reward changed the working directory" in caplog.text


def test_each_reward_has_a_question_of_its_own():
    question = Prompt(id=0, messages=({"role": "user", "content": "q"},), fields={"tests": ["a"]})

    def spoil(answer, question):
        question.fields["tests"].append("b")
        question.fields["seen"] = True
        question.messages[0]["content"] += "!"
        answer.metrics["seen"] = 1.0
        return len(question.fields["tests"])

    scoring = Scoring({"first": spoil, "second": spoil}, workers=1)
    answered = row("")
    scoring.submit(0, answered, question)
    assert scoring.finish(60.0)[0] == {"first": 2.0, "second": 2.0} and question.fields == {"tests": ["a"]}
    assert question.messages[0]["content"] == "q" and answered.metrics == {}
