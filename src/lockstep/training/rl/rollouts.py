"""The batches of GRPO: sampled before the step that learns from them, rewarded, and compared with its model."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, PyTree

from lockstep.engine import RolloutEngine
from lockstep.errors import ConfigError
from lockstep.hosts import digest
from lockstep.models import LlamaConfig
from lockstep.placement import data_shards
from lockstep.printable import get_logger
from lockstep.text import token_count
from lockstep.training.loop.hooks import StepInfo
from lockstep.training.loop.trainer import Trainer
from lockstep.training.objectives import routing_column
from lockstep.training.objectives.grpo import GrpoConfig
from lockstep.training.objectives.policy_loss import policy_loss
from lockstep.training.rl.config import GrpoRunFields
from lockstep.training.rl.conversation_sampler import ConversationSampler
from lockstep.training.rl.groups import Groups, RolloutSampler, choose_groups
from lockstep.training.rl.packing import Packing, packed_columns
from lockstep.training.rl.questions import AnswerRows, Questions
from lockstep.training.rl.reward_models import load_reward_models
from lockstep.training.rl.rewarding import Rewarder, Rewards
from lockstep.training.rl.rollout import FrozenModels, LogprobColumns, Rollout, answer_mask, make_columns
from lockstep.training.rl.rollout_log import RewardTrend, RolloutLog, StepClock, StepTimes
from lockstep.training.rl.rollout_state import read_state, saved_state
from lockstep.training.rl.sampled import Sampled
from lockstep.training.step.programs import Programs
from lockstep.training.step.train_step import batch_structs
from lockstep.types import FinishReason

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = get_logger(__name__)


MOST_CLIPPED = 0.2
"""The share of tokens whose gradient clipping may take away in the first update of a rollout without a word."""


class Rollouts:
    """Batches (`BatchSource`) and a hook: answers are sampled before a step, with the model of that step.

    Which questions a rollout has, and every random draw, is a function of the seeds and the step. A rollout is sampled
    before each step whose number is a multiple of ``fields.updates``: its own, or with ``fields.rollout_ahead`` the
    next one, whose rewards are then computed during the updates and the sampling after them.

    Args:
        trainer: The trainer of the run, whose tracker metrics and rows go to.
        engine: What samples the answers; None for lockstep's engine with the settings of ``fields.rollout``.
        model: The configuration of the model, where it has experts: the engine's choice of them is compared with.

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
        trainer: Trainer,
        *,
        frozen: FrozenModels = FrozenModels(),  # noqa: B008  (frozen)
        engine: RolloutEngine | None = None,
        model: LlamaConfig | None = None,
    ) -> None:
        kinds = ("kl_coefficient", "reference model"), ("teacher_coefficient", "teacher")
        for (name, kind), compared in zip(kinds, frozen, strict=True):
            if bool(getattr(objective, name)) != (compared is not None):
                raise ConfigError(
                    f"{name} is {getattr(objective, name)} and {'no' if compared is None else 'a'} {kind} is given. "
                    f"Give one where {name} is more than 0, and None otherwise."
                )
        config, hosts, mesh, row_length = trainer.config, trainer.hosts, trainer.mesh, questions.row_length
        taught = frozen.teacher is not None
        fields.check_run(config.train_batch_size, hosts.timeout_s, objective.importance_cap, taught=taught)
        _check_policy(objective, fields.rollout.temperature, token_count(tokenizer))
        self._fields, self._objective, self._questions = fields, objective, questions
        self._trainer, self._hosts, self._mesh, self._tracker = config, hosts, mesh, trainer.tracker
        replays = fields.rollout.replay_routing
        routing = routing_column(model, row_length, replayed=replays)
        if replays and not routing:
            raise ConfigError("rollout.replay_routing is true, and the model has no experts. Set it to false.")
        self._columns = objective.columns(row_length, on_policy=fields.updates == 1) | routing
        self._rewarder = make_rewarder(fields)
        rows = AnswerRows(questions=questions, tokenizer=tokenizer, stop=fields.rollout.stop)
        alarms = fields.rollout.alarms if fields.rollout.health else None
        self._answer_rows = rows
        self._report = RolloutLog(self._tracker, trainer.run_dir, rows, fields.answers_shown, alarms=alarms)
        programs = Programs(hosts, mesh)
        self._reward_models = load_reward_models(fields.rewards, config, programs)
        self._logprobs = LogprobColumns(objective, self._columns, config, programs, frozen)
        sampler = RolloutSampler if fields.environment is None else ConversationSampler
        self._sampler = sampler(fields, config, programs, self._rewarder, rows, engine, routed_experts=bool(routing))
        _check_attempts(fields.rollout.max_attempts, self._sampler.n_questions, len(questions))
        self._rollout: Rollout | None = None
        self._packing: Packing | None = None  # of the last batch
        self._ahead: Sampled | None = None
        self._unreported: _Report | None = None
        self._step, self._logged_step = -1, 0
        self._times, self._clock, self._trend = StepTimes(), StepClock(), RewardTrend()
        self._said_clipping = False
        if hosts.is_leader and (warning := policy_loss(objective.loss).warning(objective)):
            log.warning("%s", warning)

    @property
    def stop_reason(self) -> str | None:
        """Why an alarm wants the run to end, on the leader; None where none does (``rollout.alarms.on_alarm``)."""
        return self._report.stop_reason

    @property
    def engine(self) -> RolloutEngine | None:
        """The engine; None before the first rollout where none was given."""
        return self._sampler.session.engine

    @property
    def logprob_traces(self) -> dict[str, int]:
        """Traces of each program that computes log-probabilities, by name."""
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
        """Find out before the first step what would make a rollout fail; launches nothing."""
        with self._hosts.scope("rollouts/check") as scope, scope.run_on_all("check"):
            self._sampler.check(model)

    def structs(self) -> Mapping[str, jax.ShapeDtypeStruct]:
        """Return global shape, type and sharding of each column, see `BatchSource.structs`."""
        return batch_structs(packed_columns(self._columns), self._trainer.train_batch_size, self._mesh)

    @property
    def filled_rows(self) -> int:
        """The number of rows of the last batch that have tokens, see `PackedBatches`."""
        return 0 if self._packing is None else self._packing.filled

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
            self._rollout = self._roll_out(number, model)
            if self._rollout is None:
                return None
        assert self._rollout is not None and self._rollout.number == number, "a rollout goes with its updates"
        answers = self._rollout.minibatch(update, self._trainer.train_batch_size)
        self._packing = self._rollout.packing(answers, data_shards(self._mesh), learned=True)
        columns = {name: column[answers] for name, column in self._rollout.columns.items()}
        placed = self._packing.place(columns, self._mesh)
        self._clock.lap("place")
        self._report_rollout()  # last: threads that write the rows take turns with this one until it launches the step
        return placed

    def use_reference(self, model: PyTree) -> None:
        """See `lockstep.training.loop.batch_source.UsesReference`."""
        self._logprobs.use_reference(model)

    def prepare(self, step: int) -> None:
        """Do nothing: a rollout needs the model of its step."""

    def close(self) -> None:
        """End what is under way; rows of finished rollouts are written."""
        if self._ahead is not None and self._ahead.scoring is not None:
            self._ahead.scoring.close()
        self.flush()

    def on_step(self, info: StepInfo, force: bool = False) -> None:
        """Log where the time of a step went. Added after a `SampleCallback`, it sees how long that took."""
        if info.step < 0 or info.step != self._step or info.next_step == self._logged_step or self._rollout is None:
            return  # before the first step, a second call, or a call that an earlier process left undone
        self._logged_step = info.next_step
        self._watch_clipping(info)
        chosen = self._rollout.minibatch(info.step % self._fields.updates, self._trainer.train_batch_size)
        self._clock.add("update", info.step_duration)
        step_s = sum(self._clock.seconds.values())
        mean_s, tokens_per_s = self._times.add(step_s, int(self._rollout.lengths[chosen].sum()))
        self._log(
            info.next_step,
            {
                **{f"time/{phase}_s": seconds for phase, seconds in self._clock.seconds.items()},
                "time/inference_eval_s": info.hook_seconds.get("inference_eval", 0.0),
                "time/train/step_avg_last10_s": mean_s,
                "throughput/train/valid_tokens_per_s": tokens_per_s,
            },
        )

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: the rollout, where updates of it are still to come, what was sampled for the
        next one, and the drafts of those after it.
        """
        rest = self._rollout
        if rest is not None and self._step + 1 >= (rest.number + 1) * self._fields.updates:
            rest = None  # its updates are done
        ahead = None if self._ahead is None else self._ahead.state()
        return {**saved_state(self._fields, self._sampler.n_questions, rest), "ahead": ahead, **self._sampler.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned in an earlier process."""
        self._rollout = read_state(state, self._fields, self._sampler.n_questions, self._columns)
        self._sampler.load_state(state)
        ahead = state.get("ahead")
        if ahead is not None and self._fields.rollout_ahead:
            self._ahead = self._sampler.resumed(ahead)
        elif ahead is not None and self._hosts.is_leader:
            log.warning("rollout_ahead is 0 now: the rollout that the checkpoint has ahead is sampled again")

    def flush(self) -> None:
        """Wait until the rows of all rollouts are written, see `RolloutLog.flush`."""
        self._report_rollout()
        self._report.flush()

    def after_signal(self) -> None:
        """Wait for rows that are not written yet: a signal ended the run."""
        self.flush()

    def _roll_out(self, number: int, model: PyTree) -> Rollout | None:
        groups: list[Groups] = []
        every: list[Sampled] = []
        n_groups = self._sampler.n_questions
        for attempt in range(self._fields.rollout.max_attempts):
            sampled = self._sampled(number, attempt, model)
            self._clock.lap("rollout_generate")
            if sampled is None:
                return None
            every.append(sampled)
            groups.append(self._rewarded(sampled))
            self._clock.lap("reward")
            if sum(int(part.mixed.sum()) for part in groups) >= n_groups:
                break
        chosen = choose_groups(groups, n_groups)
        rollout, answers = self._rows(number, chosen)
        everything = Groups.concatenate(groups)
        self._sampler.add(everything)
        self._trend.add(float(everything.totals.mean()))
        self._unreported = _Report(self._sampler.learned_at(number), everything, chosen, every)
        self._logprobs.fill(rollout, model, answers)
        if self._objective.kl_in_reward:
            self._take_divergence(rollout, chosen, answers)
        self._clock.lap("logprobs")
        self._hosts.phase("training")
        return rollout

    def _sampled(self, number: int, attempt: int, model: PyTree) -> Sampled | None:
        """The answers of a rollout. With ``rollout_ahead`` they are there already, but for the first one, and the next
        rollout is sampled: its rewards have until the next call. None where the job is asked to end.
        """
        if not self._fields.rollout_ahead:
            return self._sampler.sample(number, attempt, model)
        if self._ahead is None:
            self._ahead = self._sampler.sample(number, attempt, model)
        sampled, following = self._ahead, None
        if sampled is not None and (number + 1) * self._fields.updates < self._trainer.num_train_steps:
            following = self._sampler.sample(number + 1, attempt, model)
            if following is None:
                return None  # what is there goes into the checkpoint
        assert sampled is None or sampled.number == number, "what was sampled ahead is for this rollout"
        self._ahead = following
        return sampled

    def _rewarded(self, sampled: Sampled) -> Groups:
        rewards = sampled.rewards
        if rewards is None:
            rewards = self._scored(sampled)
        return Groups(
            questions=np.array(sampled.questions),
            completions=sampled.completions,
            rewards=rewards,
            conversations=sampled.conversations,
        )

    def _scored(self, sampled: Sampled) -> Rewards:
        """The rewards of answers, those of models computed now."""
        assert sampled.scoring is not None
        scores: dict[str, list[float | None]] = {}
        if self._reward_models:
            step = self._sampler.learned_at(sampled.number)
            completions, make_row = sampled.completions, self._answer_rows.row
            answers = [
                make_row(step, sampled.questions[completion.prompt_id], completion) for completion in completions
            ]
            scores = {model.name: model.scores(self._hosts, answers) for model in self._reward_models}
        with self._hosts.scope("rewards") as scope:
            return self._rewarder.finish(scope, sampled.scoring, len(sampled.completions), scores)

    def _take_divergence(self, rollout: Rollout, groups: Groups, answers: Bool[np.ndarray, "row position"]) -> None:
        """Replace the advantages by those of the rewards less the divergence (``kl_in_reward``)."""
        divergences = self._objective.answer_divergences(rollout.columns, answers).reshape(groups.totals.shape)
        advantage = groups.advantages(self._objective, less=self._objective.kl_coefficient * divergences)
        rollout.columns["advantage"][:] = advantage
        with self._hosts.scope("advantages") as scope:
            scope.agree("advantages", {"advantage": digest(advantage.tobytes())})
        self._log(self._sampler.learned_at(rollout.number), {"rollout/kl": float(divergences.mean())})

    def _rows(self, number: int, groups: Groups) -> tuple[Rollout, Bool[np.ndarray, "row position"]]:
        """The rows of a rollout, and which tokens of them are those of the answers."""
        learned = np.repeat(~groups.dropped, groups.size)
        if self._fields.mask_truncated:
            learned &= [completion.finish_reason != FinishReason.LENGTH for completion in groups.completions]
        samples = groups.samples(self._questions.tokens)
        columns = make_columns(self._columns, samples, groups.advantages(self._objective), learned)
        lengths = np.array([sum(len(segment.tokens) for segment in sample) for sample in samples])
        rollout = Rollout(number=number, columns=columns, lengths=lengths)
        return rollout, answer_mask(samples, columns["tokens"].shape[1])

    def _report_rollout(self) -> None:
        """Report the last rollout, where that has not been done."""
        report, self._unreported = self._unreported, None
        if report is not None and self._hosts.is_leader:
            self._report.report(*report)

    def _watch_clipping(self, info: StepInfo) -> None:
        """Say once that clipping takes away much of the gradient of answers that the model itself has just sampled."""
        clipped = info.metrics.get("clipped", 0.0)
        on_policy = info.step % self._fields.updates == 0 and not self._fields.rollout_ahead
        if on_policy and clipped > MOST_CLIPPED and not self._said_clipping:
            self._said_clipping = True
            log.warning(
                "step %d: clipping takes away the gradient of %.0f %% of the tokens, though they were sampled by the "
                "model that learns from them: its ratio should be 1. The probabilities of engine and trainer differ "
                "(train/logprob_gap is %.2g), or clip_epsilon %g is too small",
                info.next_step, 100 * clipped, info.metrics.get("logprob_gap", float("nan")),
                self._objective.clip_epsilon,
            )  # fmt: skip

    def _log(self, step: int, values: Mapping[str, float]) -> None:
        if self._hosts.is_leader:
            self._tracker.log(values, step=step)


