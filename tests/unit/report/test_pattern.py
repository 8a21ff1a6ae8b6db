import re
import threading
import time

import pytest

from lockstep.errors import ConfigError
from lockstep.report import pattern
from lockstep.report.pattern import Pattern

SLOW, TEXT = "(a|aa)+$", "a" * 36 + "b"
"""``re`` needs some 6 s for it, ``regex`` twice that."""


def test_other_threads_run_while_a_pattern_backtracks(monkeypatch):
    monkeypatch.setattr(pattern, "MATCH_S", 1.0)
    ticks, stop = [], threading.Event()

    def tick():
        while not stop.wait(0.01):
            ticks.append(time.monotonic())

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    begin = time.monotonic()
    try:
        with pytest.raises(TimeoutError, match=r"'\(a\|aa\)\+\$' was not done with 37 characters within 1 s"):
            Pattern(SLOW).is_in(TEXT)
        end = time.monotonic()
    finally:
        stop.set()
        thread.join()
    assert sum(begin < at < end for at in ticks) >= 3


def test_the_limit_is_the_matching_threads_own_time(monkeypatch):
    """The clock of ``regex`` runs with every busy thread of the process: one match in three tries is in time."""
    monkeypatch.setattr(pattern, "MATCH_S", 0.2)
    limits, left = [], [TimeoutError, TimeoutError, None]

    class Compiled:
        def search(self, text, timeout):
            limits.append(timeout)
            if error := left.pop(0):
                raise error

    one = Pattern("a")
    one._compiled = Compiled()
    assert one.is_in("b") is False and limits == [0.2, 0.4, 0.8]


@pytest.mark.filterwarnings("ignore:Possible:FutureWarning")
@pytest.mark.parametrize(
    "source",
    [
        "x_{i}",
        r"\\frac{d}{x}",
        "a{e}b{2}c{,1}d{1,}e{}{x",
        "[[:alpha:]]",
        "[]{e]{e}[^]a]{s<=1}",
        "(?x) a{e} # x{e} [ (\n b",
        r"(?x: a{e} # [ (" + "\n) [#]{e} #",
        "(?#[)a{e}",
        r"\N{DIGIT ONE}{e}\{e}",
        "[*--][a&&b][a||b]",
        r"(?P<n>a|\[)(?P=n){e}(?(n)a|b)(?<=b)",
        r"(?i:A{E})\b\w+\s*\d{2}$",
    ],
)
def test_a_pattern_means_what_it_means_to_re(source):
    texts = [
        "x_",
        "x_{i}",
        "x",
        r"\frac{d}{x}",
        r"\frac{}{x}",
        "a{e}bbcde{}{x",
        "a",
        "l",
        "a]",
        ":]",
        "ab",
        "a{e}",
        "-]",
    ]
    texts += ["a{e}b", "a{e}#{e} #", "{{e}b{s<=1}", "1{e}{e}", "-&|", "+b|", "aa{e}ab", "a{E} b 12", "[]", "", "a\nb"]
    ours, theirs = Pattern(source, multiline=True), re.compile(source, re.MULTILINE)
    assert {text: (ours.is_in(text), ours.is_all_of(text)) for text in texts} == {
        text: (theirs.search(text) is not None, theirs.fullmatch(text) is not None) for text in texts
    }


def test_flags():
    assert Pattern("^b$", multiline=True).is_in("a\nb\nc") and not Pattern("^b$").is_in("a\nb\nc")
    assert Pattern("a.b", dot_all=True).is_all_of("a\nb") and not Pattern("a.b").is_all_of("a\nb")


@pytest.mark.parametrize("source", ["(", "[", "*a", r"\p{L}", r"\m", "(?<n>a)", "(?1)"])
def test_what_re_does_not_take_is_refused(source):
    with pytest.raises(ConfigError, match=re.escape(repr(source)) + " is not a regular expression of Python"):
        Pattern(source)


def test_beyond_ascii_a_mark_is_part_of_its_word():
    assert Pattern(r"\w+").is_all_of("हिन्दी") and not Pattern(r"\w").is_in("½")
