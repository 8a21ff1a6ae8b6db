"""Environments of tests: they reply as fast as they can, the same in every process."""

import asyncio
import dataclasses
import time
from typing import Any

from lockstep.training import Environment, Reply, ToolEnvironment
from lockstep.training.rl.rewards import Gsm8kReward
from tests import tiny

STOPS = list(range(0, 352, 2))
"""Tokens that end an answer of a random model within a few tokens."""


@dataclasses.dataclass(kw_only=True)
class Parity(Environment):
    """Rewards an even number of letters e in each of two answers; fails for one question in ``every``."""

    max_turns: int = 2
    fails: str = "never"
    every: int = 5

    async def reset(self, question: Any) -> Any:
        self.question, self.turn = question.id, 0
        if self.fails == "reset" and not self.question % self.every:
            raise OSError("no such world")
        if self.fails == "outage":
            raise ConnectionError("connection refused")
        return await super().reset(question)

    async def step(self, message: Any) -> Any:
        self.turn += 1
        if not self.question % self.every and self.turn == 2:
            if self.fails == "raise":
                raise ZeroDivisionError("the world has ended")
            if self.fails == "hang":
                time.sleep(60)
            if self.fails == "sleep":
                await asyncio.sleep(60)
            if self.fails == "text":
                return "42"
        await asyncio.sleep(0.002 * (self.question % 3))
        reward = float(message["content"].count("e") % 2 == 0) - 0.01 * len(message["content"])
        return Reply(messages=[{"role": "user", "content": " e?"}], reward=reward, done=self.turn == 2)


def run(**values: Any) -> dict[str, Any]:
    """Settings of `tests.rollouts.make` for conversations."""
    environment = Parity(**{"timeout_s": 20.0} | values)
    rollout = {"max_new_tokens": 4, "stop_token_ids": STOPS}
    return {"environment": environment, "rewards": [Gsm8kReward()], "rollout": rollout}


def multiply(a: int, b: int) -> int:
    """Multiply two whole numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a * b


@dataclasses.dataclass(kw_only=True)
class Products(ToolEnvironment):
    """Has a tool, and rewards an answer without a call by its length."""

    max_turns: int = 2

    def tools(self) -> Any:
        return [multiply]

    async def score(self, answer: str) -> float:
        return 1.0 / (1 + len(answer))


def calling_tokenizer(known: str = "multiply") -> Any:
    """The demo's tokenizer with whole calls of a tool and of an unknown one as tokens, so that a random model makes
    some.
    """
    tokenizer = tiny.tokenizer()
    call = '<tool_call>{{"name": "{}", "arguments": {{"a": {}, "b": 3}}}}</tool_call>'
    tokenizer.add_tokens([call.format(name, a) for name in (known, "divide") for a in range(75)])
    return tokenizer
