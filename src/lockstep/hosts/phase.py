"""A phase that every process goes through: it fails on all where it fails on one, and what must agree is compared."""

from collections.abc import Mapping
from typing import Any

from lockstep.hosts.channel import Channel
from lockstep.hosts.exchange import error_text, raise_if_any_failed, raise_if_different
from lockstep.hosts.ledger import Ledger, raise_if_launches_differ
from lockstep.json_text import typed


class Phase:
    """One process's part of `Hosts.run_on_all` or `Hosts.launch_on_all`.

    Args:
        name: The name that errors give to the phase.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._agreed: dict[str, str] = {}
        self._own: Any = None
        self._shared: list[Any] | None = None

    def agree(self, values: Mapping[str, str]) -> None:
        """Add values that every process must have, such as digests; compared when the phase ends.

        Args:
            values: The name of each thing to agree on, and its digest or a short text.
        """
        self._agreed |= values

    def share(self, value: object) -> None:
        """Give the other processes a value of this one.

        Args:
            value: A short JSON value, of the same kind on every process that has one; a tuple where all have as much.
        """
        self._own = value

    @property
    def shared(self) -> list[Any]:
        """The values that the processes shared, by process number; None of those that shared none."""
        assert self._shared is not None, f"{self.name}: what the others share is known when the phase has ended"
        return self._shared

    def end(
        self,
        channel: Channel,
        key: str,
        error: BaseException | None,
        ledger: Ledger | None,
        timeout_s: float,
        *,
        strict: bool = False,
    ) -> None:
        """Exchange outcome, shared value, what must agree and the launches, all at once.

        Args:
            channel: This process's end of the service.
            key: The key of the exchange, the same on every process.
            error: What went wrong on this process, or None.
            ledger: The launches of this process; None in a phase that launches nothing.
            timeout_s: The seconds to wait for the other processes.
            strict: Whether values that may differ (`MAY_DIFFER`) must be equal too.

        Raises:
            PeerError: At least one process has an error.
            LaunchMismatchError: The processes launched different programs.
            DisagreementError: The processes have different values.
            HostTimeoutError: Not all came within ``timeout_s``.
        """
        failed = None if error is None else error_text(error)
        launches = None if ledger is None else ledger.state
        # What a failed process has gathered so far says nothing.
        own = [failed, self._own, self._agreed, launches] if error is None else [failed, None, {}, launches]
        outcomes = channel.exchange(key, own, timeout_s, lambda value: _outcome(value, own))
        raise_if_any_failed(key, [failed for failed, *_ in outcomes], error)
        if ledger is not None:
            raise_if_launches_differ(channel, key, [state for *_, state in outcomes], ledger, timeout_s)
        raise_if_different(channel, key, [agreed for _, _, agreed, _ in outcomes], strict=strict)
        self._shared = [shared for _, shared, _, _ in outcomes]


def _outcome(value: Any, own: list[Any]) -> list[Any]:
    failed, shared, agreed, launches = value
    typed(str | None, failed)  # type: ignore[arg-type]
    typed(dict[str, str], agreed)
    if (launches is None) != (own[3] is None) or not isinstance(launches, str | None):
        raise TypeError("no state of launches")
    if failed is None and not _is_like(shared, own[1]):
        raise TypeError("shared is something of another kind")
    return [failed, shared, agreed, launches]


def _is_like(value: Any, own: Any) -> bool:
    """Whether a process may have shared a value where this one has shared its own: a tuple has one length on all."""
    if own is None:
        return True
    if isinstance(own, int | float):
        return isinstance(value, int | float) and -(2**63) <= value < 2**63
    if isinstance(own, tuple):
        return isinstance(value, list) and len(value) == len(own) and all(map(_is_like, value, own))
    if isinstance(own, Mapping):
        return isinstance(value, dict)
    if isinstance(own, list):
        return isinstance(value, list) and (not own or all(_is_like(each, own[0]) for each in value))
    return value is None or isinstance(value, str)
