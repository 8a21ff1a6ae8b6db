"""Computing rewards: each host its share, in threads, from when its answers are there."""

import collections
import copy
import dataclasses
import inspect
import math
import queue
import threading
import time
from collections.abc import Awaitable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from lockstep.errors import ConfigError, HostError, HostTimeoutError, is_passing
from lockstep.hosts import Hosts, leader_only
from lockstep.json_text import FOREIGN, refused
from lockstep.plugins import go_back, own_error_text, working_directory
from lockstep.printable import get_logger
from lockstep.report import Row, as_number
from lockstep.text import Prompt
from lockstep.training.rl.event_loop import EventLoop
from lockstep.training.rl.rewards import Reward, RewardConfig, labels

type Value = float | str
"""The result of a component for an answer: a number, or an error."""

ERROR_LENGTH = 500  # characters of what went wrong that travel to the other hosts
LATE = "late"  # the error where there was no value in time
PAUSES_S = (1.0, 2.0, 4.0)
"""Seconds between tries where a reward fails by what another try may not meet, such as a server that answers 500."""


class Outage(str):
    """The text of such an error, after the last try."""


class Scoring:
    """The rewards of one rollout's answers on this host.

    Each component of each answer is one job. Workers are threads that end with the rollout; one that hangs in a user's
    function is left behind, and holds up nothing. In all of them a launch of a device program raises.

    Args:
        loop: Where coroutines of rewards run; None: in a loop of its own.
    """

    def __init__(self, rewards: Mapping[str, Reward], workers: int, loop: EventLoop | None = None) -> None:
        self._rewards, self._loop = rewards, loop or EventLoop()
        self._running: set[Future[Any]] = set()  # coroutines
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
        """Have an answer scored; returns at once."""
        for name in self._rewards:
            self._submitted.append((number, name))
            self._jobs.put((number, name, row, prompt))

    def finish(self, timeout_s: float) -> dict[int, dict[str, Value]]:
        """Wait for all values, and end; return those of each answer by component.

        Args:
            timeout_s: The seconds to wait at most; what is not there by then is `LATE`.
        """
        for _ in self._threads:
            self._jobs.put(None)
        with self._changed:
            self._changed.wait_for(lambda: len(self._values) == len(self._submitted), timeout_s)
            self._closed = True
            values, late = dict(self._values), list(self._running)
        self._loop.cancel(late)
        by_answer: dict[int, dict[str, Value]] = {}
        for number, name in self._submitted:
            by_answer.setdefault(number, {})[name] = values.get((number, name), LATE)
        return by_answer

    def close(self) -> None:
        """End without values: the rollout failed."""
        self.finish(0.0)

    def _work(self) -> None:
        with leader_only():
            while (job := self._jobs.get()) is not None:
                number, name, row, prompt = job
                if self._closed:
                    continue
                value = self._value(self._rewards[name], row, prompt)
                with self._changed:
                    self._values[number, name] = value
                    if len(self._values) == len(self._submitted):  # or `finish` would wake for each
                        self._changed.notify()

    def _value(self, reward: Reward, row: Row, prompt: Prompt) -> Value:
        for pause_s in (*PAUSES_S, None):
            try:
                with leader_only():  # which says what a launch needs instead
                    value = reward(*copy.deepcopy((row, prompt)))  # what it changes in them is nobody else's
                    if inspect.isawaitable(value):
                        value = self._awaited(value)
                    return as_number(value)
            except BaseException as error:  # a reward is the user's own code, and no signal comes to a thread
                text = own_error_text(error, ERROR_LENGTH)
                if not is_passing(error):
                    return text
            if pause_s is None or self._closed:
                break
            time.sleep(pause_s)
        return Outage(text)

    def _awaited(self, value: Awaitable[Any]) -> Any:
        future = self._loop.submit(value)
        with self._changed:
            self._running.add(future)
        try:
            result, error = future.result()
        finally:
            with self._changed:
                self._running.discard(future)
        if error is not None:
            raise error
        return result


def try_rewards(
    rewards: Mapping[str, Reward], row: Row, prompt: Prompt, timeout_s: float, loop: EventLoop | None = None
) -> dict[str, str]:
    """Return what goes wrong with each component that fails for an answer."""
    scoring = Scoring(rewards, len(rewards), loop)  # one that hangs makes no other late
    scoring.submit(0, row, prompt)
    values = scoring.finish(timeout_s)[0]
    return {name: value for name, value in values.items() if isinstance(value, str)}


log = get_logger(__name__)

_A_REWARD = "a reward"
_ON_FAILURE = {"default": "its default is used", "drop_group": "nothing is learned from the answers to that question"}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Rewards:
    """The rewards of answers; the same on every host.

    Args:
        components: The value of each component by name, its default where it had none.
        failed: The number of answers for which a component raised or returned no number, by name.
        late: The number of answers for which it was late.
        judged: What decides whether the answers of a group are equally right; None: the weighted sums.
        dropped: Whether a component without a value for an answer drops its group; None: nowhere.
    """

    total: Float[np.ndarray, " answer"]
    components: Mapping[str, Float[np.ndarray, " answer"]]
    failed: Mapping[str, int]
    late: Mapping[str, int]
    judged: Float[np.ndarray, " answer"] | None = None
    dropped: Bool[np.ndarray, " answer"] | None = None


