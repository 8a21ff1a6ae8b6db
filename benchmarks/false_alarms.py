"""Runs without a fault, simulated: how often the alarms of lockstep.health speak, and how soon of a fault.

``benchmarks/health.py`` has its numbers. Each round asks 4 to 128 prompts, and each answer has each of some states by
chance, in one of these ways:

- ``drawn``: every answer of every round is a draw of its own;
- ``new``: the same, to other prompts in each round;
- ``greedy``: a prompt's state changes once in ten rounds, in the mean, and its answers are the same until then;
- ``slow``: the same, once in a hundred rounds;
- ``hard``: some prompts have a state more often than others;
- ``wandering``: the odds of each state grow and shrink from round to round, for all prompts together.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Final

import numpy as np
from jaxtyping import Bool, Float

from lockstep.health import Alarms, PromptStates
from lockstep.health.alarms import FALSE_ALARMS

SHARES: Final = {"cut": 0.5, "other_script": 0.2, "repetitive": 0.1, "loop": 0.05, "empty": 0.02, "special_token": 0.0}
"""The share of answers in each state."""
KINDS: Final = ("drawn", "new", "greedy", "slow", "hard", "wandering")
SIZES: Final = ((4, 1), (32, 1), (16, 8), (128, 1))  # prompts, and answers to each
WANDERING: Final = 0.3  # standard deviation of the logarithm of the odds


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimulatedRun:
    """A run whose answers are drawn.

    Args:
        odds: The factor of the odds of each state from the round ``changed`` on.
    """

    kind: str
    prompts: int
    answers: int
    seed: int
    odds: float = 1.0
    changed: int = 0

    def rounds(self) -> Iterator[list[PromptStates]]:
        """The states of the answers, round by round, without an end."""
        random = np.random.default_rng([self.seed, KINDS.index(self.kind), self.prompts, self.answers])
        base = np.log(np.array(list(SHARES.values())) + 1e-12)
        base -= np.log1p(-np.exp(base))
        shape = (self.prompts, self.answers, len(SHARES))
        hardness = random.normal(size=(self.prompts, 1, len(SHARES))) * (self.kind == "hard")
        drift = np.zeros(len(SHARES))
        draws: Float[np.ndarray, "prompt answer state"] = random.random(shape)
        number = 0
        while True:
            again = {"greedy": 0.1, "slow": 0.01}.get(self.kind, 1.0)
            anew = random.random((self.prompts, 1, 1)) < again
            fresh = random.random(shape)
            fresh = fresh if again == 1 else np.broadcast_to(fresh[:, :1], shape)  # a greedy model says the same again
            draws = np.where(anew, fresh, draws) if number else fresh
            if self.kind == "wandering":
                drift = 0.8 * drift + 0.6 * WANDERING * random.normal(size=len(SHARES))
            odds = base + hardness + drift + math.log(self.odds) * (number >= self.changed)
            yield self._states(draws < 1 / (1 + np.exp(-odds)), number)
            number += 1

    def _states(self, in_state: Bool[np.ndarray, "prompt answer state"], number: int) -> list[PromptStates]:
        first = number * self.prompts if self.kind == "new" else 0
        return [
            PromptStates(
                prompt=str(first + place),
                answers=[{state for state, has in zip(SHARES, answer, strict=True) if has} for answer in answers],
                groups=("code" if place % 4 == 0 else "no code", f"turns {place % 3}", f"subject {place % 7}"),
            )
            for place, answers in enumerate(in_state.tolist())
        ]


def alarmed_rounds(run: SimulatedRun, count: int, false_alarms: float = FALSE_ALARMS) -> list[int]:
    """The rounds of the first ``count`` that raised an alarm."""
    alarms = Alarms(SHARES, false_alarms=false_alarms, warm_up=0, usual=SHARES)
    rounds = zip(range(count), run.rounds(), strict=False)
    return [number for number, states in rounds if alarms.add(number, states)]


def false_alarms_per_round(kind: str, prompts: int, answers: int, *, runs: int, rounds: int) -> float:
    """The rounds with an alarm, of all rounds of some runs without a fault."""
    simulated = [SimulatedRun(kind=kind, prompts=prompts, answers=answers, seed=seed) for seed in range(runs)]
    return sum(len(alarmed_rounds(run, rounds)) for run in simulated) / (runs * rounds)
