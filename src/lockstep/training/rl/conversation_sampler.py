"""The sampling of rollouts in which the model talks to an environment."""

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxtyping import PyTree

from lockstep.engine import Engine, RolloutEngine
from lockstep.errors import ConfigError, HostTimeoutError
from lockstep.hosts import environment as facts_of_job
from lockstep.plugins import go_back, working_directory
from lockstep.printable import get_logger
from lockstep.training.rl.conversations import Conversation, Conversations, longest_turns
from lockstep.training.rl.groups import RolloutSampler
from lockstep.training.rl.sampled import Sampled
from lockstep.types import Request

log = get_logger(__name__)


class ConversationSampler(RolloutSampler):
    """Samples conversations with ``fields.environment``, which rewards them; the arguments are those of its base.

    Raises:
        ConfigError: The engine is not lockstep's: others read no requests that come later.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        engine: RolloutEngine | None = self.session.engine
        if engine is not None and not isinstance(engine, Engine):
            raise ConfigError(
                f"an environment and an engine of the class {type(engine).__name__} are given: only lockstep's "
                "takes requests that come while it runs. Leave engine out."
            )
        self._warned = self._worked = False

    def check(self, model: PyTree) -> None:
        """Find out what would make a rollout fail; launches nothing."""
        self.session.check(self._hosts, model, self._longest())

    def sample(self, number: int, attempt: int, model: PyTree) -> Sampled | None:
        """Have a model talk about the questions of a rollout; every host calls it. None where the job is asked to end.

        Raises:
            PeerError, DisagreementError, LaunchMismatchError, HostTimeoutError: See `Session.generate`.
            PeerError: The environment has failed in all conversations until now; raised on every host.
        """
        assert self._fields.environment is not None
        (drawn, seed), directory = self._draw(number, attempt), working_directory()
        conversations = Conversations(
            self._fields.environment,
            self._rows,
            self._hosts,
            drawn=drawn,
            group=self._fields.rollout.n_generations,
            params=dataclasses.replace(self._params, seed=seed),
        )
        with contextlib.closing(conversations), self._hosts.scope("rollout") as scope:
            generated = self.session.generate(
                scope,
                model,
                largest=self._longest(),
                facts={**facts_of_job(), "debug": str(scope.debug), "questions": str(drawn), "seed": str(seed)},
                observer=conversations,
            )
        go_back(directory, "an environment")
        if generated.ended:
            return None
        self._look(conversations.conversations)
        counts = generated.counts
        assert counts is not None
        return Sampled(
            number=number,
            questions=drawn,
            completions=conversations.completions(),
            scoring=None,
            before=generated.memory.get("before"),
            after=generated.memory.get("after"),
            conversations=conversations.conversations,
            rewards=conversations.rewards(),
            metrics={
                "rollout/prefilled_tokens": float(counts.prefilled),
                "rollout/prefilled_again_tokens": float(counts.prefilled_again),
                "time/wait_for_environments_s": generated.seconds.get("arrivals", 0.0),
            },
        )

    def _longest(self) -> list[Request]:
        """Requests that need as much as any turns of a rollout."""
        count = self.n_questions * self._fields.rollout.n_generations
        return longest_turns(self._params, self._questions.row_length, count)

    def _look(self, conversations: Sequence[Conversation]) -> None:
        """Say once what went wrong with an environment, and end a run in which it has never worked."""
        failed = [conversation for conversation in conversations if conversation.error is not None]
        if not failed:
            self._worked = True
            return
        example = min(failed, key=lambda conversation: conversation.passing)
        self._worked |= len(failed) < len(conversations)
        if not self._worked:
            assert self._fields.environment is not None
            text = (
                f"the environment failed in all {len(failed)} conversations of a rollout, and has not worked yet; that "
                f"of question {example.question}: {(example.error or '').rstrip('.')}"
            )
            with self._hosts.scope("environments") as scope, scope.run_on_all("environments"):
                if example.passing:
                    limit = f"environment.timeout_s from {self._fields.environment.timeout_s:g}"
                    raise HostTimeoutError(f"{text}. Check its server, or raise {limit}.")
                raise ConfigError(f"{text}. Correct the environment.")
        if self._hosts.is_leader and not self._warned:
            self._warned = True
            log.warning(
                "the environment of question %d failed, and nothing is learned from the answers to it: %s. Later "
                "failures are counted in reward/environment/failed and late",
                example.question, example.error,
            )  # fmt: skip
