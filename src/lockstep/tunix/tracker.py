"""Where the samples of a Tunix run go: its metrics logger, and the table of its W&B run."""

from collections.abc import Mapping, Sequence

from metrax.logging import WandbBackend
from tunix.sft.metrics_logger import MetricsLogger, Mode

from lockstep.report import TableRow, WandbTracker


class TunixTracker:
    """Tunix's metrics logger as `lockstep.report.Tracker`, called by process 0 alone, while training goes on.

    The logger gets the scalars as ``NAME/eval/…``, at the step that they belong to. W&B has passed that step by then
    and would drop them, so where the logger has a W&B run, its backends are called one by one, and W&B gets scalars and
    rows in whatever history entry is open.
    """

    def __init__(self) -> None:
        self._logger: MetricsLogger | None = None
        self._wandb: WandbTracker | None = None

    def use(self, logger: MetricsLogger) -> None:
        """Log to this logger from now on.

        Args:
            logger: The trainer's.
        """
        if logger is self._logger:
            return
        self._logger = logger
        runs = [backend.wandb.run for backend in logger._backends if isinstance(backend, WandbBackend)]
        self._wandb = WandbTracker(runs[0], alone=False) if runs and runs[0] is not None else None

    def log(self, metrics: Mapping[str, float | str], *, step: int) -> None:
        """Record scalars; the logger has no place for texts."""
        assert self._logger is not None, "use() comes before log()"
        for name, value in metrics.items():
            if isinstance(value, str):
                continue
            prefix, _, own = name.partition("/")
            if self._wandb is None:
                self._logger.log(prefix, own, float(value), Mode.EVAL, step)
                continue
            for backend in self._logger._backends:
                if not isinstance(backend, WandbBackend):
                    backend.log_scalar(f"{prefix}/{Mode.EVAL}/{own}", float(value), step=step)
        if self._wandb is not None:
            self._wandb.log(metrics, step=step)

    def log_rows(self, name: str, rows: Sequence[TableRow], *, step: int) -> None:
        """Add the rows to the table in W&B; Tunix's other backends have no tables."""
        if self._wandb is not None:
            self._wandb.log_rows(name, rows, step=step)

    def finish(self) -> None:
        """Do nothing: the logger is the trainer's."""
