"""Texts for people: bytes in their units, and what others wrote without control characters, which a terminal obeys."""

from typing import Final

VISIBLE_CONTROLS: Final = {"\n": "↵", "\r": "␍", "\t": "⇥"}


def visible(text: str) -> str:
    """A text on one line, with a sign for each newline, tab and control character, without the spaces around it."""
    return _escaped("".join(VISIBLE_CONTROLS.get(each, each) for each in text.strip(" ")))


def printable(text: str) -> str:
    """A text with its line ends, and an escape for every other character that cannot be printed."""
    return "\n".join(map(_escaped, text.split("\n")))


def _escaped(text: str) -> str:
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def bytes_text(size: int) -> str:
    """Bytes for reading."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(size) >= scale:
            return f"{size / scale:.2f} {unit}"
    return f"{size} B"


def seconds_text(value: float) -> str:
    """Seconds for reading, in the unit that they fill."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return "0" if value == 0 else f"{value * 1e6:.2g} µs"
