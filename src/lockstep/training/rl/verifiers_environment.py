"""Tasks of verifiers (https://github.com/PrimeIntellect-ai/verifiers) as environments."""

import dataclasses
import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from lockstep.errors import ConfigError
from lockstep.text import Prompt
from lockstep.training.rl.environment import Environment, Message, Reply, Tool

if TYPE_CHECKING:
    from types import ModuleType


@Environment.register_subclass("verifiers")
@dataclasses.dataclass(kw_only=True)
class VerifiersEnvironment(Environment):
    """A taskset of verifiers 0.4 (extra ``verifiers``): its tasks are the questions, its rewards the reward.

    The program that plays a task is a chat loop in this process: each of its calls of the model is a turn, so that no
    port is opened, and the tokens that are learned from are those that were sampled. Its tools are called in this
    process too. Metrics and rewards of the task are logged as ``rollout/environment/NAME``.
    """

    taskset: str
    """The taskset: an installed package, or a module beside the configuration."""
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of its configuration, such as ``{split: train}``."""

    def tools(self) -> Sequence[Tool]:
        """Return the schemas of the tools of its tasks."""
        return _episodes().describe_tools(self._settings)

    def questions(self) -> Iterable[Prompt]:
        """Return the first messages of each task, whose number is the field ``idx``."""
        episodes = _episodes()
        for number, task in enumerate(episodes.load_tasks(self._settings)[1]):
            yield Prompt(id=number, messages=episodes.first_messages(task), answer="", fields={"idx": number})

    async def reset(self, question: Prompt) -> Sequence[Message]:
        """See `Environment.reset`."""
        self._episode = _episodes().Episode(self._settings, question.fields["idx"])
        return (await self._episode.next_messages()).messages

    async def step(self, message: Message) -> Reply:
        """See `Environment.step`."""
        self._episode.answer(str(message["content"]))
        return await self._episode.next_messages()

    async def end(self) -> Reply:
        """See `Environment.end`: the task is scored as it is."""
        self._episode.end()
        return await self._episode.next_messages()

    async def close(self) -> None:
        """See `Environment.close`."""
        if hasattr(self, "_episode"):
            self._episode.cancel()

    @property
    def _settings(self) -> str:
        """The configuration of verifiers, as JSON."""
        taskset = {"id": self.taskset, **self.settings}
        agent = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}, "max_turns": self.max_turns}
        return json.dumps({"taskset": taskset, "agent": agent}, sort_keys=True)


def _episodes() -> "ModuleType":
    try:
        import lockstep.training.rl.verifiers_episode as episodes
    except ImportError as error:
        raise ConfigError(
            f"environment.type is verifiers, which needs a package that is not installed ({error}). Install "
            "'jax-lockstep[verifiers]' on every host."
        ) from error
    return episodes
