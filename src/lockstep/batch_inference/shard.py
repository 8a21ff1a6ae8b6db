"""Which rows a job has, which are left, and which host generates them: pure functions, the same on every host."""

import dataclasses
from collections.abc import Iterator

import numpy as np
from jaxtyping import Bool, Int

BATCH_TOKENS = 2_000_000
"""New tokens of a batch, at most, unless the sequences that fill all slots once have more. A token takes about 100
bytes of host memory."""
_SLOT_FILLS = 4
"""Times that a batch fills all slots, at most: a longer one would have its rows on disk later."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobShape:
    """The rows of a job. Row number = (round · prompts + prompt) · generations + generation.

    Args:
        rounds: The number of rounds, at least 1.
        prompts: The number of prompts, at least 1.
        generations: The number of completions of a prompt in a round, at least 1.
    """

    rounds: int
    prompts: int
    generations: int

    @property
    def units(self) -> int:
        """The number of pairs of a round and a prompt, whose completions are generated together or not at all."""
        return self.rounds * self.prompts

    @property
    def rows(self) -> int:
        """The number of rows: one for each completion."""
        return self.units * self.generations

    def row(self, round_: int, prompt: int, generation: int) -> int | None:
        """Return the number of a row; None where the job has no such row."""
        if not (0 <= round_ < self.rounds and 0 <= prompt < self.prompts and 0 <= generation < self.generations):
            return None
        return (round_ * self.prompts + prompt) * self.generations + generation

    def finished(self, rows: Bool[np.ndarray, " rows"]) -> Bool[np.ndarray, " units"]:
        """Return for each unit whether all its rows are there."""
        return rows.reshape(self.units, self.generations).all(axis=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """Prompts of one round that are generated together, longest first."""

    round: int
    prompts: tuple[int, ...]


def pending_units(
    shape: JobShape, lengths: Int[np.ndarray, " prompts"], finished: Bool[np.ndarray, " units"]
) -> Int[np.ndarray, " pending"]:
    """Return the units that are left to do, by round and in a round by length, the longest prompt first.

    This way capacities never have to grow, and prompts of a batch are about equally long, so that replicas with the
    same number of them have the same work.

    Args:
        shape: The rows of the job.
        lengths: The number of tokens of each prompt.
        finished: Whether each unit has all its rows.
    """
    units = np.flatnonzero(~finished)
    rounds, prompts = np.divmod(units, shape.prompts)
    return units[np.lexsort((prompts, -lengths[prompts], rounds))]


def share_of(units: Int[np.ndarray, " pending"], host: int, hosts: int) -> Int[np.ndarray, " share"]:
    """Return the units of one of several hosts: dealt out in turns, alternately forwards and backwards, so that every
    host has about the same number of tokens.

    Args:
        units: All units in the order of `pending_units`.
        host: The number of the host, from 0.
        hosts: The number of hosts.
    """
    turn, place = np.divmod(np.arange(len(units)), hosts)
    return units[np.where(turn % 2 == 0, place, hosts - 1 - place) == host]


def batches(shape: JobShape, units: Int[np.ndarray, " pending"], prompts_per_batch: int) -> Iterator[Batch]:
    """Yield units in batches of at most ``prompts_per_batch`` prompts.

    A batch has units of one round, because a prompt can have one number in it only.
    """
    rounds, prompts = np.divmod(units, shape.prompts)
    for round_ in range(shape.rounds):
        of_round = prompts[rounds == round_]
        for start in range(0, len(of_round), prompts_per_batch):
            yield Batch(round=round_, prompts=tuple(of_round[start : start + prompts_per_batch].tolist()))


def prompts_per_batch(sequences: int, generations: int, max_new_tokens: int, cap: int | None = None) -> int:
    """Return the number of prompts of a batch: enough to fill all slots several times, as far as `BATCH_TOKENS` allows.

    Args:
        sequences: The number of sequences that are decoded at a time.
        generations: The number of completions of a prompt.
        max_new_tokens: The most tokens of a completion.
        cap: The most prompts; None for no cap.
    """
    at_once = -(-sequences // generations)
    in_memory = BATCH_TOKENS // (generations * max_new_tokens)
    best = max(1, at_once, min(_SLOT_FILLS * at_once, in_memory))
    return best if cap is None else min(best, cap)
