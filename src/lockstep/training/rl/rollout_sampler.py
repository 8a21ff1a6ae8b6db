"""The sampling of rollouts: which questions, with which draws, and the answers on their way to their rewards."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jax.sharding import Mesh
from jaxtyping import PyTree
from numpy.random import SeedSequence

from lockstep.engine import EarlierAnswers, Engine, RolloutEngine, generate_on_all
from lockstep.hosts import Hosts, Watchdog, environment
from lockstep.models import read_decoder
from lockstep.text import StopFinder, stop_ids, token_count
from lockstep.training.loop.config import TrainerConfig
from lockstep.training.rl.config import GrpoRunFields
from lockstep.training.rl.groups import Sampled, completions_from_json
from lockstep.training.rl.questions import AnswerRows, Questions
from lockstep.training.rl.rewarding import Rewarder, Scoring
from lockstep.types import Completion, Request

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class RolloutSampler:
    """Samples the answers of a rollout, and has each host's share of them scored as soon as it is there.

    Args:
        fields: How to sample.
        engine: What samples the answers; None for lockstep's engine with the settings of ``fields.rollout``.
    """

    def __init__(
        self,
        fields: GrpoRunFields,
        questions: Questions,
        tokenizer: "PreTrainedTokenizerBase",
        trainer: TrainerConfig,
        mesh: Mesh,
        row_length: int,
        hosts: Hosts,
        watchdog: Watchdog,
        rewarder: Rewarder,
        rows: AnswerRows,
        engine: RolloutEngine | None = None,
        *,
        routed_experts: bool = False,
    ) -> None:
        self._fields, self._questions, self._trainer = fields, questions, trainer
        self._hosts, self._watchdog, self._rewarder, self._rows = hosts, watchdog, rewarder, rows
        params = fields.rollout.sampling_params(stop_ids(tokenizer))
        self._params = dataclasses.replace(params, routed_experts=routed_experts)
        self._find_stop = StopFinder(tokenizer) if fields.rollout.stop else None
        self._engine_config = fields.rollout.engine_config(trainer.precision.compute.name, row_length)
        self._vocab_size = token_count(tokenizer)
        self.earlier = EarlierAnswers(fields.rollout.drafts)
        """The drafts of the next rollouts, which decide the last bits of log-probabilities."""
        self._before = self.earlier
        self._mesh = mesh
        self.engine = engine
        """The engine; None before the first use where none was given."""
        self.n_questions = trainer.train_batch_size * fields.minibatches // fields.rollout.n_generations
        """The number of questions of a sampling."""

    def check(self, model: PyTree) -> None:
        """Find out what would make a rollout fail; launches nothing.

        Raises:
            ConfigError, PromptError, CapacityError: See `lockstep.engine.Engine.check`.
        """
        engine, read = self._engine_for(model)
        engine.check(read, self._requests(self._largest(), seed=0))

    def sample(self, number: int, attempt: int, model: PyTree) -> Sampled | None:
        """Have a model answer the questions of a rollout; every host calls it.

        Args:
            attempt: The number of samplings of this rollout before.

        Returns:
            None where the job is asked to end.

        Raises:
            PeerError, DisagreementError, LaunchMismatchError, HostTimeoutError: See `generate_on_all`.
        """
        if attempt == 0:
            self._before = self.earlier.copy()
        drawn = self._questions.drawn(number, self.n_questions, attempt).tolist()
        seed = self._seed(number, attempt)
        requests, largest = self._requests(drawn, seed), self._requests(self._largest(), seed)
        scoring, generated = self._rewarder.begin(), None
        try:
            with self._hosts.scope("rollout") as scope:
                generated = generate_on_all(
                    scope,
                    lambda: (*self._engine_for(model), None),
                    requests,
                    largest=largest,
                    facts={**environment(), "debug": str(scope.debug)},
                    find_stop=self._find_stop,
                    watchdog=self._watchdog,
                    on_answered=functools.partial(self._submit, scoring, self.learned_at(number), drawn),
                )
        finally:
            if generated is None or generated.ended:
                scoring.close()
        if generated.ended:
            self.earlier = self._before  # a run that goes on samples all attempts again
            return None
        for place, question in enumerate(drawn):
            self.earlier.keep(question, [each for each in generated.completions if each.prompt_id == place])
        return Sampled(
            number=number,
            questions=drawn,
            completions=generated.completions,
            scoring=scoring,
            before=generated.memory.get("before"),
            after=generated.memory.get("after"),
            drafts=generated.drafts,
        )

    def resumed(self, values: Mapping[str, Any]) -> Sampled:
        """Return what an earlier process sampled; its rewards are computed anew.

        Args:
            values: What `Sampled.to_json` returned.
        """
        sampled = Sampled(
            number=values["number"],
            questions=values["questions"],
            completions=completions_from_json(values),
            scoring=self._rewarder.begin(),
        )
        self._submit(sampled.scoring, self.learned_at(sampled.number), sampled.questions, sampled.completions)
        return sampled

    def learned_at(self, number: int) -> int:
        """Return the number of completed steps when a rollout has been learned from once."""
        return number * self._fields.updates + 1

    def _engine_for(self, model: PyTree) -> tuple[RolloutEngine, Any]:
        """The engine, made once, and the model as it was read."""
        read = read_decoder(model)
        if self.engine is None:
            config, ledger = self._engine_config, self._hosts.ledger
            self.engine = Engine(config, self._mesh, vocab_size=self._vocab_size, ledger=ledger)
        return self.engine, read

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

    def _seed(self, number: int, attempt: int) -> int:
        """The seed of the draws of a rollout, which none of another step or of another seed of the run has."""
        seeds = (self._trainer.seed, self._fields.rollout.seed, number, attempt)
        return int(SeedSequence(seeds).generate_state(1)[0])

    def _submit(self, scoring: Scoring, step: int, drawn: Sequence[int], completions: Sequence[Completion]) -> None:
        """Have this host's share of answers scored."""
        for completion in completions:
            number = completion.prompt_id * self._fields.rollout.n_generations + completion.generation_id
            if number % self._hosts.count == self._hosts.index:
                row, prompt = self._rows.row(step, drawn[completion.prompt_id], completion)
                scoring.submit(number, row, prompt)
