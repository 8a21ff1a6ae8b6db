"""The batches of GRPO: sampled, rewarded and compared with the model of the step that learns from them."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import PyTree

from lockstep.engine import Engine
from lockstep.errors import ConfigError
from lockstep.hosts import Hosts, Watchdog
from lockstep.models import read_decoder
from lockstep.placement import host_rows, place_local
from lockstep.report import NoopTracker, Tracker
from lockstep.text import StopFinder, stop_ids
from lockstep.training.config import TrainerConfig
from lockstep.training.grpo.answer_rows import AnswerRows
from lockstep.training.grpo.batch import make_columns
from lockstep.training.grpo.config import GrpoRunFields
from lockstep.training.grpo.figures import RewardTrend, StepClock, StepTimes
from lockstep.training.grpo.generate import Generated, generate
from lockstep.training.grpo.groups import Groups, choose_groups
from lockstep.training.grpo.logprob_columns import LogprobColumns
from lockstep.training.grpo.questions import Questions
from lockstep.training.grpo.rewarding import Rewarder
from lockstep.training.grpo.rollout import Rollout
from lockstep.training.grpo.rollout_report import RolloutReport
from lockstep.training.hooks import StepInfo
from lockstep.training.objectives.grpo import GrpoConfig, group_advantages
from lockstep.training.step import BATCH_SPEC, batch_structs
from lockstep.types import Completion, Request

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Rollouts:
    """Batches (`BatchSource`) and a hook: answers are sampled before a step, with the model of that step.

    Which questions a rollout has, and every random draw, is a function of the seeds and the step. A rollout is sampled
    before each step whose number is a multiple of ``fields.updates``.

    Args:
        fields: How to sample, reward and learn.
        objective: The loss.
        questions: All questions.
        tokenizer: The tokenizer of the model.
        trainer: The settings of the run.
        mesh: The mesh of the run.
        row_length: The number of tokens of a row.
        hosts: The processes of the job.
        reference: The frozen model in the compute type; None without ``kl_coefficient``.
        tracker: The tracker that metrics and rows go to, used by the leader; None for none.
        run_dir: The directory that rows are appended to; None for no file.

    Raises:
        ConfigError: The settings do not go together, a reward cannot be made, or the loss needs a reference and there
            is none.
    """

    name = "rollouts"

    def __init__(
        self,
        fields: GrpoRunFields,
        objective: GrpoConfig,
        questions: Questions,
        tokenizer: "PreTrainedTokenizerBase",
        trainer: TrainerConfig,
        mesh: Mesh,
        row_length: int,
        hosts: Hosts,
        *,
        reference: PyTree | None = None,
        tracker: Tracker | None = None,
        run_dir: Path | None = None,
    ) -> None:
        if bool(objective.kl_coefficient) != (reference is not None):
            given = "a" if reference is not None else "no"
            raise ConfigError(
                f"kl_coefficient is {objective.kl_coefficient} and {given} reference model is given. Give one where "
                "kl_coefficient is more than 0, and None otherwise."
            )
        fields.check_run(trainer.train_batch_size, hosts.timeout_s)
        self._fields, self._objective, self._questions = fields, objective, questions
        self._tokenizer, self._trainer, self._row_length, self._hosts = tokenizer, trainer, row_length, hosts
        self._mesh, self._sharding = mesh, NamedSharding(mesh, BATCH_SPEC)
        self._tracker: Tracker = NoopTracker() if tracker is None else tracker
        self._columns = objective.columns(row_length, on_policy=fields.updates == 1)
        self._rewarder = make_rewarder(fields)
        self._find_stop = StopFinder(tokenizer) if fields.rollout.stop else None
        self._params = fields.rollout.sampling_params(stop_ids(tokenizer))
        self._rows = AnswerRows(questions=questions, tokenizer=tokenizer, stop=fields.rollout.stop)
        self._report = RolloutReport(self._tracker, run_dir, self._rows, fields.answers_shown)
        self._watchdog = Watchdog(hosts, hosts.timeout_s)
        self._logprobs = LogprobColumns(self._columns, trainer, mesh, hosts, self._watchdog, reference)
        self._engine: Engine | None = None
        self._rollout: Rollout | None = None
        self._step = -1
        self._times = StepTimes()
        self._clock = StepClock()
        self._logged_step = 0
        self._trend = RewardTrend()

    @property
    def engine(self) -> Engine | None:
        """The engine, or None before the first rollout."""
        return self._engine

    @property
    def logprob_traces(self) -> dict[str, int]:
        """How often each program that computes log-probabilities was traced, by name."""
        return self._logprobs.traces

    @property
    def rollout(self) -> Rollout | None:
        """The rollout that is learned from; None before the first."""
        return self._rollout

    @property
    def progress(self) -> str:
        """The mean reward and where the time of the last step went, for the progress display."""
        return f"{self._trend}  {self._clock}"

    def check(self, model: PyTree) -> None:
        """Find out before the first step what would make a rollout fail; launches nothing.

        Args:
            model: The model.

        Raises:
            PeerError: A host cannot work with this configuration; raised on every host.
        """
        with self._hosts.scope("rollouts/check") as scope, scope.run_on_all("check"):
            engine, read = self._engine_for(model)
            engine.check(read, self._requests(self._largest(), seed=0))

    def structs(self) -> Mapping[str, jax.ShapeDtypeStruct]:
        """Return global shape, type and sharding of each column, see `BatchSource.structs`."""
        return batch_structs(self._columns, self._trainer.train_batch_size, self._mesh)

    def batch(self, step: int, model: PyTree) -> Mapping[str, jax.Array] | None:
        """Return the batch of a step, sampled first where a rollout is due, see `BatchSource.batch`.

        Raises:
            PeerError: A phase failed on at least one host; raised on every host.
            DisagreementError: The hosts differ; raised on every host.
            LaunchMismatchError: The hosts launched different programs; raised on every host.
        """
        self._step = step
        self._clock = StepClock()
        number, update = divmod(step, self._fields.updates)
        if update == 0:
            self._rollout = None  # nothing of the last one is kept while the next is sampled
            self._rollout = self._roll_out(number, step, model)
            if self._rollout is None:
                return None
        assert self._rollout is not None and self._rollout.number == number, "a rollout goes with its updates"
        n_rows = self._trainer.train_batch_size
        chosen, rows = self._rollout.minibatch(update, n_rows), host_rows(self._sharding, n_rows)
        placed = {
            name: place_local(column[chosen][rows], self._sharding, n_rows)
            for name, column in self._rollout.columns.items()
        }
        self._clock.lap("place")
        return placed

    def prepare(self, step: int) -> None:
        """Do nothing: a rollout needs the model of its step."""

    def close(self) -> None:
        """End what is under way; rows of finished rollouts are written."""
        self._rewarder.close()
        self.flush()

    def on_step(self, info: StepInfo, force: bool = False) -> None:
        """Log where the time of a step went. Added as the last hook, it sees how long the others took."""
        if info.step < 0 or info.step != self._step or info.next_step == self._logged_step or self._rollout is None:
            return  # before the first step, a second call, or a call that an earlier process left undone
        self._logged_step = info.next_step
        chosen = self._rollout.minibatch(info.step % self._fields.updates, self._trainer.train_batch_size)
        self._clock.add("update", info.step_duration)
        step_s = sum(self._clock.seconds.values())
        mean_s, tokens_per_s = self._times.add(step_s, int(self._rollout.lengths[chosen].sum()))
        self._log(
            info.next_step,
            {
                **{f"time/{phase}_s": seconds for phase, seconds in self._clock.seconds.items()},
                "time/inference_eval_s": max(0.0, self._clock.total - step_s),
                "time/train/step_avg_last10_s": mean_s,
                "throughput/train/valid_tokens_per_s": tokens_per_s,
            },
        )

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: the rollout, where updates of it are still to come."""
        between = (self._step + 1) % self._fields.updates == 0 or self._rollout is None
        rollout = None if between or self._rollout is None else self._rollout.to_json()
        return {"updates": self._fields.updates, "rollout": rollout}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned in an earlier process.

        Args:
            state: That state.

        Raises:
            ConfigError: The run had another number of updates per rollout.
        """
        if state["updates"] != self._fields.updates:
            raise ConfigError(
                f"the checkpoint is of a run with {state['updates']} updates per rollout (num_iterations times "
                f"minibatches), and now there are {self._fields.updates}. Use the same, or another trainer.run_id."
            )
        self._rollout = None if state["rollout"] is None else Rollout.from_json(state["rollout"])

    def flush(self) -> None:
        """Wait until the rows of all rollouts are written, see `RolloutReport.flush`."""
        self._report.flush()

    def after_signal(self) -> None:
        """Wait for rows that are not written yet: a signal ended the run."""
        self.flush()

    def _roll_out(self, number: int, step: int, model: PyTree) -> Rollout | None:
        groups: list[Groups] = []
        wanted = self._trainer.train_batch_size * self._fields.minibatches // self._fields.rollout.n_generations
        clock, memory = self._clock, list[Generated]()
        for attempt in range(self._fields.rollout.max_attempts):
            drawn = self._questions.drawn(number, wanted, attempt).tolist()
            seed = self._seed(number, attempt)
            requests = self._requests(drawn, seed)
            self._rewarder.begin()
            try:
                with self._hosts.scope("rollout") as scope:
                    engine, read = self._engine_for(model)
                    generated = generate(
                        scope,
                        engine,
                        read,
                        requests,
                        self._requests(self._largest(), seed),
                        watchdog=self._watchdog,
                        find_stop=self._find_stop,
                        each=functools.partial(self._submit, step, drawn),
                    )
                    clock.lap("rollout_generate")
                    if generated is None:
                        return None
                    rewards = self._rewarder.finish(scope, len(generated.completions))
                    clock.lap("reward")
            finally:
                self._rewarder.close()
            memory.append(generated)
            groups.append(Groups(questions=np.array(drawn), completions=generated.completions, rewards=rewards))
            if sum(int(each.signal.sum()) for each in groups) >= wanted:
                break
        chosen = choose_groups(groups, wanted)
        rollout = self._with_advantages(number, chosen)
        everything = Groups.concatenate(groups)
        self._trend.add(float(everything.totals.mean()))
        if self._hosts.is_leader:
            self._report.report(step + 1, everything, chosen, memory)
        self._logprobs.fill(rollout, model)
        clock.lap("logprobs")
        self._hosts.phase("training")
        return rollout

    def _with_advantages(self, number: int, groups: Groups) -> Rollout:
        advantages = group_advantages(groups.totals, scale=self._objective.scales_advantages)
        prompts = [self._questions.tokens[question] for question in groups.questions for _ in range(groups.size)]
        columns = make_columns(self._columns, prompts, groups.completions, advantages.reshape(-1))
        lengths = [len(p) + len(c.tokens) for p, c in zip(prompts, groups.completions, strict=True)]
        return Rollout(number=number, columns=columns, lengths=np.array(lengths))

    def _engine_for(self, model: PyTree) -> tuple[Engine, Any]:
        """The engine, made once, and the model as it was read."""
        read = read_decoder(model)
        if self._engine is None:
            config = self._fields.rollout.engine_config(self._trainer.precision.compute.name, self._row_length)
            vocab_size = max(self._tokenizer.get_vocab().values()) + 1
            self._engine = Engine(config, self._mesh, vocab_size=vocab_size, ledger=self._hosts.ledger)
        return self._engine, read

    def _largest(self) -> list[int]:
        answers = self._trainer.train_batch_size * self._fields.minibatches
        return self._questions.longest(answers // self._fields.rollout.n_generations)

    def _requests(self, questions: Sequence[int], seed: int) -> list[Request]:
        params = dataclasses.replace(self._params, seed=seed)
        # The place in the rollout is the prompt's number: a question can come twice where an epoch ends.
        return [
            Request(prompt_id=place, prompt_tokens=self._questions.tokens[question], params=params)
            for place, question in enumerate(questions)
        ]

    def _seed(self, number: int, attempt: int) -> int:
        """The seed of the draws of a rollout, which none of another step or of another seed of the run has."""
        seeds = (self._trainer.seed, self._fields.rollout.seed, number, attempt)
        return int(np.random.SeedSequence(seeds).generate_state(1)[0])

    def _submit(self, step: int, drawn: Sequence[int], completion: Completion) -> None:
        number = completion.prompt_id * self._fields.rollout.n_generations + completion.generation_id
        if number % self._hosts.count == self._hosts.index:
            row, prompt = self._rows.row(step + 1, drawn[completion.prompt_id], completion)
            self._rewarder.submit(number, row, prompt)

    def _log(self, step: int, values: Mapping[str, float]) -> None:
        if self._hosts.is_leader:
            self._tracker.log(values, step=step)


def make_rewarder(fields: GrpoRunFields) -> Rewarder:
    """Return what computes the rewards of a run.

    Args:
        fields: The settings of the run.

    Raises:
        ConfigError: A reward cannot be made.
    """
    return Rewarder(
        fields.rewards,
        max_new_tokens=fields.rollout.max_new_tokens,
        workers=fields.reward_workers,
        timeout_s=fields.reward_timeout_s,
    )
