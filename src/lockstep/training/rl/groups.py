"""The sampling of rollouts: answers before and after their rewards, and which questions of them are learned from."""

import collections
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int, PyTree
from numpy.random import SeedSequence

from lockstep.engine import EarlierAnswers, Engine, Observer, RolloutEngine, Session
from lockstep.hosts import Hosts, environment
from lockstep.text import StopFinder, stop_ids, token_count
from lockstep.training.loop.config import TrainerConfig
from lockstep.training.objectives.policy_loss import GrpoFields, differ, policy_loss
from lockstep.training.rl.config import GrpoRunFields
from lockstep.training.rl.conversations import Conversation
from lockstep.training.rl.questions import AnswerRows
from lockstep.training.rl.rewarding import Rewarder, Rewards, Scoring
from lockstep.training.rl.sampled import Sampled, completions_of
from lockstep.training.rl.segments import Sample, Segment, single_turn
from lockstep.training.rl.solve_rates import SolveRates
from lockstep.training.step.programs import Programs
from lockstep.types import Completion, Request


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Groups:
    """Groups of answers, all of the same size, one after the other."""

    questions: Int[np.ndarray, " group"]  # number of the question of each group
    completions: Sequence[Completion]  # the answers, group by group
    rewards: Rewards  # the rewards of the answers, in the same order
    conversations: Sequence[Conversation] | None = None  # the conversation of each answer; None with single turns

    @property
    def size(self) -> int:
        """The number of answers of a group."""
        return len(self.completions) // len(self.questions)

    @property
    def totals(self) -> Float[np.ndarray, "group answer"]:
        """The rewards by group."""
        return self.rewards.total.reshape(len(self.questions), -1)

    @property
    def dropped(self) -> Bool[np.ndarray, " group"]:
        """Whether nothing is learned from a group, because a reward failed or was late."""
        if self.rewards.dropped is None:
            return np.zeros(len(self.questions), bool)
        dropped: Bool[np.ndarray, " group"] = self.rewards.dropped.reshape(len(self.questions), -1).any(axis=1)
        return dropped

    @property
    def signal(self) -> Bool[np.ndarray, " group"]:
        """Whether something can be learned from a group: its answers have different rewards, and it is not dropped."""
        return differ(self.totals) & ~self.dropped

    @property
    def judged(self) -> Float[np.ndarray, "group answer"]:
        """The rewards that say how right the answers are, by group."""
        judged = self.rewards.total if self.rewards.judged is None else self.rewards.judged
        return judged.reshape(len(self.questions), -1)

    @property
    def mixed(self) -> Bool[np.ndarray, " group"]:
        """Whether the answers of a group are not equally right, which dynamic sampling looks for; none is dropped."""
        return differ(self.judged) & ~self.dropped

    def samples(self, prompts: Sequence[tuple[int, ...]]) -> list[Sample]:
        """Return the answers as samples of training.

        Args:
            prompts: The token ids of each question, by its number.
        """
        questions = np.repeat(self.questions, self.size).tolist()
        if self.conversations is not None:
            pairs = zip(questions, self.conversations, strict=True)  # one whose environment did not begin is empty
            return [talk.segments or (Segment(tokens=prompts[question]),) for question, talk in pairs]
        return [
            single_turn(prompts[question], completion)
            for question, completion in zip(questions, self.completions, strict=True)
        ]

    def advantages(
        self, config: GrpoFields, *, less: Float[np.ndarray, "group answer"] | float = 0.0
    ) -> Float[np.ndarray, " answer"]:
        """Return the advantage of each answer, from its reward less a number; 0 in groups that are dropped."""
        advantages = np.zeros(self.totals.shape, np.float32)
        if not self.dropped.all():
            rewards = (self.totals - less)[~self.dropped]
            advantages[~self.dropped] = policy_loss(config.loss).advantages(rewards, config)
        return advantages.reshape(-1)

    def take(self, chosen: Sequence[int]) -> "Groups":
        """Return some of the groups."""
        places = (np.asarray(chosen)[:, None] * self.size + np.arange(self.size)).reshape(-1)
        rewards = dataclasses.replace(
            self.rewards,
            total=self.rewards.total[places],
            components={name: values[places] for name, values in self.rewards.components.items()},
            judged=None if self.rewards.judged is None else self.rewards.judged[places],
            dropped=None if self.rewards.dropped is None else self.rewards.dropped[places],
        )
        return Groups(
            questions=self.questions[np.asarray(chosen)],
            completions=[self.completions[int(place)] for place in places],
            rewards=rewards,
            conversations=self.conversations and [self.conversations[int(place)] for place in places],
        )

    @classmethod
    def concatenate(cls, parts: Sequence["Groups"]) -> "Groups":
        """Return all groups of several samplings in one."""
        failed, late = collections.Counter[str](), collections.Counter[str]()
        for part in parts:
            failed.update(part.rewards.failed)
            late.update(part.rewards.late)
        rewards = Rewards(
            total=np.concatenate([part.rewards.total for part in parts]),
            components={
                name: np.concatenate([part.rewards.components[name] for part in parts])
                for name in parts[0].rewards.components
            },
            failed=dict(failed),
            late=dict(late),
            judged=_joined([part.rewards.judged for part in parts]),
            dropped=_joined([part.rewards.dropped for part in parts]),
        )
        conversations = [conversation for part in parts for conversation in part.conversations or ()]
        return cls(
            questions=np.concatenate([part.questions for part in parts]),
            completions=[completion for part in parts for completion in part.completions],
            rewards=rewards,
            conversations=conversations or None,
        )


