"""The methods of an engine that a session calls, so that another than lockstep's can sample."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from lockstep.engine.launches import Gate
from lockstep.engine.schedule import FindStop
from lockstep.hosts import Ledger
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
        """Return the free memory of the device of this process that has the least, once the model is complete."""
        ...

    def check(self, model: Any, requests: Sequence[Request]) -> Any:
        """Refuse what can never work; launches nothing.

        Args:
            requests: As many as in any generation, and as long.

        Raises:
            LockstepError: It cannot work.
        """
        ...

    def prepare(self, model: Any, requests: Sequence[Request], *, free: int) -> Mapping[str, str]:
        """Compile what these requests need; launches nothing.

        Args:
            requests: As many as in any generation, and as long.
            free: Bytes on the device with the least free memory of all hosts.

        Returns:
            The digests of all programs by name, which hosts agree on.
        """
        ...

    def stream(
        self, model: Any, requests: Iterable[Request], *, find_stop: FindStop | None, gate: Gate
    ) -> Iterator[Sequence[Completion]]:
        """Sample; the same answers on every host.

        Args:
            requests: No more than were prepared for, and no longer.
            find_stop: Finds stop strings; None where no request has any.
            gate: Called before a launch, holds every host until all can go on; ``gate.launch(name)`` surrounds one.

        Yields:
            Completions, all of a prompt at a time.
        """
        ...
