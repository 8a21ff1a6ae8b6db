"""Final answers in worked solutions, as in GSM8K (Cobbe et al. 2021, https://arxiv.org/abs/2110.14168)."""

import re
from fractions import Fraction

_NUMBER = re.compile(r"[-−]?\$?\s?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:\s?/\s?\d+)?|[-−]?\$?\.\d+")
_MARK = "####"
_BOXED = re.compile(r"\\boxed\s*\{((?:[^{}]|\{[^{}]*\})*)\}")
_FRACTION = re.compile(r"\\[dt]?frac\s*\{([^{}]+)\}\s*\{([^{}]+)\}")


def last_number(text: str) -> Fraction | None:
    r"""The number that a solution ends in.

    What follows the last ``####`` counts, else what is in the last ``\boxed{}``, else the last number of the
    text. Thousands separators, a currency sign, a per cent sign and ``\frac{1}{2}`` are understood.

    Args:
        text: The text of a solution.

    Returns:
        The number; None where there is none.
    """
    if _MARK in text:
        found = _numbers(text.rpartition(_MARK)[2].strip().split("\n")[0])
        return found[0] if found else None
    if boxed := _BOXED.findall(text):
        found = _numbers(boxed[-1])
        return found[-1] if found else None
    found = _numbers(text)
    return found[-1] if found else None


def same_number(given: Fraction | None, expected: Fraction) -> bool:
    """Whether a solution gives the expected number.

    Args:
        given: The number of the solution; None where it has none, which is never the same.
        expected: The number of the reference answer.
    """
    return given is not None and given == expected


def _numbers(text: str) -> list[Fraction]:
    text = _FRACTION.sub(r"\1/\2", text)
    return [value for match in _NUMBER.finditer(text) if (value := _value(text, match)) is not None]


def _value(text: str, match: re.Match[str]) -> Fraction | None:
    written = re.sub(r"[\s$,]", "", match[0]).replace("−", "-")
    before = text[: match.start()].rstrip(" ")
    if written.startswith("-") and before[-1:].isalnum():
        written = written[1:]  # a dash between words or a subtraction, not a sign
    try:
        return Fraction(written)
    except (ValueError, ZeroDivisionError):
        return None
