"""The calls of a training loop: what it passes, and from which thread."""

import functools
import threading
from collections.abc import Callable
from typing import Any, Concatenate, Protocol

import numpy as np

from lockstep.callback.config import InferenceEvalConfig
from lockstep.errors import ConfigError, LockstepError


class Called(Protocol):
    """The object that methods under `by_one_thread` belong to."""

    name: str
    _in_use: "threading._RLock"


def by_one_thread[**Arguments, Result](
    method: Callable[Concatenate[Any, Arguments], Result],
) -> Callable[Concatenate[Any, Arguments], Result]:
    """Have a method raise while another thread is inside one: hosts would take turns in different orders."""

    @functools.wraps(method)
    def alone(self: Called, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if not self._in_use.acquire(blocking=False):
            raise LockstepError(
                f"{self.name}: {method.__name__} is called while another thread is inside this callback. Call it from "
                "one thread, that of the training loop."
            )
        try:
            return method(self, *args, **kwargs)
        finally:
            self._in_use.release()

    return alone


def check_made_of(config: Any, tokenizer: Any, tracker: Any) -> None:
    """Refuse what a callback cannot be made of, such as the path of a file in place of what is in it.

    Raises:
        ConfigError: The configuration, the tokenizer or the tracker is something else.
    """
    if not isinstance(config, InferenceEvalConfig):
        raise ConfigError(
            f"the configuration of a callback is a {type(config).__name__}; it must be a lockstep.InferenceEvalConfig. "
            "Write lockstep.InferenceEvalConfig(prompts=[...], eval_every=100)."
        )
    if not all(hasattr(tokenizer, name) for name in ("get_vocab", "convert_tokens_to_ids")):
        raise ConfigError(
            f"the tokenizer of a callback is a {type(tokenizer).__name__}; it must be one of transformers. Load it: "
            "transformers.AutoTokenizer.from_pretrained(...)."
        )
    if tracker is not None and not all(hasattr(tracker, name) for name in ("log", "log_rows")):
        raise ConfigError(
            f"the tracker of a callback is a {type(tracker).__name__}; it must be a lockstep.report.Tracker. Wrap it: "
            "lockstep.report.WandbTracker(run, alone=False) of a run of W&B."
        )


def completed_steps(info: Any) -> int:
    """The number of completed steps.

    Raises:
        ConfigError: There is none, or it is no whole number.
    """
    for name in ("next_step", "step"):
        if not hasattr(info, name):
            continue
        value = getattr(info, name)
        try:
            if not np.shape(value) and 0 <= int(value) == value:
                return int(value)
        except (TypeError, ValueError, OverflowError):  # a traced value, too
            pass
        raise ConfigError(
            f"{name} is {value!r:.200}; it must be one whole number from 0, that of completed steps. Pass int(step), "
            "outside jit, grad, scan and the like."
        )
    raise ConfigError(
        f"an object of {type(info).__name__} has neither next_step nor step, the number of completed steps. Pass "
        "types.SimpleNamespace(step=step, model=model)."
    )


class CalledSteps:
    """The steps that a loop calls a callback after: says what would otherwise be missed in silence.

    Args:
        every: The steps between two rounds.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._last: int | None = None
        self._said = False

    def passed_over(self, step: int) -> str:
        """Note a call; the first time that a round was due between two calls, say so, else return an empty text."""
        before, self._last = self._last, step
        if before is None or self._said or (due := (before // self._every + 1) * self._every) >= step:
            return ""
        self._said = True
        return (
            f"the loop calls after step {before}, then after step {step}, and a round was due after step {due} "
            f"(eval_every is {self._every}): there is none. Call after every step, or make eval_every a multiple of "
            "the steps between calls"
        )

    def none_due(self) -> str:
        """Say that no call so far was after a step with a round; empty before the first call."""
        if self._last is None:
            return ""
        return (
            f"there are no samples: the last call is after step {self._last}, and no call was after a multiple of "
            f"eval_every, {self._every}. Lower eval_every, or end with on_step(info, force=True), which samples once"
        )


def sampled_model(info: Any) -> Any:
    """The model to sample: an average of the parameters where ``info`` has one."""
    for name in ("eval_model", "model"):
        if hasattr(info, name):
            return getattr(info, name)
    raise ConfigError(
        f"an object of {type(info).__name__} has neither eval_model nor model. Pass "
        "types.SimpleNamespace(step=step, model=model)."
    )
