"""The tracker of a training run, which goes on where that of an earlier start ended."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lockstep.credentials import get_logger
from lockstep.report import WANDB_RUN, Tracker, build_tracker
from lockstep.training import TrainerConfig, bring_files, keep_files

log = get_logger(__name__)


def start_tracker(config: TrainerConfig, run_dir: Path, run_config: Mapping[str, Any]) -> Tracker:
    """Start the tracker; call it on the leader alone.

    Which W&B run it is, is known beside the checkpoints too: a later start may be on a machine that has only them.

    Args:
        config: The settings of the run.
        run_dir: The run directory.
        run_config: The configuration of the whole run, for trackers that show it.

    Returns:
        The tracker.

    Raises:
        ConfigError: The tracker cannot start.
    """
    checkpoints = None if config.checkpointer is None else config.checkpointer.path(run_dir, run_dir.name)
    if checkpoints is not None:
        with _warning(checkpoints):
            bring_files(checkpoints, run_dir, [WANDB_RUN])
    tracker = build_tracker(config.tracker, run_dir, run_dir.name, run_config)
    if checkpoints is not None:
        with _warning(checkpoints):
            keep_files(checkpoints, run_dir, [WANDB_RUN])
    return tracker


@contextlib.contextmanager
def _warning(checkpoints: str) -> Iterator[None]:
    """A run is not ended for the sake of its curves."""
    try:
        yield
    except OSError as error:
        log.warning(
            "%s could not be read or written in %s: %s. On another machine this run would be a new run in W&B.",
            WANDB_RUN,
            checkpoints,
            error,
        )
