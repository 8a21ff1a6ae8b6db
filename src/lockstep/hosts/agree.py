"""Proof that every process holds the same values."""

import collections
import hashlib
from collections.abc import Mapping, Sequence

from lockstep.errors import DisagreementError
from lockstep.hosts.channel import Channel

SHOWN_CHARACTERS = 80


def digest(*parts: bytes | str) -> str:
    """SHA-256 of the parts, hex; where one part ends and the next begins counts too."""
    total = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        total.update(len(data).to_bytes(8, "big"))
        total.update(data)
    return total.hexdigest()


def agree(channel: Channel, key: str, values: Mapping[str, str], timeout_s: float) -> None:
    """Return when every process passed the same values.

    Args:
        channel: this process's end of the service.
        key: the same on every process.
        values: for each thing to agree on, its name and its digest (or a short text).
        timeout_s: seconds to wait for the others.

    Raises:
        DisagreementError: on every process, with the same text: what differs, and who holds what.
        HostTimeoutError: not all came within ``timeout_s``; names the missing ones and their last phase.
    """
    compare(key, channel.exchange(key, dict(values), timeout_s, _mapping))


def compare(key: str, held: Sequence[Mapping[str, str]]) -> None:
    """Return when every process holds the same values: `agree`, where all of them are known already.

    Args:
        key: named in the error.
        held: the values of each process, by process number.

    Raises:
        DisagreementError: what differs, and who holds what.
    """
    names = list(dict.fromkeys(name for one in held for name in one))
    different = [name for name in names if len({one.get(name) for one in held}) > 1]
    if different:
        texts = [_describe(name, [one.get(name) for one in held]) for name in different]
        raise DisagreementError(
            f"the processes of this job disagree at {key!r} on {', '.join(map(repr, different))}. {' '.join(texts)} "
            "Every process must be started with the same command, configuration, files and library versions."
        )


def _describe(name: str, values: Sequence[str | None]) -> str:
    """Who holds which value, the most common value first and named as the majority where it is one."""
    groups: collections.defaultdict[str | None, list[int]] = collections.defaultdict(list)
    for process, value in enumerate(values):
        groups[value].append(process)
    ordered = sorted(groups.items(), key=lambda group: (-len(group[1]), group[1]))
    texts = []
    for value, processes in ordered:
        who = f"{'process' if len(processes) == 1 else 'processes'} {', '.join(map(str, processes))}"
        if 2 * len(processes) > len(values):
            who += " (the majority)"
        what = "no such value" if value is None else _shorten(value)
        texts.append(f"{who}: {what}")
    return f"{name}: {'; '.join(texts)}."


def _shorten(value: str) -> str:
    return repr(value if len(value) <= SHOWN_CHARACTERS else value[: SHOWN_CHARACTERS - 3] + "...")


def _mapping(value: object) -> dict[str, str]:
    assert isinstance(value, dict)
    return value
