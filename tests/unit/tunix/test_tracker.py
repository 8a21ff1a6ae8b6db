"""Where scalars and rows go in Tunix's metrics logger, without a W&B run and with one that has passed the step."""

import contextlib
from types import SimpleNamespace

import pytest
from metrax.logging import WandbBackend
from tunix.sft.metrics_logger import MetricsLogger, MetricsLoggerOptions

from lockstep.tunix.tracker import TunixTracker
from tests.unit.report.trackers.fakes import FakeRun, row


class Backend:
    """Gets every scalar of jax too, such as times of compiling."""

    def __init__(self):
        self.logged = []

    def log_scalar(self, event, value, **kwargs):
        if not event.startswith("/jax/"):
            self.logged.append((event, value, kwargs["step"]))

    def close(self):
        pass


def wandb_backend(run):
    """Tunix's W&B backend with a run that is already there; only what we log counts here."""
    backend = WandbBackend.__new__(WandbBackend)
    backend._is_active, backend.wandb = True, SimpleNamespace(run=run, log=lambda *_, **__: None, finish=run.finish)
    return backend


@contextlib.contextmanager
def tracker(*backends):
    """Our tracker and a logger with these backends, which listen to jax until it is closed."""
    made = TunixTracker()
    factories = [lambda backend=backend: backend for backend in backends]
    logger = MetricsLogger(MetricsLoggerOptions("unused", backend_kwargs={"custom_backend": factories}))
    made.use(logger)
    try:
        yield made, logger
    finally:
        logger.close()


def test_the_logger_gets_scalars_at_their_step_and_keeps_them():
    backend = Backend()
    with tracker(backend) as (made, logger):
        made.log({"eval/time/report_s": 1.5, "eval/note": "no number"}, step=3)
        made.log_rows("eval/samples", [row(3, "text")], step=3)
    assert backend.logged == [("eval/eval/time/report_s", 1.5, 3)]
    assert logger.get_metric_history("eval", "time/report_s", "eval").tolist() == [1.5]


@pytest.mark.slow
def test_a_wandb_run_that_has_passed_the_step_gets_scalars_and_rows_in_its_open_entry():
    run, other = FakeRun(), Backend()
    with tracker(wandb_backend(run), other) as (made, _):
        run.log({"train/loss": 2.0}, step=9)
        made.log_rows("eval/samples", [row(5, "text")], step=5)
        made.log({"eval/step": 5, "eval/a": 1.0}, step=5)
    assert [(step, list(values)) for step, values in run.logged[1:]] == [
        (9, ["eval/samples", "eval/samples_state"]),
        (9, ["eval/step", "eval/a"]),
    ]
    assert run.axes == [("eval/step", None), ("eval/*", "eval/step")]
    assert other.logged == [("eval/eval/step", 5.0, 5), ("eval/eval/a", 1.0, 5)]
