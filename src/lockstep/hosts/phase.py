"""A phase that every process goes through: it fails on all where it fails on one, and what must agree is compared."""

import array
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.hosts.channel import Channel, Column, columns, differs, read_columns, spread
from lockstep.hosts.exchange import digest_of, error_text, raise_if_any_failed, raise_if_different
from lockstep.hosts.ledger import Ledger, raise_different_launches
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
        """Exchange outcome, shared value, digests of what must agree and of the launches, all at once.

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
        state = None if ledger is None else ledger.state
        # What a failed process has gathered so far says nothing.
        own = [failed, self._own, digest_of(self._agreed), state] if error is None else [failed, None, "", state]
        errors, shared, digests, states = channel.exchange(
            key, own, timeout_s, columns, lambda found: _outcomes(found, own, channel.client.count)
        )
        raise_if_any_failed(key, spread(errors, channel.client.count), error)
        if ledger is not None and differs(states):
            raise_different_launches(channel, key, ledger, timeout_s)
        if differs(digests):
            raise_if_different(channel, key, self._agreed, timeout_s, strict=strict)
        self._shared = spread(shared, channel.client.count)


def _outcomes(found: object, own: list[Any], count: int) -> list[Column]:
    read = read_columns(found, 4, count)
    errors, shared, digests, states = (values for values, _ in read)
    # What is this process's own value needs no look.
    if errors != [own[0]]:
        typed(list[str | None], errors)
    if digests != [own[2]]:
        typed(list[str], digests)
    if states != [own[3]] and any((state is None) != (own[3] is None) for state in typed(list[str | None], states)):
        raise TypeError("no state of launches")
    if errors == [None] and not _are_like(shared, own[1]):
        raise TypeError("shared is something of another kind")
    return read


def _are_like(values: Sequence[Any], own: Any) -> bool:
    """Whether processes may have shared these where this one has shared its own: a tuple has one length on all."""
    if own is None or (isinstance(values, array.array) and isinstance(own, int | float)):
        return True
    if isinstance(own, int | float):
        with contextlib.suppress(TypeError, OverflowError):
            return bool(array.array("q", values))  # at once: there may be a thousand
    kinds = set(map(type, values))
    if isinstance(own, int | float):
        return kinds <= {bool, int, float} and all(-(2**63) <= value < 2**63 for value in values)
    if isinstance(own, Mapping):
        return kinds <= {dict}
    if isinstance(own, tuple):
        lengths = {len(value) for value in values} if kinds <= {list, tuple} else {-1}
        return lengths <= {len(own)} and all(map(_are_like, zip(*values, strict=True), own))
    if isinstance(own, list):
        return kinds <= {list} and (not own or all(_are_like(value, own[0]) for value in values))
    return kinds <= {str, type(None)}
