"""Rewards of answers, computed by worker threads while other answers are still being generated."""

import asyncio
import inspect
import math
import queue
import threading
from collections.abc import Mapping
from typing import Any

from lockstep.hosts import leader_only
from lockstep.report import Row
from lockstep.text import Prompt
from lockstep.training.rl.rewards import Reward

type Value = float | str
"""What a component gave for an answer: a number, or what went wrong."""

LATE = "late"
"""What went wrong where there was no value in time."""


class Scoring:
    """The rewards of one rollout's answers on this host.

    Each component of each answer is one job. Workers are threads that end with the rollout; one that hangs in a user's
    function is left behind, and holds up nothing. In all of them a launch of a device program raises.

    Args:
        rewards: The components by name.
        workers: The number of threads, and of coroutines that run at a time.
    """

    def __init__(self, rewards: Mapping[str, Reward], workers: int) -> None:
        self._rewards = rewards
        self._jobs: queue.SimpleQueue[tuple[int, str, Row, Prompt] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._values: dict[tuple[int, str], Value] = {}
        self._submitted: list[tuple[int, str]] = []
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"lockstep-reward-{number}", daemon=True)
            for number in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, number: int, row: Row, prompt: Prompt) -> None:
        """Have an answer scored; returns at once.

        Args:
            number: The answer's number, for `finish`.
            row: The answer.
            prompt: Its question.
        """
        for name in self._rewards:
            self._submitted.append((number, name))
            self._jobs.put((number, name, row, prompt))

    def finish(self, timeout_s: float) -> dict[int, dict[str, Value]]:
        """Wait for all values, and end.

        Args:
            timeout_s: The seconds to wait at most; what is not there by then is `LATE`.

        Returns:
            For each answer the values of its components by name.
        """
        for _ in self._threads:
            self._jobs.put(None)
        with self._changed:
            self._changed.wait_for(lambda: len(self._values) == len(self._submitted), timeout_s)
            self._closed = True
            values = dict(self._values)
        found: dict[int, dict[str, Value]] = {}
        for number, name in self._submitted:
            found.setdefault(number, {})[name] = values.get((number, name), LATE)
        return found

    def close(self) -> None:
        """End without values: the rollout failed."""
        self.finish(0.0)

    def _work(self) -> None:
        with leader_only(), asyncio.Runner() as runner:
            while (job := self._jobs.get()) is not None:
                number, name, row, prompt = job
                if self._closed:
                    continue
                value = self._value(runner, self._rewards[name], row, prompt)
                with self._changed:
                    self._values[number, name] = value
                    self._changed.notify()

    def _value(self, runner: asyncio.Runner, reward: Reward, row: Row, prompt: Prompt) -> Value:
        try:
            value = reward(row, prompt)
            if inspect.iscoroutine(value):
                value = runner.run(value)
            return as_number(value)
        except (Exception, SystemExit) as error:  # a reward is the user's own code
            return f"{type(error).__name__}: {error}"[:500]


def as_number(value: Any) -> float:
    """Return the value of a reward.

    Args:
        value: What it returned.

    Raises:
        TypeError: This is not a number.
        ValueError: The number is not finite.
    """
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise TypeError(f"returned {value!r}, which is not a number")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"returned {number}, which is not finite")
    return number


def try_rewards(rewards: Mapping[str, Reward], row: Row, prompt: Prompt, timeout_s: float) -> dict[str, str]:
    """Return what goes wrong with each component that fails for an answer.

    Args:
        rewards: The components by name.
        row: The answer.
        prompt: Its question.
        timeout_s: The seconds that they may take.
    """
    scoring = Scoring(rewards, workers=1)
    scoring.submit(0, row, prompt)
    found = scoring.finish(timeout_s)[0]
    return {name: value for name, value in found.items() if isinstance(value, str)}