class Rewarder:
    """Computes the reward of every answer of a rollout.

    Args:
        filter_by: The name of the component that decides whether answers are equally right; None: the weighted sum of
            those that do not shape (`RewardConfig.SHAPING`), or of all where there are no others.

    Raises:
        ConfigError: A component cannot be made, such as a function that cannot be imported.
    """

    def __init__(
        self,
        rewards: Sequence[RewardConfig],
        *,
        max_new_tokens: int,
        workers: int,
        timeout_s: float,
        filter_by: str | None = None,
    ) -> None:
        self._configs = dict(zip(labels(rewards), rewards, strict=True))
        self._functions: dict[str, Reward] = {
            name: config.build(max_new_tokens) for name, config in self._configs.items() if not config.ON_DEVICES
        }
        judges = {name: config.weight for name, config in self._configs.items() if config.weight and not config.SHAPING}
        self._judges = judges if filter_by is None else {filter_by: 1.0}
        self._workers, self._timeout_s, self._directory = workers, timeout_s, working_directory()
        self._loop = EventLoop()
        self._warned: set[str] = set()

    def check(self, row: Row, prompt: Prompt, wait_s: float = math.inf) -> None:
        """Try every component on an answer, before training begins; one that gives nothing in time, several times.

        Args:
            wait_s: The seconds of all tries.

        Raises:
            ConfigError: One is wrong.
            HostTimeoutError: One has an outage, or gave nothing in time, and no default.
        """
        if not self._functions:
            return
        deadline, wrong, tries = time.monotonic() + wait_s, dict.fromkeys(self._functions, LATE), 0
        for pause_s in (*PAUSES_S, math.inf):
            late = {name: self._functions[name] for name, text in wrong.items() if text == LATE}
            wrong = {name: text for name, text in wrong.items() if text != LATE}
            wrong |= try_rewards(late, row, prompt, self._timeout_s, self._loop)
            go_back(self._directory, _A_REWARD)
            tries += 1
            if LATE not in wrong.values() or time.monotonic() + pause_s + self._timeout_s > deadline:
                break
            time.sleep(pause_s)
        for name, text in wrong.items():
            if text == LATE or isinstance(text, Outage):
                outage = f"reward {name} failed {len(PAUSES_S) + 1} times before the first step: {text}"
                if text == LATE:
                    outage = f"reward {name} took more than {self._timeout_s:g} s before the first step, {tries} times"
                if self._configs[name].on_failure == "default":
                    log.warning("%s. Its default is used while that lasts", outage)
                    continue
                raise HostTimeoutError(f"{outage}. Check the reward and its server, or set on_failure: default.")
            raise ConfigError(
                f"rewards: {name} was tried on the reference answer to the first question ({row.generated_text!r}): "
                f"{text}. A reward takes (row, prompt) of one answer, such as row.generated_text and prompt.answer, "
                "and returns a finite number; correct it."
            )

    def begin(self) -> Scoring:
        """Start the threads of a rollout. This host's share of its answers is submitted to the result."""
        return Scoring(self._functions, self._workers, self._loop)

    def finish(
        self, hosts: Hosts, scoring: Scoring, n_answers: int, scores: Mapping[str, Sequence[float | None]] | None = None
    ) -> Rewards:
        """Wait for the rewards of this host's share, and exchange them with the other hosts.

        Args:
            scores: The values of the components on devices, by name; None where an answer has none.
        """
        names, scores = list(self._functions), scores or {}
        with hosts.run_on_all("rewards") as phase:
            own = scoring.finish(self._timeout_s)
            go_back(self._directory, _A_REWARD)
            # Texts of what went wrong stay here but for one per component: thousands of them would not.
            texts = {
                name: str(components[name])
                for components in reversed(own.values())
                for name in names
                if isinstance(components[name], str) and components[name] != LATE
            }
            phase.share(
                ({number: [_short(components[name]) for name in names] for number, components in own.items()}, texts)
            )
        shared: dict[int, list[Any]] = {}
        with refused("what the processes have shared of their rewards", FOREIGN, HostError):
            for index, (values, texts) in enumerate(phase.shared):
                shared |= {int(number): answer_values for number, answer_values in values.items()}
                self._warn(hosts, index, texts)
            assert not names or len(shared) == n_answers, "every answer is the share of one host"
            in_order = [
                [*shared.get(number, ()), *(column[number] for column in scores.values())]
                for number in range(n_answers)
            ]
        return self._sum([*names, *scores], in_order)

    def _sum(self, names: Sequence[str], values: Sequence[Sequence[Any]]) -> Rewards:
        components: dict[str, np.ndarray] = {}
        failed, late = collections.Counter[str](), collections.Counter[str]()
        total, dropped = np.zeros(len(values)), np.zeros(len(values), bool)
        for place, name in enumerate(names):
            config = self._configs[name]
            column = [entry[place] for entry in values]
            failed[name], late[name] = column.count(None), column.count(LATE)
            numbers = [entry if isinstance(entry, float | int) else config.default for entry in column]
            components[name] = np.array(numbers, np.float64)
            total += config.weight * components[name]
            if config.on_failure == "drop_group":
                dropped |= np.array([not isinstance(entry, float | int) for entry in column])
        judged = sum((weight * components[name] for name, weight in self._judges.items()), np.zeros(len(values)))
        return Rewards(
            total=total,
            components=components,
            failed=dict(failed),
            late=dict(late),
            judged=judged if self._judges else None,
            dropped=dropped,
        )

    def _warn(self, hosts: Hosts, index: int, texts: Mapping[str, str]) -> None:
        """Say once per component what went wrong; how often is in the metrics."""
        for name, text in texts.items():
            if hosts.is_leader and name not in self._warned:
                self._warned.add(name)
                log.warning(
                    "reward %s failed on process %d, %s: %s. Later failures are counted in reward/%s/failed",
                    name,
                    index,
                    _ON_FAILURE[self._configs[name].on_failure],
                    text,
                    name,
                )


def _short(value: Value) -> float | str | None:
    """A number, `LATE`, or None for what failed."""
    return value if isinstance(value, float) or value == LATE else None