def choose_groups(parts: Sequence[Groups], count: int) -> Groups:
    """Return the first groups whose answers are not equally right; where they are too few, the first others fill up,
    dropped ones last.
    """
    everything = Groups.concatenate(parts)
    if len(parts) == 1:
        return everything
    order = np.argsort(~everything.mixed + 1 * everything.dropped, kind="stable")[:count]
    return everything.take(sorted(int(place) for place in order))


def _joined(parts: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """One array of all; None where a part has none."""
    known = [part for part in parts if part is not None]
    return np.concatenate(known) if len(known) == len(parts) else None


class RolloutSampler:
    """Samples the answers of a rollout, and has each host's share of them scored as soon as it is there.

    Args:
        engine: What samples the answers; None for lockstep's engine with the settings of ``fields.rollout``.
    """

    def __init__(
        self,
        fields: GrpoRunFields,
        trainer: TrainerConfig,
        programs: Programs,
        rewarder: Rewarder,
        rows: AnswerRows,
        engine: RolloutEngine | None = None,
        *,
        routed_experts: bool = False,
    ) -> None:
        questions, tokenizer = rows.questions, rows.tokenizer
        self._fields, self._questions, self._trainer = fields, questions, trainer
        self._hosts, self._rewarder, self._rows = programs.hosts, rewarder, rows
        params = fields.rollout.sampling_params(stop_ids(tokenizer))
        self._params = dataclasses.replace(params, routed_experts=routed_experts)
        config = fields.rollout.engine_config(trainer.precision.compute.name, questions.row_length)
        self.session = Session(
            functools.partial(Engine, config, vocab_size=token_count(tokenizer)) if engine is None else engine,
            find_stop=StopFinder(tokenizer) if fields.rollout.stop else None,
            watchdog=programs.watchdog,
        )
        """The door to the engine."""
        self.earlier = EarlierAnswers(fields.rollout.drafts)
        """The drafts of the next rollouts, which decide the last bits of log-probabilities."""
        self._before = self.earlier
        self._rates = SolveRates(len(questions), questions.seed) if fields.sampling == "by_solve_rate" else None
        self.n_questions = trainer.train_batch_size * fields.minibatches // fields.rollout.n_generations
        """The number of questions of a sampling."""

    def add(self, groups: Groups) -> None:
        """Count how right the answers of a whole rollout are, for the choice of later questions."""
        for question, rewards, dropped in zip(groups.questions, groups.judged, groups.dropped, strict=True):
            if self._rates is not None and not dropped:
                self._rates.add(int(question), rewards)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: what decides about later rollouts."""
        rates = {} if self._rates is None else {"solve_rates": self._rates.state()}
        return {"drafts": self.earlier.state(), **rates}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned."""
        self.earlier.load_state(state["drafts"])
        if self._rates is not None and "solve_rates" in state:
            self._rates.load_state(state["solve_rates"])

    def check(self, model: PyTree) -> None:
        """Find out what would make a rollout fail; launches nothing."""
        self.session.check(self._hosts, model, self._requests(self._largest(), seed=0))

    def sample(self, number: int, attempt: int, model: PyTree) -> Sampled | None:
        """Have a model answer the questions of a rollout; every host calls it. None where the job is asked to end.

        Raises:
            PeerError, DisagreementError, LaunchMismatchError, HostTimeoutError: See `Session.generate`.
        """
        if attempt == 0:
            self._before = self.earlier.copy()
        drawn, seed = self._draw(number, attempt)
        requests, largest = self._requests(drawn, seed), self._requests(self._largest(), seed)
        scoring, generated = self._rewarder.begin(), None
        try:
            with self._hosts.scope("rollout") as scope:
                generated = self.session.generate(
                    scope,
                    model,
                    requests,
                    largest=largest,
                    facts={**environment(), "debug": str(scope.debug)},
                    observer=self._scored(scoring, number, drawn),
                )
        finally:
            if generated is None or generated.ended:
                scoring.close()
        if generated.ended:
            self.earlier = self._before  # a run that goes on samples all attempts again
            return None
        for place, question in enumerate(drawn):
            self.earlier.keep(
                question, [completion.tokens for completion in generated.completions if completion.prompt_id == place]
            )
        return Sampled(
            number=number,
            questions=drawn,
            completions=generated.completions,
            scoring=scoring,
            before=generated.memory.get("before"),
            after=generated.memory.get("after"),
            drafts=generated.drafts,
        )

    def _draw(self, number: int, attempt: int) -> tuple[list[int], int]:
        """The questions of a sampling, and the seed of its draws."""
        source = self._questions if self._rates is None else self._rates
        drawn = source.drawn(number, self.n_questions, attempt).tolist()
        # No rollout of another step or of another seed of the run has the same.
        seeds = (self._trainer.seed, self._fields.rollout.seed, number, attempt)
        return drawn, int(SeedSequence(seeds).generate_state(1)[0])

    def resumed(self, values: Mapping[str, Any]) -> Sampled:
        """Return what an earlier process sampled; its rewards are computed anew."""
        sampled = Sampled(
            number=values["number"],
            questions=values["questions"],
            completions=completions_of(values),
            scoring=self._rewarder.begin(),
        )
        assert sampled.scoring is not None
        self._scored(sampled.scoring, sampled.number, sampled.questions).answered(sampled.completions)
        return sampled

    def learned_at(self, number: int) -> int:
        """Return the number of completed steps when a rollout has been learned from once."""
        return number * self._fields.updates + 1

    def _largest(self) -> list[int]:
        return self._questions.longest(self.n_questions)

    def _requests(self, questions: Sequence[int], seed: int) -> list[Request]:
        params = dataclasses.replace(self._params, seed=seed)
        # The place in the rollout is the prompt's number: a question can come twice where an epoch ends.
        return [
            Request(
                prompt_id=place,
                prompt_tokens=self._questions.tokens[question],
                params=params,
                drafts=self.earlier.drafts(question),
            )
            for place, question in enumerate(questions)
        ]

    def _scored(self, scoring: Scoring, number: int, drawn: Sequence[int]) -> "_Scored":
        return _Scored(scoring, self._rows, self._hosts, self.learned_at(number), drawn, self._params.n_generations)


@dataclasses.dataclass(frozen=True)
class _Scored(Observer):
    """Has this host's share of answers scored as soon as they are there."""

    scoring: Scoring
    rows: AnswerRows
    hosts: Hosts
    step: int
    drawn: Sequence[int]  # number of the question of each prompt
    group: int  # number of answers to a question

    def answered(self, completions: Sequence[Completion]) -> None:
        for completion in completions:
            number = completion.prompt_id * self.group + completion.generation_id
            if number % self.hosts.count == self.hosts.index:
                row, prompt = self.rows.row(self.step, self.drawn[completion.prompt_id], completion)
                self.scoring.submit(number, row, prompt)
