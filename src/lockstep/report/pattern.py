"""A user's regular expression over a model's text: other threads run while it matches, and it has a limit."""

import re
import time
from typing import Final

import regex

from lockstep.errors import ConfigError

MATCH_S = 1.0
"""Seconds of the matching thread's own processor time that one text may take."""

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
        pattern: The expression.
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
        """Whether a part of a text matches.

        Raises:
            TimeoutError: That is not known within ``MATCH_S``.
        """
        return self._matches(text, whole=False)

    def is_all_of(self, text: str) -> bool:
        """Whether a text as a whole matches.

        Raises:
            TimeoutError: That is not known within ``MATCH_S``.
        """
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

    Args:
        verbose: Whether it is verbose where it begins.
    """
    parts, at = [], 0
    outer: list[bool] = []
    while at < len(pattern):
        found = _TOKEN.match(pattern, at)
        assert found is not None, "the last alternative matches any character"
        token = found[0]
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
