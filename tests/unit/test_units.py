"""Bytes as people read them."""

import pytest

from lockstep.units import bytes_text, seconds_text


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
