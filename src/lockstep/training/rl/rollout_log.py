"""The leader's log of a rollout: figures, and the best and the worst answers; training never waits for it."""

import dataclasses
import functools
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar, Literal

import numpy as np
from jaxtyping import Bool, Float

from lockstep.engine import PhaseClock
from lockstep.engine.schedule import DraftCounts
from lockstep.health import AnsweredPrompt, Health, RoundHealth, Vocabulary, measure_round
from lockstep.hosts import try_leader_only
from lockstep.printable import get_logger
from lockstep.report import AlarmLog, AlarmsConfig, BackgroundQueue, Row, Tracker, append_jsonl, conversation_text
from lockstep.report.rows import TURNS
from lockstep.text import Prompt
from lockstep.training.rl.conversations import Conversation
from lockstep.training.rl.groups import Groups
from lockstep.training.rl.questions import AnswerRows
from lockstep.training.rl.rewards import TOTAL
from lockstep.training.rl.sampled import Sampled
from lockstep.types import Completion, FinishReason

log = get_logger(__name__)

ROLLOUTS_FILE = "rollouts.jsonl"
"""The file of a run directory that the best and worst answers of each rollout are appended to."""
TABLE = "rollout/answers"  # the table of a tracker with the same rows
FLUSH_S = 10.0  # seconds that the end of training waits for rows that are not written yet
MAX_WAITING = 8  # rollouts whose rows may wait behind those that are being written


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankedRow(Row):
    """One of the best or the worst answers of a rollout."""

    columns: ClassVar[tuple[str, ...]] = (*Row.columns, "rank")

    rank: Literal["best", "worst"]

    def to_record(self) -> dict[str, Any]:
        """The row as the file has it, with the turns of a conversation, and what the model said as it wrote it."""
        turns = {TURNS: [dict(message) for message in self.turns], "generated_text": self.generated_text}
        return self.to_dict() | (turns if self.turns else {})

    def to_dict(self) -> dict[str, Any]:
        """The row as one flat mapping: that of `Row`, with ``rank`` before its metrics, a conversation as its lines."""
        columns = {column: getattr(self, column) for column in self.columns}
        lines = {"generated_text": conversation_text(self.turns)} if self.turns else {}
        return columns | lines | dict(self.metrics)


