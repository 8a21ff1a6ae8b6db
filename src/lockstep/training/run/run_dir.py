"""The directory of a run: its name, the tracker that writes in it, and its files at the end."""

import contextlib
import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.errors import ConfigError
from lockstep.hosts import LEASE, Hosts, take_lease
from lockstep.models import save_target
from lockstep.printable import get_logger, without_credentials
from lockstep.report import HEALTH_FILE, WANDB_RUN, Tracker, build_tracker, drop_later
from lockstep.storage import call_storage
from lockstep.text import TEMPLATE_DATE, fix_template_date, tokenizer_digest
from lockstep.training.checkpoints.checkpoint import (
    CheckpointDirectory,
    DamagedCheckpointError,
    bring_files,
    keep_files,
)
from lockstep.training.checkpoints.config import resumable_base, write_resumable
from lockstep.training.loop.config import TrainerConfig
from lockstep.training.loop.step_log import number_text
from lockstep.training.loop.stopping import TrainResult
from lockstep.training.rl import ROLLOUTS_FILE
from lockstep.urls import check_bare_name, check_links, checkpoint_path

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = get_logger(__name__)


def make_run_dir(config: TrainerConfig, hosts: Hosts) -> Path:
    """Make the run directory on the leader and broadcast its name. A run with checkpoints may go on in its own.

    Args:
        config: Without a ``run_id`` the name is made from the leader's clock.

    Raises:
        PeerError: The directory cannot be made, or it has another run's files.
    """
    name = config.run_id or time.strftime("%Y%m%d-%H%M%S-") + secrets.token_hex(2)
    name = hosts.broadcast("run_id", name.encode() if hosts.is_leader else None).decode(errors="replace")
    path = Path(config.log_dir).absolute() / check_bare_name(name, "process 0")
    with hosts.run_on_all("run directory"):
        check_links(path)
        if hosts.is_leader:
            path.mkdir(parents=True, exist_ok=True)
            base_path = None if config.checkpointer is None else config.checkpointer.base_path
            if any(inside.name != LEASE for inside in path.iterdir()):
                _check_resumable(path, None if config.resume == "never" else base_path)
            elif base_path is not None:
                write_resumable(path, base_path)
    return path


def template_date_facts(config: TrainerConfig, tokenizer: "PreTrainedTokenizerBase", hosts: Hosts) -> dict[str, str]:
    """Fix the date of the chat template, see `fix_template_date`; every host calls it.

    Returns:
        The facts of the run that depend on it: a checkpoint keeps them, and the run goes on with its date.
    """

    def kept() -> str | None:
        if config.checkpointer is None or config.run_id is None:
            return None
        path = config.checkpointer.path(Path(config.log_dir).absolute() / config.run_id, config.run_id)

        def read() -> str | None:
            directory = CheckpointDirectory(path)
            for step in reversed(directory.steps()):
                with contextlib.suppress(DamagedCheckpointError):
                    return directory.metadata(step).facts.get(TEMPLATE_DATE)
            return None

        wait_s = 0.8 * hosts.timeout_s  # as for the search of the checkpoint itself
        return call_storage(f"looking for checkpoints in {path}", read, wait_s, try_s=wait_s)

    date = fix_template_date(tokenizer, kept, hosts.broadcast_from_leader)
    return {"tokenizer": tokenizer_digest(tokenizer), **({TEMPLATE_DATE: date} if date else {})}


def take_leases(config: TrainerConfig, run_dir: Path) -> None:
    """Take the leases of the run directory and of the checkpoints; the leader calls it before it changes a file there.

    Raises:
        ConfigError: Another job writes there now.
    """
    take_lease(run_dir)
    checkpoints = None if config.checkpointer is None else config.checkpointer.path(run_dir, run_dir.name)
    if checkpoints is not None and ("://" in checkpoints or not Path(checkpoints).is_relative_to(run_dir)):
        checkpoint_path(checkpoints).mkdir(parents=True, exist_ok=True)
        take_lease(checkpoints)


def _check_resumable(path: Path, base_path: str | None) -> None:
    """Raise where a directory has files of another run."""
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


def check_save_paths(paths: Sequence[str], taken: Mapping[str, str | None]) -> None:
    """Find out before the first step whether the trained model can be saved; one process calls it.

    Args:
        paths: Where it is saved, the last model's place last.
        others: The places that the run reads, or writes other files to, by their keys.

    Raises:
        ConfigError: It is one of those, or in it is something that is no checkpoint.
        OSError: It cannot be written.
    """
    for path in paths:
        for key, taken_path in taken.items():
            if taken_path is not None and _real(path) == _real(taken_path):
                raise ConfigError(
                    f"hf_save_path is {path}, and so is {key}, which saving would replace. Choose another directory."
                )
    save_target(paths[-1], secrets.token_hex(4)).check()


def _real(path: str) -> str:
    return path.rstrip("/") if "://" in path else os.path.realpath(os.path.expanduser(path))


def rewind(run_dir: Path, *, metrics_step: int, samples_step: int) -> None:
    """Remove from metrics and samples what a run that goes on from a checkpoint will write again."""
    for path in run_dir.glob("metrics*.jsonl"):
        drop_later(path, metrics_step)
    for name in ("samples.jsonl", "tasks.jsonl", HEALTH_FILE):
        drop_later(run_dir / name, samples_step)
    drop_later(run_dir / ROLLOUTS_FILE, metrics_step)


def shown_path(path: Path) -> Path:
    """A path for reading: relative to the working directory where it is below that."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def closing_summary(run_dir: Path, result: TrainResult, num_train_steps: int, saved: str | None) -> str:
    """The text of several lines that names the files of a run and what to try next."""
    run_dir = shown_path(run_dir)
    if saved is not None and "://" not in saved:
        saved = str(shown_path(Path(saved)))
    done = "done" if result.stopped_by is None else "stopped by a signal"
    if result.diverged:
        done = "stopped before a step whose loss is not finite or a spike (trainer.on_nan)"
    if result.alarmed:
        done = "stopped by an alarm (alarms.on_alarm)"
    if not result.complete and not result.diverged and saved is None and result.checkpoint is None:
        done += ", no checkpoint was saved"
    last = result.progress.partition("  ")[0] or f"last loss {number_text(result.loss, 4)}"
    lines = ["", f"{done}: {result.completed_steps} of {num_train_steps} steps, {last}"]
    files: list[tuple[str, Path]] = [
        ("samples", run_dir / "samples.jsonl"),
        ("rollouts", run_dir / ROLLOUTS_FILE),
        *(("metrics", path) for path in sorted(run_dir.glob("metrics*.jsonl"))),
        ("events", run_dir / "tensorboard"),
        *(("W&B run", path) for path in sorted(run_dir.glob("wandb/*run-*"))),
    ]
    lines += [f"  {name:<11}{path}" for name, path in files if path.exists()]
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


def start_tracker(config: TrainerConfig, run_dir: Path, run_config: Mapping[str, Any]) -> Tracker:
    """Start the tracker, which goes on where that of an earlier start ended; call it on the leader alone.

    The id of the W&B run is kept beside the checkpoints too: a later start may be on a machine that has only them.

    Args:
        run_config: The configuration of the whole run, for trackers that show it.
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
