"""What of a text that others wrote reaches a terminal."""

from lockstep.printable import printable, visible

HOSTILE = "a\x1b[31m\x07\r\tb\nc\x9b\u202e\ud800 ü"


def test_a_text_keeps_its_lines_and_nothing_that_a_terminal_obeys():
    assert printable(HOSTILE) == "a\\x1b[31m\\x07\\r\\tb\nc\\x9b\\u202e\\ud800 ü"
    assert all(line.isprintable() for line in printable(HOSTILE).split("\n"))


def test_on_one_line_it_has_signs_for_line_ends():
    assert visible(f" {HOSTILE} ") == "a\\x1b[31m\\x07␍⇥b↵c\\x9b\\u202e\\ud800 ü"
