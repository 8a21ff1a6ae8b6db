"""The leader's report of a rollout: figures, and the best and the worst answers; training never waits for it."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lockstep.credentials import get_logger
from lockstep.engine.schedule import DraftCounts
from lockstep.hosts import try_leader_only
from lockstep.report import BackgroundQueue, Row, Tracker, append_jsonl
from lockstep.training.rl.figures import answer_metrics, reward_metrics
from lockstep.training.rl.groups import Groups
from lockstep.training.rl.questions import AnswerRows
from lockstep.training.rl.sampled import Sampled

log = get_logger(__name__)

ROLLOUTS_FILE = "rollouts.jsonl"
"""The file of a run directory that the best and worst answers of each rollout are appended to."""
TABLE = "rollout/answers"
"""The table of a tracker with the same rows."""
FLUSH_S = 10.0
"""Seconds that the end of training waits for rows that are not written yet."""
MAX_WAITING = 8
"""Rollouts whose rows may wait behind those that are being written."""


class RolloutReport:
    """Tells of rollouts on the leader.

    Args:
        tracker: The tracker, which does not block.
        run_dir: The directory with the file of rows; None for no file.
        rows: What makes rows of answers.
        shown: The number of answers of a rollout that are told.
    """

    def __init__(self, tracker: Tracker, run_dir: Path | None, rows: AnswerRows, shown: int) -> None:
        self._tracker, self._rows, self._shown = tracker, rows, shown
        self._file = None if run_dir is None else run_dir / ROLLOUTS_FILE
        self._queue = BackgroundQueue("lockstep-rollouts", size=MAX_WAITING)

    def report(self, step: int, groups: Groups, chosen: Groups, sampled: Sequence[Sampled]) -> None:
        """Log the figures of a rollout and queue its rows; returns at once.

        Args:
            step: The number of completed steps when it has been learned from.
            groups: All answers that were sampled.
            chosen: Those that are learned from.
            sampled: What each sampling produced.
        """
        rewards = groups.rewards
        values = {
            **reward_metrics(groups.totals, rewards.components, rewards.failed, rewards.late),
            **answer_metrics(chosen.completions, chosen.signal, chosen.dropped),
            "rollout/attempts": float(len(sampled)),
        }
        for moment, used in (("before", sampled[-1].before), ("after", sampled[-1].after)):
            if used is not None:
                values[f"rollout/hbm/{moment}_bytes"] = float(used)
        drafts = [each.drafts for each in sampled if each.drafts is not None]
        if drafts:
            saved = DraftCounts.sum(drafts)
            values |= {f"rollout/{name}": value for name, value in saved.metrics().items()}
            log.info("drafts of the rollout of step %d: %s", step, saved)
        self._tracker.log(values, step=step)

        def write() -> None:
            rows = self._best_and_worst(step, groups)
            if self._file is not None:
                append_jsonl(self._file, [row.to_dict() for row in rows])
            self._tracker.log_rows(TABLE, rows, step=step)

        def work() -> None:
            try_leader_only(f"writing {ROLLOUTS_FILE}", write, "training goes on")

        if self._shown and not self._queue.put(f"the rows of step {step}", work):
            log.error("the rows of the rollout of step %d are dropped: the disk is slow or hangs", step)

    def flush(self) -> None:
        """Wait until the rows of all rollouts are written, at most `FLUSH_S` seconds."""
        if left := self._queue.flush(FLUSH_S):
            log.error("after %g s %s: not written, and lost when the process ends", FLUSH_S, ", ".join(left))

    def _best_and_worst(self, step: int, groups: Groups) -> list[Row]:
        order = np.argsort(-groups.rewards.total, kind="stable")
        worst = min(self._shown // 2, len(order))
        best = min(self._shown - worst, len(order) - worst)
        rows = []
        for answer in [*order[:best], *order[len(order) - worst :]]:
            question = int(groups.questions[answer // groups.size])
            row, _ = self._rows.row(step, question, groups.completions[answer])
            components = {name: float(values[answer]) for name, values in groups.rewards.components.items()}
            rows.append(dataclasses.replace(row, metrics={"reward": float(groups.rewards.total[answer]), **components}))
        return rows
