"""How many tokens a decode launch samples per sequence."""

from collections.abc import Sequence

_LAUNCH_COST = 4
"""What a launch costs besides its steps, in steps: the host's work, the context laid out anew, the prefill of those who
are let in. A guess: with true costs of 0.5 to 6 the choice below comes within 6 % of the best fixed least length at 8
to 64 slots, each time another one (benchmarks/admission.py).
"""
_EARLY_PART = 4
"""The part of the longest launch that is run while others wait for sequences that may end at any step."""


def launch_steps(remaining: Sequence[int], limit: int, *, waiting: bool, may_stop: bool) -> int:
    """The number of steps of a launch; a pure function, so every host computes the same.

    With nobody waiting a launch is as long as its longest sequence. While others wait, a long launch leaves slots idle
    that have ended, and a short one pays for the launch again: of all lengths at which a sequence ends, the one that
    samples the most tokens per step paid for. Sequences that may stop early end nobody knows when, so there a launch is
    a quarter of ``limit`` at most.

    Args:
        remaining: tokens that each active sequence may still sample, each at least 1.
        limit: steps of a launch at most.
        waiting: whether other sequences wait for a slot or pages.
        may_stop: whether an active sequence may end before its last token.
    """
    longest = min(limit, max(remaining))
    if not waiting:
        return longest
    if may_stop:
        longest = min(longest, max(1, limit // _EARLY_PART))
    ends = sorted(min(left, longest) for left in remaining)
    best, best_rate, ended = longest, 0.0, 0
    for index, steps in enumerate(ends):
        rate = (ended + steps * (len(ends) - index)) / (steps + _LAUNCH_COST)
        ended += steps
        if rate >= best_rate:
            best, best_rate = steps, rate
    return best
