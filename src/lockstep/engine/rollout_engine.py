"""The engine that a generation needs: lockstep's own, or one of somebody else's."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from lockstep.engine.launches import Gate
from lockstep.engine.schedule import FindStop
from lockstep.hosts import Ledger
from lockstep.placement.device import AroundLaunch
from lockstep.types import Completion, Request


@runtime_checkable
class RolloutEngine(Protocol):
    """An engine whose launches every host makes together; `lockstep.engine.Engine` is one.

    Every host makes the same calls. A ``model`` is what `lockstep.models.read_decoder` returned: the configuration and
    the trainer's own arrays, which are donated to the next train step, so nothing may keep them.
    """

    @property
    def ledger(self) -> Ledger:
        """The record of launches, which hosts compare after each generation."""
        ...

    def free_bytes(self, model: Any) -> int:
        """Return the free memory of the device of this process that has the least, once the model is complete.

        Args:
            model: The model.
        """
        ...

    def check(self, model: Any, requests: Sequence[Request]) -> Any:
        """Refuse what can never work; launches nothing.

        Args:
            model: The model.
            requests: As many as in any generation, and as long.

        Raises:
            LockstepError: It cannot work.
        """
        ...

    def prepare(self, model: Any, requests: Sequence[Request], *, free: int) -> Mapping[str, str]:
        """Compile what these requests need; launches nothing.

        Args:
            model: The model.
            requests: As many as in any generation, and as long.
            free: Bytes on the device with the least free memory of all hosts.

        Returns:
            The digests of all programs by name, which hosts agree on.
        """
        ...

    def stream(
        self,
        model: Any,
        requests: Iterable[Request],
        *,
        around_launch: AroundLaunch,
        find_stop: FindStop | None,
        gate: Gate,
    ) -> Iterator[Sequence[Completion]]:
        """Sample; the same answers on every host.

        Args:
            model: The model.
            requests: No more than were prepared for, and no longer.
            around_launch: Called with a program's name; its context surrounds a launch.
            find_stop: Finds stop strings; None where no request has any.
            gate: What holds every host before a launch until all can go on.

        Yields:
            Completions, all of a prompt at a time.
        """
        ...