class RolloutLog:
    """Logs rollouts on the leader.

    Args:
        shown: The number of answers of a rollout that are told.
        alarms: When a state of the answers is an alarm; None: their health is not looked at.
    """

    def __init__(
        self,
        tracker: Tracker,
        run_dir: Path | None,
        rows: AnswerRows,
        shown: int,
        *,
        alarms: AlarmsConfig | None = None,
    ) -> None:
        self._tracker, self._rows, self._shown = tracker, rows, shown
        self._alarms = None if alarms is None else AlarmLog(alarms.of_trained(), "rollout", tracker, run_dir)
        self._file = None if run_dir is None else run_dir / ROLLOUTS_FILE
        self._queue = BackgroundQueue("lockstep-rollouts", size=MAX_WAITING)

    def report(self, step: int, groups: Groups, chosen: Groups, sampled: Sequence[Sampled]) -> None:
        """Log the figures of a rollout and queue its rows; returns at once.

        Args:
            chosen: Those that are learned from.
        """
        rewards = groups.rewards
        values = {
            **reward_metrics(groups.totals, rewards.components, rewards.failed, rewards.late),
            **answer_metrics(chosen.completions, chosen.signal, chosen.dropped),
            **{name: sum(part.metrics[name] for part in sampled) for name in sampled[0].metrics},
            **turn_metrics(groups.conversations or ()),
            "rollout/attempts": float(len(sampled)),
            "rollout/generated_tokens": float(sum(len(part.tokens) for part in groups.completions)),
        }
        for moment, used in (("before", sampled[-1].before), ("after", sampled[-1].after)):
            if used is not None:
                values[f"rollout/hbm/{moment}_bytes"] = float(used)
        drafts = [part.drafts for part in sampled if part.drafts is not None]
        if drafts:
            saved = DraftCounts.sum(drafts)
            values |= {f"rollout/{name}": value for name, value in saved.metrics().items()}
            log.info("drafts of the rollout of step %d: %s", step, saved)
        self._tracker.log(values, step=step)

        measured: list[RoundHealth] = []

        def look(alarms: AlarmLog) -> None:
            answers = self._answered(step, groups)
            health = measure_round(answers, self._vocabulary)
            measured.append(health)
            self._tracker.log({f"rollout/{name}": value for name, value in health.scalars().items()}, step=step)
            alarms.add(step, answers, health)

        def write() -> None:
            rows = self._best_and_worst(step, groups, measured[0].answers if measured else ())
            if self._file is not None:
                append_jsonl(self._file, [row.to_record() for row in rows])
            self._tracker.log_rows(TABLE, rows, step=step)

        def work() -> None:
            if (alarms := self._alarms) is not None:
                health = f"the health of the answers of step {step}"
                try_leader_only(health, lambda: look(alarms), "training goes on")
            if self._shown:
                try_leader_only(f"writing {ROLLOUTS_FILE}", write, "training goes on")

        if (self._shown or self._alarms) and not self._queue.put(f"the rows of step {step}", work):
            log.error("the rows of the rollout of step %d are dropped: the disk is slow or hangs", step)

    def flush(self) -> None:
        """Wait until the rows of all rollouts are written, at most `FLUSH_S` seconds."""
        if left := self._queue.flush(FLUSH_S):
            log.error("after %g s %s: not written, and lost when the process ends", FLUSH_S, ", ".join(left))

    @property
    def stop_reason(self) -> str | None:
        """Why an alarm wants the run to end; None where none does."""
        return None if self._alarms is None else self._alarms.stop_reason

    def _answered(self, step: int, groups: Groups) -> list[AnsweredPrompt]:
        answers = []
        for answer, completion in enumerate(groups.completions):
            row, prompt = self._row(step, groups, answer)
            answers.append(row.answered(prompt, completion, self._rows.questions.tokens[prompt.id]))
        return answers

    def _row(self, step: int, groups: Groups, answer: int) -> tuple[Row, Prompt]:
        """The row of an answer, and its question; of a conversation all that the model said, a line per turn."""
        row, prompt = self._rows.row(step, int(groups.questions[answer // groups.size]), groups.completions[answer])
        if groups.conversations is not None:
            row = dataclasses.replace(row, generated_text=groups.conversations[answer].said)
        return row, prompt

    @functools.cached_property
    def _vocabulary(self) -> Vocabulary:
        return Vocabulary.from_tokenizer(self._rows.tokenizer)

    def _best_and_worst(self, step: int, groups: Groups, health: Sequence[Health]) -> list[RankedRow]:
        order = np.argsort(-groups.rewards.total, kind="stable")
        worst = min(self._shown // 2, len(order))
        best = min(self._shown - worst, len(order) - worst)
        ranked: list[tuple[Literal["best", "worst"], int]] = [("best", answer) for answer in order[:best]]
        ranked += [("worst", answer) for answer in order[len(order) - worst :]]
        rows = []
        for rank, answer in ranked:
            row, _ = self._row(step, groups, answer)
            row = row.with_health(health[answer]) if health else row
            components = {name: float(values[answer]) for name, values in groups.rewards.components.items()}
            values = {field.name: getattr(row, field.name) for field in dataclasses.fields(row)}
            values["metrics"] = {TOTAL: float(groups.rewards.total[answer]), **components}
            values["turns"] = () if groups.conversations is None else groups.conversations[answer].turns_with_rewards
            rows.append(RankedRow(**values, rank=rank))
        return rows


def reward_metrics(
    totals: Float[np.ndarray, "prompt answer"],
    components: Mapping[str, Float[np.ndarray, " answer"]],
    failed: Mapping[str, int],
    late: Mapping[str, int],
) -> dict[str, float]:
    """Return what the rewards of a rollout say."""
    figures = {
        "reward/mean": totals.mean(),
        "reward/std": totals.std(),
        "reward/min": totals.min(),
        "reward/max": totals.max(),
        "reward/failed": sum(failed.values()),
        "reward/late": sum(late.values()),
    }
    for name, values in components.items():
        figures |= {
            f"reward/{name}/mean": values.mean(),
            f"reward/{name}/std": values.std(),
            f"reward/{name}/failed": failed.get(name, 0),
            f"reward/{name}/late": late.get(name, 0),
        }
    return {name: float(value) for name, value in figures.items()}


def answer_metrics(
    completions: Sequence[Completion], signal: Bool[np.ndarray, " prompt"], dropped: Bool[np.ndarray, " prompt"]
) -> dict[str, float]:
    """Return what the answers that are learned from look like.

    Args:
        signal: Whether something can be learned from the answers to a prompt.
        dropped: Whether nothing is, because a reward failed or was late.
    """
    lengths = np.array([len(completion.tokens) for completion in completions])
    return {
        "rollout/answer_length_mean": float(lengths.mean()),
        "rollout/answer_length_max": float(lengths.max()),
        "rollout/cut_share": float(
            np.mean([completion.finish_reason == FinishReason.LENGTH for completion in completions])
        ),
        "rollout/groups_without_signal": float(1 - signal.mean()),
        "rollout/groups_dropped": float(dropped.mean()),
    }


def turn_metrics(conversations: Sequence[Conversation]) -> dict[str, float]:
    """Return the figures of conversations, each a mean of those that have it; none of single turns."""
    if not conversations:
        return {}
    names = dict.fromkeys(name for conversation in conversations for name in conversation.metrics)
    of_environment = {
        f"rollout/environment/{name}": fmean(
            conversation.metrics[name] for conversation in conversations if name in conversation.metrics
        )
        for name in names
    }
    return {"rollout/turns_mean": fmean(conversation.turns for conversation in conversations), **of_environment}


class StepTimes:
    """The time and the tokens of the last steps."""

    def __init__(self, window: int = 10) -> None:
        self._steps: deque[tuple[float, int]] = deque(maxlen=window)

    def add(self, seconds: float, tokens: int) -> tuple[float, float]:
        """Note a step; return the mean of the seconds of the last ones, and their tokens per second.

        Args:
            seconds: From before the step's rollout to after its update.
        """
        self._steps.append((seconds, tokens))
        total = sum(number for number, _ in self._steps)
        return total / len(self._steps), sum(number for _, number in self._steps) / total if total else 0.0


class StepClock(PhaseClock):
    """Seconds of the parts of a step."""

    def __init__(self) -> None:
        super().__init__(("rollout_generate", "reward", "logprobs", "update"))

    def __str__(self) -> str:
        sampling, rewarding = self.seconds["rollout_generate"], self.seconds["reward"]
        return f"rollout {sampling:.2f} s, reward {rewarding:.2f} s"


class RewardTrend:
    """The mean reward of the last rollout, and of the last ones: one alone says little of the trend."""

    def __init__(self, window: int = 10) -> None:
        self._last: deque[float] = deque(maxlen=window)

    def add(self, reward: float) -> None:
        """Note a rollout."""
        self._last.append(reward)

    def __str__(self) -> str:
        if not self._last:
            return ""
        return f"reward {self._last[-1]:.3f} (last {len(self._last)}: {fmean(self._last):.3f})"
