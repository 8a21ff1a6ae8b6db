"""Answers in a model's text: the number that a worked solution ends in, and a user's regular expression.

Final answers are those of GSM8K (Cobbe et al. 2021, https://arxiv.org/abs/2110.14168).
"""

import re
import time
from fractions import Fraction
from typing import Final

import regex

from lockstep.errors import ConfigError
from lockstep.text import split_answer

_MARK = re.compile(r"#{4,}")
_BRACE = re.compile(r"(?P<box>\\(?:boxed|fbox)\s*)?\{|\}")
_HEADING_NUMBER = re.compile(r"\W*\d+[.)]\s+[*_]*[^\W\d_]")
"""The beginning of a heading such as ``1. Calculate the total``."""
_REMARK = re.compile(r"\([^()]*\)")
_UNIT = re.compile(r"\\(?:text|textrm|textit|mathrm|mbox|operatorname)\s*\{[^{}]*\}(?:\s*\^\s*(?:\{[^{}]*\}|\w))?")
_SPACE = r"(?:\\[,;: ]|[~\u00a0\u2000-\u200a\u202f\u205f])"
_DASHES = r"[\u2010-\u2013\ufe63\uff0d]"  # hyphens, the figure dash and the en dash, which are written for a minus sign
_GROUPS = re.compile(r"(?<![\w.,/])\d{1,3}(?: \d{3})+(?!\d|[ ]?/)")
"""A number with a space between its thousands. Elsewhere than in a stated answer that is several numbers."""
_BRACED = r"\s*(?:\{([^{}]+)\}|(\d))"

_PLAIN: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), plain)
    for pattern, plain in (
        (_DASHES, "−"),
        (r"\\!|(?<=\d)" + _SPACE + r"(?=\d{3}(?!\d))", ""),  # within a number: 1,\!200 and 1\,200
        (r"\{,\}", ","),
        (_SPACE, " "),
        (r"(?<=[-−])\\?[$£€¥₹]", ""),
        (r"\\?[$£€¥₹]|\b(?:USD?|EUR|GBP|INR|Rs\.?)(?![A-Za-z])", " "),
        (r"(?<=\d)\s*\\[cdt]?frac" + _BRACED + _BRACED, r" \1\2/\3\4"),  # 2\frac{1}{2} is 2 1/2
        (r"\\[cdt]?frac" + _BRACED + _BRACED, r"\1\2/\3\4"),
        (r"\^\s*\{?\s*\\circ\b\s*\}?", " "),
        (r"(?<=\d)\s*(?:\\times|\\cdot|[×·x*])\s*10\s*\^\s*\{?([-−]?\d{1,3})\}?(?!\d)", r"e\1"),
        (r"(?<=[A-Za-z}])\s*\^\s*(?:\{[^{}]*\}|[-−]?\d+)", " "),  # of a unit: m^2, \text{ km}^2
        (r"\\sqrt\b|\\pi\b|π", "√"),
        (r"\\approx\b|≈", "="),
        (r"\\[A-Za-z]+", " "),
        (r"(=\s*[-−])\s+(?=[\d.])", r"\1"),
    )
)
"""LaTeX and its plain text, replaced in this order. √ stands for what makes a number irrational."""

_NUMBER = re.compile(
    r"""(?P<sign>(?<![\w)%])(?<![\d)%][ ])[-−])?  # not a subtraction, nor a dash between words or before a space
    (?<![A-Za-z\d√])(?<!\d\.)(?<!√\{)             # not a part of a name or of another number: m2, x1
    (?>
      (?:(?P<whole>\d++)[ ]++(?=\d++/\d))?
      (?P<top>(?:\d{1,3}(?:,\d{3})++(?!\d)|\d{1,2}(?:,\d\d(?!\d))++,\d{3}(?!\d)|\d++)(?:\.\d++)?|\.\d++)
      (?:[eE](?P<exponent>[-−+]?\d{1,3})(?!\d))?
      (?:[ ]?/[ ]?(?P<bottom>\d++(?:\.\d++)?))?
      (?:\s*+\^\s*+\{?(?P<power>[-−]?\d{1,2})\}?(?!\d))?
    )
    (?!\s*+√)""",
    re.VERBOSE,
)


