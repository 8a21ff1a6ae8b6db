"""One event loop for the asynchronous rewards of a run."""

import asyncio
import threading

import jax.numpy as jnp
import pytest

from lockstep.hosts import Hosts, MemoryClient
from lockstep.training.rl import event_loop
from lockstep.training.rl.event_loop import EventLoop
from lockstep.training.rl.rewarding import LATE, Rewarder, Scoring
from lockstep.training.rl.rewards import FunctionReward
from tests.unit.report.made_up import row
from tests.unit.training.rl.made_up import prompt

LOOPS, LOCK = [], asyncio.Lock()
STUCK = threading.Event()


async def judge(answer, question):
    """Waits for its turn at a client that all answers share, as one of HTTP does for a connection."""
    async with LOCK:
        await asyncio.sleep(0.001)
        LOOPS.append(asyncio.get_running_loop())
    return 1.0


def test_rewards_of_all_threads_and_rollouts_may_share_a_client():
    hosts = Hosts(MemoryClient.hub(1)[0])
    rewarder = Rewarder([FunctionReward(function=f"{__name__}:judge")], max_new_tokens=10, workers=4, timeout_s=60.0)
    rewarder.check(row(""), prompt())
    for _ in range(2):
        scoring = rewarder.begin()
        for number in range(16):
            scoring.submit(number, row(""), prompt())
        with hosts.scope("rollout") as scope:
            assert rewarder.finish(scope, scoring, 16).total.tolist() == [1.0] * 16
    assert len(LOOPS) == 33 and len(set(map(id, LOOPS))) == 1


def test_what_is_late_is_cancelled():
    cancelled, loop = threading.Event(), EventLoop()

    async def waits(answer, question):
        try:
            await asyncio.sleep(3600)
        finally:
            cancelled.set()

    async def works(answer, question):
        return 1.0

    for reward, value in ((waits, LATE), (works, 1.0)):
        scoring = Scoring({"reward": reward}, 1, loop)
        scoring.submit(0, row(""), prompt())
        assert scoring.finish(0.5 if reward is waits else 60.0) == {0: {"reward": value}}
    assert cancelled.wait(60)


def test_a_loop_that_a_reward_blocks_is_left_behind(monkeypatch, caplog):
    monkeypatch.setattr(event_loop, "FREE_S", 0.2)
    loop = EventLoop()

    async def blocks(answer, question):
        STUCK.wait()

    scoring = Scoring({"blocks": blocks}, 1, loop)
    scoring.submit(0, row(""), prompt())
    assert scoring.finish(0.5)[0]["blocks"] == LATE
    assert "an async reward has blocked the event loop of all async rewards for 0.2 s" in caplog.text
    assert loop.submit(asyncio.sleep(0, 2.0)).result(60) == (2.0, None)


def test_a_launch_in_a_coroutine_raises():
    async def launches(answer, question):
        return float(jnp.ones(2).sum())

    _, error = EventLoop().submit(launches(None, None)).result(60)
    with pytest.raises(RuntimeError, match="no_execution"):
        raise error
