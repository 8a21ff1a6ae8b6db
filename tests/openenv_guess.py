"""An environment of OpenEnv with local data: a number is guessed, and each guess is answered."""

import os
import time

from openenv.core.env_server import Action, Environment, Observation, State
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.rubrics.base import Rubric


class Guess(Action):
    guess: str


class Hint(Observation):
    hint: str = ""


class Closeness(Rubric):
    def forward(self, action, observation):
        return float(observation.hint == "Right.")


class Rules(Rubric):
    def __init__(self):
        super().__init__()
        self.closeness = Closeness()

    def forward(self, action, observation):
        return self.closeness(action, observation)


class Numbers(Environment[Guess, Hint, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, most: int = 10):
        super().__init__(rubric=Rules())
        self.most = most

    def reset(self, seed=None, episode_id=None, level=0, **more) -> Hint:
        self.number = (seed + level) % self.most
        return Hint(hint=f"Guess a number below {self.most}.")

    def step(self, action: Guess, timeout_s=None, **more) -> Hint:
        if not action.guess.isdigit():
            raise ValueError(f"{action.guess!r} is no number")
        difference = int(action.guess) - self.number
        hint = Hint(hint="Right." if not difference else "Less." if difference > 0 else "More.", done=not difference)
        hint.reward = self._apply_rubric(action, hint) - 0.25
        return hint

    @property
    def state(self) -> State:
        return State(episode_id=str(os.getpid()))


FAILURES: dict[int, str] = {}
"""How `Letters` fails in this process, by its seed: ``raise`` or ``hang``."""


class Letters(Environment[Guess, Hint, State]):
    """Any text is a guess: two are answered with their number of letters e."""

    def reset(self, seed=None, episode_id=None, **more) -> Hint:
        self.seed, self.guesses = seed, 0
        return Hint(hint=f"How many letters has {seed}?")

    def step(self, action: Guess, timeout_s=None, **more) -> Hint:
        match FAILURES.get(self.seed):
            case "raise":
                raise OSError("no such world")
            case "hang":
                time.sleep(60)
        self.guesses += 1
        number = action.guess.count("e")
        reward = float(number % 2 == 0) - 0.01 * len(action.guess)
        return Hint(hint=f"{number} e?", reward=reward, done=self.guesses == 2)

    @property
    def state(self) -> State:
        return State()


def app():
    return create_fastapi_app(Numbers, Guess, Hint, max_concurrent_envs=8)