def last_number(text: str) -> Fraction | None:
    r"""The number that a solution ends in.

    That is the number after the last ``####`` that one follows, else the one in the last ``\boxed{}``, else the last
    number of the text, without the reasoning before a final answer (`lockstep.text.split_answer`). After ``####`` the
    first number of the line counts, or after ``=`` the last; it may have a label (``#### Answer: 72``), but the number
    of a heading is none (``#### Step 2``, ``#### 1. Count``). Units, currencies, thousands separators, LaTeX spaces,
    fractions, mixed numbers and powers of ten are understood; multiples of π and roots are no numbers.
    """
    text = split_answer(text).content
    for part in reversed(_MARK.split(text)[1:]):
        if (number := _stated(_line(part), marked=True)) is not None:
            return number
    if (box := _last_box(text)) is not None:
        return _stated(re.sub(rf"^({_DASHES}|[-−])\s+", r"\1", box))  # no bullet, as it may be elsewhere
    numbers = _numbers(_plain(text))
    return numbers[-1][1] if numbers else None


def final_text(text: str, lines: int | None = None) -> str:
    """The rest of the line after the last ``####`` of a text, without space around it.

    Args:
        lines: The lines that count where a text has no such mark, from the first that is not empty; None for all.
    """
    *_, last = marked = _MARK.split(text)
    return "\n".join(last.strip().split("\n")[: 1 if len(marked) > 1 else lines]).strip()


def same_number(number: Fraction | None, expected: Fraction) -> bool:
    """Whether a solution gives the expected number."""
    return number is not None and number == expected


def _line(text: str) -> str:
    """The first line that has a text, or the one after it where it is a heading such as ``Final Answer``."""
    lines = [line for line in text.split("\n") if line.strip()][:2]
    heading = len(lines) == 2 and "answer" in lines[0].lower() and not re.search(r"\d", lines[0])
    return lines[heading] if lines else ""


def _last_box(text: str) -> str | None:
    r"""The content of the last ``\boxed{}`` that is closed and not empty."""
    last = None
    opened: list[re.Match[str]] = []
    for brace in _BRACE.finditer(text):
        if brace[0] != "}":
            opened.append(brace)
        elif opened and (opening := opened.pop())["box"]:
            last = text[opening.end() : brace.start()].strip() or last
    return last


def _stated(text: str, *, marked: bool = False) -> Fraction | None:
    """The number of a line or a box, without units and remarks where that leaves one."""
    if marked and _HEADING_NUMBER.match(text):
        return None
    for unjoined in (_REMARK.sub(" ", _plain(_UNIT.sub(" ", text))), _plain(text)):
        plain = _GROUPS.sub(lambda match: match[0].replace(" ", ""), unjoined)
        if not (numbers := _numbers(plain)):
            continue
        before = plain[: numbers[0][0]]
        if marked and not _is_label(before):
            continue
        _, equals, after = plain.rpartition("=")
        return (_numbers(after) or numbers)[0 if marked and not equals else -1][1]
    return None


def _is_label(text: str) -> bool:
    """Whether the number after this is an answer: ``Final answer``, ``Total:``, ``x =``, ``the sum is``, or no word."""
    words = text.lower().rstrip(" *_`{([\\-")
    return not re.search("[a-z]", words) or "answer" in words or words.endswith((":", "=", " is"))


def _plain(text: str) -> str:
    for pattern, plain in _PLAIN:
        text = pattern.sub(plain, text)
    return text


def _numbers(plain: str) -> list[tuple[int, Fraction]]:
    """The numbers of a plain text, each with the place where it begins."""
    values = ((match.start(), _value(match)) for match in _NUMBER.finditer(plain))
    return [(start, value) for start, value in values if value is not None]


def _value(match: re.Match[str]) -> Fraction | None:
    parts = {name: part.replace(",", "").replace("−", "-") for name, part in match.groupdict("").items()}
    try:
        value = Fraction(f"{parts['top']}e{parts['exponent'] or 0}") / Fraction(parts["bottom"] or 1)
        if parts["whole"] and value < 1:
            value += int(parts["whole"])
        value **= int(parts["power"] or 1)
    except (ValueError, ZeroDivisionError):  # division by zero, or more digits than Python reads
        return None
    return -value if parts["sign"] else value


