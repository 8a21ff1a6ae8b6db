"""The share of right answers to each question so far, by which a rollout draws its questions."""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from jaxtyping import Float, Int

from lockstep.errors import ConfigError

FADING: Final = 0.5
"""The factor of earlier answers to a question, each time that it is answered again: the model has changed."""


class SolveRates:
    """The share of right answers to each question; the same on every host, as the rewards are.

    A question is drawn with a weight of ``p (1 - p)``, which is largest where half of the answers are right and nothing
    could be learned from where all or none are (sampling for learnability, Foster et al. 2025, https://arxiv.org/abs/2502.12272).
    ``p`` is ``(right + 1) / (answers + 2)``: 1/2 before the first answer, and never 0 or 1, so that no question is
    left for good.

    Args:
        count: The number of questions.
        seed: That of their order.
    """

    def __init__(self, count: int, seed: int) -> None:
        self._seed = seed
        self._right, self._answers = np.zeros(count), np.zeros(count)

    @property
    def weights(self) -> Float[np.ndarray, " question"]:
        """The weight of each question."""
        rate = (self._right + 1) / (self._answers + 2)
        return rate * (1 - rate)

    def drawn(self, rollout: int, count: int, attempt: int = 0) -> Int[np.ndarray, " prompt"]:
        """Return which questions a rollout has: a function of seed, number and the answers so far.

        They are drawn without replacement, by the order of :math:`u^{1/w}` (Efraimidis & Spirakis 2006,
        https://doi.org/10.1016/j.ipl.2005.11.003). Further attempts go on in this order.
        """
        uniform = np.random.default_rng((self._seed, rollout, 2)).random(len(self._right))
        order = np.argsort(np.log(uniform) / self.weights, kind="stable")[::-1]
        return np.resize(order, (attempt + 1) * count)[attempt * count :]

    def add(self, question: int, rewards: Float[np.ndarray, " answer"]) -> None:
        """Count the answers to a question: one is right as far as its reward is, from 0 to 1."""
        self._right[question] = FADING * self._right[question] + np.clip(rewards, 0, 1).sum()
        self._answers[question] = FADING * self._answers[question] + len(rewards)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {"right": self._right.tolist(), "answers": self._answers.tolist()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned.

        Raises:
            ConfigError: It is of another number of questions.
        """
        right, answers = (np.asarray(state[name], np.float64) for name in ("right", "answers"))
        if not right.shape == answers.shape == self._right.shape:
            raise ConfigError(
                f"the checkpoint has the solve rates of {len(right)} questions, and now there are {len(self._right)}. "
                "Use the same data.train_urls, or another trainer.run_id."
            )
        self._right, self._answers = right, answers
