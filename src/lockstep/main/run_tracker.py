"""The tracker of a training run, which goes on where that of an earlier start ended."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.report import WANDB_RUN, Tracker, build_tracker
from lockstep.training import TrainerConfig, bring_files, keep_files


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
        OSError: The directory of the checkpoints cannot be read or written.
    """
    checkpoints = None if config.checkpointer is None else config.checkpointer.path(run_dir, run_dir.name)
    if checkpoints is not None:
        bring_files(checkpoints, run_dir, [WANDB_RUN])
    tracker = build_tracker(config.tracker, run_dir, run_dir.name, run_config)
    if checkpoints is not None:
        keep_files(checkpoints, run_dir, [WANDB_RUN])
    return tracker
