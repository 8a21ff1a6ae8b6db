"""What is said of each step: figures for the tracker, a bar or lines for the user."""

from lockstep.report import Tracker
from lockstep.training.loop.hooks import StepInfo
from lockstep.training.loop.progress_bar import make_progress
from lockstep.training.loop.throughput import Throughput
from lockstep.training.step.train_step import StepMetrics


class StepLog:
    """Tells of steps on the leader; elsewhere it does nothing.

    Args:
        total: The number of steps of the run.
        tracker: The tracker that the figures go to.
        is_leader: Whether this process is the leader.
    """

    def __init__(self, total: int, tracker: Tracker, *, is_leader: bool) -> None:
        self._tracker, self._is_leader = tracker, is_leader
        self._progress = make_progress(total, is_leader)

    def step(self, info: StepInfo, metrics: StepMetrics, throughput: Throughput, note: str = "") -> None:
        """Tell of a step.

        Args:
            info: The info of the step.
            metrics: Its metrics.
            throughput: How fast it was.
            note: What the source of the batches has to say, for the user, in place of loss and throughput.
        """
        if not self._is_leader:
            return
        if note:
            self._progress.update(info.next_step, None, f"{note}, update {info.step_duration:.2f} s")
        else:
            self._progress.update(info.next_step, info.loss, str(throughput))
        values = {"train/loss": info.loss, **{f"train/{name}": value for name, value in metrics.values.items()}}
        self._tracker.log(values | throughput.metrics(), step=info.next_step)

    def close(self) -> None:
        """Show the last state and give the terminal back."""
        self._progress.close()
