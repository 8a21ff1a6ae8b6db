"""The sizes of benchmarks: those that are measured, or the smallest with which each runs to its end in seconds."""

import os

SMALLEST = "LOCKSTEP_BENCHMARK_SMALLEST"
"""The environment variable that asks for the smallest sizes; workers inherit it. Peers are left out then."""
IS_SMALLEST = bool(os.environ.get(SMALLEST))


def sized[Size](measured: Size, smallest: Size) -> Size:
    """Return the size that this run has.

    Args:
        measured: The size whose figures mean something.
        smallest: A size with which all of the benchmark's code runs, in `make slow`.
    """
    return smallest if IS_SMALLEST else measured
