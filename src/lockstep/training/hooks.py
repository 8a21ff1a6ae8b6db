"""What a training loop tells its hooks, and when it calls them."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from jaxtyping import PyTree

from lockstep.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepInfo:
    """State of the run at a hook call, in Levanter's words. The model is donated to the next step."""

    step: int
    """0-based number of the step that is done; -1 before the first."""
    model: PyTree
    """Parameters after ``next_step`` steps."""
    loss: float
    """Of the step that is done; nan before the first."""
    step_duration: float
    """Seconds from the launch of the step to its figures; 0 before the first."""

    @property
    def next_step(self) -> int:
        """Number of completed steps."""
        return self.step + 1


@runtime_checkable
class Hook(Protocol):
    """An object that is told of steps; called once before the first step too, with ``info.step == -1``."""

    def on_step(self, info: StepInfo, force: bool = False) -> Any:
        """Look at a step; ``force`` at the end of training."""
        ...


class Hooks:
    """The hooks of a run, called in the order they were added, on every host alike."""

    def __init__(self) -> None:
        self._hooks: list[tuple[Hook | Callable[..., Any], int]] = []

    def add(self, hook: Hook | Callable[..., Any], every: int) -> None:
        """Add a hook.

        Args:
            hook: an object with ``on_step(info, force=False)``, or a function of the info (and of ``force``, where its
                signature has it).
            every: called after each step whose number of completed steps is a multiple of this.

        Raises:
            ConfigError: it cannot be called, or ``every`` is below 1.
        """
        if every < 1:
            raise ConfigError(f"add_hook was given every={every}; it must be at least 1. Use 1 for every step.")
        if not isinstance(hook, Hook) and not callable(hook):
            raise ConfigError(
                f"add_hook was given {hook!r}, which cannot be called and has no on_step method. Pass a function of "
                "(info), or an object with on_step(info, force=False)."
            )
        self._hooks.append((hook, every))

    def before_first_step(self, info: StepInfo) -> None:
        """Call the objects; functions hear of completed steps only."""
        for hook, _ in self._hooks:
            if isinstance(hook, Hook):
                hook.on_step(info)

    def after_step(self, info: StepInfo) -> None:
        """Call every hook whose turn it is."""
        for hook, every in self._hooks:
            if info.next_step % every == 0:
                hook.on_step(info) if isinstance(hook, Hook) else hook(info)

    def after_last_step(self, info: StepInfo) -> None:
        """Call every hook a last time: with ``force`` where it knows the word, else unless this step was its turn."""
        for hook, every in self._hooks:
            if isinstance(hook, Hook):
                hook.on_step(info, force=True)
            elif _takes_force(hook):
                hook(info, force=True)
            elif info.next_step % every != 0:
                hook(info)


def _takes_force(function: Callable[..., Any]) -> bool:
    try:
        return "force" in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