class _Report(NamedTuple):
    """The arguments of `RolloutLog.report`."""

    step: int
    groups: Groups
    chosen: Groups
    sampled: list[Sampled]


def _check_policy(objective: GrpoConfig, temperature: float, vocab_size: int) -> None:
    """Refuse a loss whose policy is not the one that is sampled."""
    for name, value, owner in (("temperature", temperature, "rollouts"), ("vocab_size", vocab_size, "tokenizer")):
        own_value = getattr(objective, name)
        if own_value != value:
            raise ConfigError(
                f"the {name} of the loss is {own_value} and that of the {owner} is {value}: the probabilities that are "
                f"learned would not be those that answers are drawn with. Use GrpoConfig({name}={value}, ...)."
            )


def _check_attempts(max_attempts: int, count: int, available: int) -> None:
    """Refuse a dynamic sampling that would have to ask a question again within a rollout."""
    if max_attempts > 1 and max_attempts * count > available:
        raise ConfigError(
            f"rollout.max_attempts is {max_attempts} and a rollout has {count} questions, each asked once: it may ask "
            f"{max_attempts * count}, and there are {available}. Lower rollout.max_attempts to at most "
            f"{max(1, available // count)}, or give more questions."
        )


def make_rewarder(fields: GrpoRunFields) -> Rewarder:
    """Return what computes the rewards of a run."""
    return Rewarder(
        fields.rewards,
        max_new_tokens=fields.rollout.max_new_tokens,
        workers=fields.reward_workers,
        timeout_s=fields.reward_timeout_s,
        filter_by=fields.rollout.filter_by,
    )
