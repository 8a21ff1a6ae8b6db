"""Ranges of rows that one host asks for."""

import itertools

import pytest

from lockstep.models.hf.parameter_read import _ranges


@pytest.mark.parametrize("most", [1, 3, 7, 100])
@pytest.mark.parametrize(
    "devices", [[(0, 5), (5, 10)], [(5, 10), (0, 5)], [(0, 4), (4, 4), (8, 20)], [(3, 4)], [(2, 2)], []]
)
def test_ranges_have_every_row_once_and_are_as_few_as_can_be(devices: list[tuple[int, int]], most: int) -> None:
    ranges = list(_ranges(devices, most))
    got = {
        (rows.block, rows.offset + row - rows.start): row
        for parts in ranges
        for rows in parts
        for row in range(rows.start, rows.stop)
    }
    expected = {(block, row - start): row for block, (start, stop) in enumerate(devices) for row in range(start, stop)}
    assert got == expected and sum(rows.stop - rows.start for parts in ranges for rows in parts) == len(expected)
    for parts in ranges:
        assert all(one.stop == other.start for one, other in itertools.pairwise(parts))
        assert parts[-1].stop - parts[0].start <= most
    runs, last = [], None
    for row in sorted(expected.values()):
        runs[-1:] = [runs[-1] + 1] if row - 1 == last else [*runs[-1:], 1]
        last = row
    assert len(ranges) == sum(-(-run // most) for run in runs)