MATCH_S = 1.0  # seconds of the matching thread's own processor time that one text may take

_TOKEN: Final = re.compile(
    r"""\\N\{[^}]*\} | \\.                            # an escape
      | \(\?\#[^)]*\)                                 # a comment
      | \(\?[aiLmsux]*(?:-[imsx]+)?[:)]               # a group with flags, or flags for all that follows
      | \[\^?\]?(?:\\.|[^\]\\])*\]                    # a set
      | \{(?:\d+(?:,\d*)?|,\d*)\}                     # a number of repetitions
      | \#[^\n]*                                      # a comment, where the pattern is verbose
      | .""",
    re.DOTALL | re.VERBOSE,
)
_SET_PART: Final = re.compile(r"\\.|\[", re.DOTALL)


class Pattern:
    r"""A regular expression of Python, with the meaning that ``re`` gives it.

    Beyond ASCII ``\w`` and ``\b`` follow Unicode, which ``re`` does not: a mark of its own, such as a vowel sign of
    Hindi, belongs to its word, and a sign such as ² or ½ to none.

    ``re`` keeps every other thread of the process from running until it has an answer, which for some patterns and
    texts it has never: this host would say nothing to its peers, and they would end the job. ``regex`` lets them run,
    and gives up.

    Args:
        multiline: Whether ``^`` and ``$`` match at every line.
        dot_all: Whether ``.`` matches a newline too.

    Raises:
        ConfigError: It is not one.
    """

    def __init__(self, pattern: str, *, multiline: bool = False, dot_all: bool = False) -> None:
        self._pattern = pattern
        try:
            verbose = bool(re.compile(pattern).flags & re.VERBOSE)
            flags = regex.MULTILINE * multiline | regex.DOTALL * dot_all
            self._compiled = regex.compile(_for_regex(pattern, verbose), flags | regex.VERSION0)
        except (re.error, regex.error) as error:
            raise ConfigError(f"{pattern!r} is not a regular expression of Python ({error}). Correct it.") from None

    def is_in(self, text: str) -> bool:
        """Whether a part of a text matches."""
        return self._matches(text, whole=False)

    def is_all_of(self, text: str) -> bool:
        """Whether a text as a whole matches."""
        return self._matches(text, whole=True)

    def _matches(self, text: str, whole: bool) -> bool:
        match = self._compiled.fullmatch if whole else self._compiled.search
        # The limit of regex is on the processor time of all threads together, of which a busy host spends seconds in
        # one. So it is raised until this thread has had its share.
        limit = MATCH_S
        while True:
            begin = time.thread_time()
            try:
                return match(text, timeout=limit) is not None
            except TimeoutError:
                if time.thread_time() - begin >= MATCH_S:
                    break
                limit *= 2
        raise TimeoutError(
            f"the pattern {self._pattern!r} was not done with {len(text)} characters within {MATCH_S:g} s. A pattern "
            "whose parts can share out a text in many ways, such as (a|aa)+, takes twice as long with each further "
            "character. Write it so that there is one way."
        )


def _for_regex(pattern: str, verbose: bool) -> str:
    """A pattern that ``re`` takes, with nothing in it that ``regex`` alone gives a meaning.

    ``x_{i}`` would match ``x`` and ``x_y`` (one insertion), ``[[:alpha:]]`` any letter.
    """
    parts, at = [], 0
    outer: list[bool] = []
    while at < len(pattern):
        match = _TOKEN.match(pattern, at)
        assert match is not None, "the last alternative matches any character"
        token = match[0]
        if token[0] == "#" and not verbose:
            token = "#"
        at += len(token)
        if token.startswith("(?") and token[-1] in ":)" and token[2:3] != "#":
            if token[-1] == ":":
                outer.append(verbose)
            on, _, off = token[2:-1].partition("-")
            verbose = (verbose or "x" in on) and "x" not in off
        elif token == "(":
            outer.append(verbose)
        elif token == ")":
            verbose = outer.pop()
        elif token == "{":
            token = r"\{"
        elif len(token) > 1 and token[0] == "[":
            token = "[" + _SET_PART.sub(lambda part: r"\[" if part[0] == "[" else part[0], token[1:])
        parts.append(token)
    return "".join(parts)
