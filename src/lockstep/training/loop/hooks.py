"""The hooks of a training loop: their protocol, their calls, and the facts that they get."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, Self, runtime_checkable

from jaxtyping import PyTree

from lockstep.engine import PhaseClock
from lockstep.errors import ConfigError
from lockstep.json_text import refused

if TYPE_CHECKING:
    from lockstep.training.step.train_state import TrainState
    from lockstep.training.step.train_step import StepMetrics


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepInfo:
    """The state of the run at a hook call, with Levanter's names. The model is donated to the next step.

    Example:
        >>> lockstep.training.StepInfo(step=9, model=model, loss=2.5, step_duration=0.1).next_step
        10
    """

    step: int
    """The 0-based number of the step that is done; -1 before the first."""
    model: PyTree
    """The parameters after ``next_step`` steps."""
    loss: float
    """The mean loss of the step that is done; nan before the first."""
    step_duration: float
    """Seconds from the launch of the step to its figures; 0 before the first."""
    average: PyTree | None = None
    """The average of the parameters over the steps, where the optimizer keeps one (``optimizer.ema_decay``)."""
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """The further figures of the step that is done, such as ``grad_norm``; the same on every host."""
    hook_seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Seconds that the hooks before this one took after the step, by their names."""

    @classmethod
    def of(cls, step: int, state: "TrainState", metrics: "StepMetrics", step_duration: float) -> Self:
        """The state after a step, with its figures."""
        return cls(
            step=step,
            model=state.model,
            loss=metrics.loss,
            step_duration=step_duration,
            average=state.average,
            metrics=metrics.values,
        )

    @property
    def eval_model(self) -> PyTree:
        """The model to evaluate and to sample from: the average where there is one, else ``model``."""
        return self.model if self.average is None else self.average

    @property
    def next_step(self) -> int:
        """The number of completed steps."""
        return self.step + 1


@runtime_checkable
class Hook(Protocol):
    """An object that is called after steps, and once before the first one, with ``info.step == -1``."""

    def on_step(self, info: StepInfo, force: bool = False) -> Any:
        """Handle a step; ``force`` is true at the end of training."""
        ...


@runtime_checkable
class SignalHook(Hook, Protocol):
    """A hook that has something to end when a signal ended the run, after which no hook gets its last call."""

    def after_signal(self) -> Any:
        """End it, within seconds: the process may be taken away."""
        ...


@runtime_checkable
class HookWithState(Protocol):
    """A hook that keeps something from one step to the next, which then belongs into a checkpoint."""

    def state(self) -> Mapping[str, Any]:
        """Return what to keep, as JSON values; the same on every host."""
        ...

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take back what `state` returned in an earlier process."""
        ...


class Hooks:
    """The hooks of a run, called on every host in the order in which they were added."""

    def __init__(self) -> None:
        self._hooks: list[tuple[Hook | Callable[..., Any], int]] = []

    def add(self, hook: Hook | Callable[..., Any], every: int) -> None:
        """Add a hook.

        Args:
            hook: An object with ``on_step(info, force=False)``, or a function of the info (and of ``force``, where its
                signature has it).
            every: The number of steps between two calls: the hook is called after each step whose number of completed
                steps is a multiple of it.

        Raises:
            ConfigError: The hook cannot be called, or ``every`` is below 1.
        """
        if every < 1:
            raise ConfigError(f"add_hook was given every={every}; it must be at least 1. Use 1 for every step.")
        if not isinstance(hook, Hook) and not callable(hook):
            raise ConfigError(
                f"add_hook was given {hook!r}, which cannot be called and has no on_step method. Pass a function of "
                "(info), or an object with on_step(info, force=False)."
            )
        self._hooks.append((hook, every))

    def before_first_step(self, info: StepInfo) -> bool:
        """Call the hooks that are objects; functions are called after completed steps only. See `after_step`."""
        for hook, _ in self._hooks:
            if isinstance(hook, Hook):
                hook.on_step(info)
                if _interrupted(hook):
                    return False
        return True

    def after_step(self, info: StepInfo) -> bool:
        """Call every hook that this step is due for, up to one that was ``interrupted``, the same on every host.

        Returns:
            Whether all were called; False: the job is asked to end, and a resume calls them.
        """
        clock = PhaseClock()
        info = dataclasses.replace(info, hook_seconds=clock.seconds)
        for hook, every in self._hooks:
            if info.next_step % every == 0:
                hook.on_step(info) if isinstance(hook, Hook) else hook(info)
                clock.lap(_name(hook))
                if _interrupted(hook):
                    return False
        return True

    def after_last_step(self, info: StepInfo) -> bool:
        """Call every hook a last time: with ``force`` where it takes that, else unless it was called for this step.

        Returns:
            Whether all were called, see `after_step`.
        """
        for hook, every in self._hooks:
            if isinstance(hook, Hook):
                hook.on_step(info, force=True)
            elif _takes_force(hook):
                hook(info, force=True)
            elif info.next_step % every != 0:
                hook(info)
            if _interrupted(hook):
                return False
        return True

    @property
    def stop_reason(self) -> str | None:
        """Why a hook wants the run to end, on the leader: the first ``stop_reason``; None where none does."""
        reasons = (getattr(hook, "stop_reason", None) for hook, _ in self._hooks)
        return next((reason for reason in reasons if reason is not None), None)

    def after_signal(self) -> None:
        """Call the hooks that have something to end when a signal ended the run."""
        for hook, _ in self._hooks:
            if isinstance(hook, SignalHook):
                hook.after_signal()

    def state(self) -> dict[str, Any]:
        """Return what hooks keep from one step to the next, by their names: those with ``state`` and ``load_state``."""
        return {_name(hook): hook.state() for hook in self._with_state()}

    def load_state(self, states: Mapping[str, Any]) -> None:
        """Give hooks back what `state` returned in an earlier process; a hook that was not there then keeps its own."""
        for hook in self._with_state():
            if _name(hook) in states:
                with refused(f"what the checkpoint has of {_name(hook)}", "Choose another trainer.run_id."):
                    hook.load_state(states[_name(hook)])

    def _with_state(self) -> list[HookWithState]:
        hooks: list[object] = [hook for hook, _ in self._hooks]
        return [hook for hook in hooks if isinstance(hook, HookWithState)]

    def flush(self) -> bool:
        """Wait until hooks with ``flush`` have reported everything; return False where one of them did."""
        done = True
        for hook, _ in self._hooks:
            if callable(flush := getattr(hook, "flush", None)):
                done = flush() is not False and done
        return done


def _name(hook: Any) -> str:
    return str(getattr(hook, "name", type(hook).__name__))


def _interrupted(hook: Any) -> bool:
    return getattr(hook, "interrupted", False) is True


def _takes_force(function: Callable[..., Any]) -> bool:
    try:
        return "force" in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
