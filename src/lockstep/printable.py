"""Texts that others wrote, as a terminal may have them: a control character there would move, hide or send things."""

from typing import Final

VISIBLE_CONTROLS: Final = {"\n": "↵", "\r": "␍", "\t": "⇥"}


def visible(text: str) -> str:
    """A text on one line, with a sign for each newline, tab and control character, without the spaces around it.

    Args:
        text: The text.
    """
    return _escaped("".join(VISIBLE_CONTROLS.get(each, each) for each in text.strip(" ")))


def printable(text: str) -> str:
    """A text with its line ends, and an escape for every other character that cannot be printed.

    Args:
        text: The text.
    """
    return "\n".join(map(_escaped, text.split("\n")))


def _escaped(text: str) -> str:
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
