"""The directory of a run: its name, and what is in it at the end."""

import secrets
import time
from pathlib import Path

from lockstep.credentials import without_credentials
from lockstep.errors import ConfigError
from lockstep.hosts import Hosts
from lockstep.report import drop_later
from lockstep.training import ROLLOUTS_FILE, TrainerConfig, TrainResult, resumable_base, write_resumable
from lockstep.urls import check_bare_name


def make_run_dir(config: TrainerConfig, hosts: Hosts) -> Path:
    """Make the run directory on the leader and broadcast its name. A run with checkpoints may go on in its own.

    Args:
        config: The settings of the run; without a ``run_id`` the name is made from the leader's clock.
        hosts: The hosts of the job.

    Returns:
        The directory's path, the same on every host; the directory exists on the leader.

    Raises:
        PeerError: The directory cannot be made, or it has another run's files.
    """
    name = config.run_id or time.strftime("%Y%m%d-%H%M%S-") + secrets.token_hex(2)
    name = hosts.broadcast("run_id", name.encode() if hosts.is_leader else None).decode(errors="replace")
    path = Path(config.log_dir) / check_bare_name(name, "process 0")
    with hosts.run_on_all("run directory"):
        if hosts.is_leader:
            path.mkdir(parents=True, exist_ok=True)
            base_path = None if config.checkpointer is None else config.checkpointer.base_path
            if any(path.iterdir()):
                _check_resumable(path, None if config.resume == "never" else base_path)
            elif base_path is not None:
                write_resumable(path, base_path)
    return path


def _check_resumable(path: Path, base_path: str | None) -> None:
    """Refuse a directory that has something of another run in it."""
    before = None if base_path is None else resumable_base(path)
    if base_path is None or before is None:
        raise ConfigError(
            f"run directory {path} is not empty; the samples and metrics of two runs would mix. Choose another "
            "trainer.run_id (null makes one up), or remove the directory. A run with a trainer.checkpointer can go on "
            "in its own."
        )
    now = without_credentials(base_path)
    if before not in (now, base_path):  # an older version kept credentials
        raise ConfigError(
            f"run directory {path} is of a run with trainer.checkpointer.base_path {before}, but now it is "
            f"{now}. Use the same, or another trainer.run_id."
        )


def rewind(run_dir: Path, *, metrics_step: int, samples_step: int) -> None:
    """Remove from metrics and samples what a run that goes on from a checkpoint will write again.

    Args:
        run_dir: The directory of the run.
        metrics_step: The last step whose metrics stay.
        samples_step: The last step whose samples stay.

    Raises:
        OSError: A file cannot be written anew.
    """
    for path in run_dir.glob("metrics*.jsonl"):
        drop_later(path, metrics_step)
    for name in ("samples.jsonl", "tasks.jsonl"):
        drop_later(run_dir / name, samples_step)
    drop_later(run_dir / ROLLOUTS_FILE, metrics_step)


def closing_summary(run_dir: Path, result: TrainResult, num_train_steps: int, saved: str | None) -> str:
    """What a run left behind and what to try next.

    Args:
        run_dir: The directory of the run.
        result: How the training ended.
        num_train_steps: The number of steps that were asked for.
        saved: The Hugging Face checkpoint; None: none was saved.

    Returns:
        A text of several lines.
    """
    done = "done" if result.stopped_by is None else "stopped by a signal"
    if result.diverged:
        done = "stopped before a step whose loss is not finite or a spike (trainer.on_nan)"
    if result.stopped_by is not None and saved is None and result.checkpoint is None:
        done += ", no checkpoint was saved"
    lines = ["", f"{done}: {result.completed_steps} of {num_train_steps} steps, last loss {result.loss:.4f}"]
    found: list[tuple[str, Path]] = [
        ("samples", run_dir / "samples.jsonl"),
        ("rollouts", run_dir / ROLLOUTS_FILE),
        *(("metrics", path) for path in sorted(run_dir.glob("metrics*.jsonl"))),
        *(("W&B run", path) for path in sorted(run_dir.glob("wandb/*run-*"))),
    ]
    lines += [f"  {name:<11}{path}" for name, path in found if path.exists()]
    if saved is not None:
        lines.append(f"  {'checkpoint':<11}{saved}")
    if result.checkpoint is not None:
        lines.append(f"  {'state':<11}{result.checkpoint}")
    if result.skipped_steps and not result.diverged:
        lines.append(f"  {result.skipped_steps} steps were skipped, see train/skipped_step in the metrics")
    if result.checkpoint_errors:
        lines.append(f"  {result.checkpoint_errors} checkpoints could not be saved; see the log")
    if result.tracker_errors:
        lines.append(f"  the tracker failed {result.tracker_errors} times; metrics are incomplete")
    lines += ["try next:", *(f"  {line}" for line in _next_steps(run_dir, saved, result))]
    return without_credentials("\n".join(lines))


def _next_steps(run_dir: Path, saved: str | None, result: TrainResult) -> list[str]:
    steps = []
    if (run_dir / "samples.jsonl").exists():
        steps.append(f"lockstep report {run_dir}   # every answer at every step as one HTML page")
    for path in sorted(run_dir.glob("wandb/offline-run-*")):
        steps.append(f"wandb sync {path}   # upload the run with its table of samples")
    if saved is not None:
        steps.append(f"lockstep train-lm --initialize_from_hf {saved} ...   # go on from the trained model")
    if result.stopped_by is not None and result.checkpoint is not None:
        steps.append("the same command again   # goes on from the last checkpoint")
    steps.append("--inference_eval.prompts '[\"your prompt\"]'   # ask something else while it trains")
    return steps
