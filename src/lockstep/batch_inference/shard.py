"""What there is to do, what is done, and who does the rest: pure functions of numbers, alike on every host."""

import dataclasses
from collections.abc import Iterator

import numpy as np
from jaxtyping import Bool, Int

BATCH_TOKENS = 2_000_000
"""New tokens of a batch at most, where a single wave of sequences has fewer: about 100 bytes of host memory each."""
_WAVES = 4
"""Times that a batch fills all slots, at most: the last wave leaves slots idle, and its rows are not on disk yet."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobShape:
    """How many rows a job has. Row number = (round · prompts + prompt) · generations + generation.

    Args:
        rounds: at least 1.
        prompts: at least 1.
        generations: at least 1.
    """

    rounds: int
    prompts: int
    generations: int

    @property
    def units(self) -> int:
        """Pairs of a round and a prompt: what is generated together, or not at all."""
        return self.rounds * self.prompts

    @property
    def rows(self) -> int:
        """All answers."""
        return self.units * self.generations

    def row(self, round_: int, prompt: int, generation: int) -> int | None:
        """The number of a row; None where the job has no such row."""
        if not (0 <= round_ < self.rounds and 0 <= prompt < self.prompts and 0 <= generation < self.generations):
            return None
        return (round_ * self.prompts + prompt) * self.generations + generation

    def finished(self, rows: Bool[np.ndarray, " rows"]) -> Bool[np.ndarray, " units"]:
        """Units of which every row is there."""
        return rows.reshape(self.units, self.generations).all(axis=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """Prompts of one round that are generated together, longest first."""

    round: int
    prompts: tuple[int, ...]


def pending_units(
    shape: JobShape, lengths: Int[np.ndarray, " prompts"], finished: Bool[np.ndarray, " units"]
) -> Int[np.ndarray, " pending"]:
    """Units that are left to do: by round, in a round the longest prompt first.

    Longest first, so that capacities never have to grow, and prompts of a batch are about equally long, so that
    replicas that get as many of them have as much to do.
    """
    units = np.flatnonzero(~finished)
    rounds, prompts = np.divmod(units, shape.prompts)
    return units[np.lexsort((prompts, -lengths[prompts], rounds))]


def share_of(units: Int[np.ndarray, " pending"], host: int, hosts: int) -> Int[np.ndarray, " share"]:
    """What one of several hosts does: units dealt out in turns, there and back, so that lengths are even.

    Args:
        units: as `pending_units` orders them.
        host: from 0.
        hosts: number of them.
    """
    turn, place = np.divmod(np.arange(len(units)), hosts)
    return units[np.where(turn % 2 == 0, place, hosts - 1 - place) == host]


def batches(shape: JobShape, units: Int[np.ndarray, " pending"], prompts_per_batch: int) -> Iterator[Batch]:
    """Units in batches of at most so many prompts, each of one round, for a prompt has one number in a batch."""
    rounds, prompts = np.divmod(units, shape.prompts)
    for round_ in range(shape.rounds):
        mine = prompts[rounds == round_]
        for start in range(0, len(mine), prompts_per_batch):
            yield Batch(round=round_, prompts=tuple(mine[start : start + prompts_per_batch].tolist()))


def prompts_per_batch(sequences: int, generations: int, max_new_tokens: int, cap: int | None = None) -> int:
    """Prompts of a batch: enough to fill all slots several times, as far as the host's memory for answers allows.

    Args:
        sequences: that are decoded at a time.
        generations: of a prompt.
        max_new_tokens: of an answer.
        cap: prompts at most; None for no cap.
    """
    wave = -(-sequences // generations)
    roomy = BATCH_TOKENS // (generations * max_new_tokens)
    best = max(1, wave, min(_WAVES * wave, roomy))
    return best if cap is None else min(best, cap)
