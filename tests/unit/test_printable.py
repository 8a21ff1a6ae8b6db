"""What of a text that others wrote reaches a terminal."""

import pytest

from lockstep.printable import bytes_text, printable, seconds_text, visible

HOSTILE = "a\x1b[31m\x07\r\tb\nc\x9b\u202e\ud800 ü"


def test_a_text_keeps_its_lines_and_nothing_that_a_terminal_obeys():
    assert printable(HOSTILE) == "a\\x1b[31m\\x07\\r\\tb\nc\\x9b\\u202e\\ud800 ü"
    assert all(line.isprintable() for line in printable(HOSTILE).split("\n"))


def test_on_one_line_it_has_signs_for_line_ends():
    assert visible(f" {HOSTILE} ") == "a\\x1b[31m\\x07␍⇥b↵c\\x9b\\u202e\\ud800 ü"


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (3 * 2**20 // 2, "1.50 MiB"),
        (2**30 - 1, "1024.00 MiB"),
        (2**30, "1.00 GiB"),
        (-5 * 2**20, "-5.00 MiB"),
    ],
)
def test_the_unit_is_the_largest_that_the_size_fills(size, text):
    assert bytes_text(size) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0"), (2e-7, "0.2 µs"), (1.5e-5, "15 µs"), (0.0123, "12.3 ms"), (75.0, "75 s")]
)
def test_seconds_have_the_unit_that_they_fill(value, text):
    assert seconds_text(value) == text
