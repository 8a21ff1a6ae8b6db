"""The directory of a run: its name, and what is in it at the end."""

import secrets
import time
from pathlib import Path

from lockstep.errors import ConfigError
from lockstep.hosts import Hosts
from lockstep.training import TrainResult


def make_run_dir(log_dir: str, run_id: str | None, hosts: Hosts) -> Path:
    """Make the run directory on the leader and broadcast its name.

    Args:
        log_dir: The parent directory.
        run_id: The directory's name; None: one made from the leader's clock.
        hosts: The hosts of the job.

    Returns:
        The directory's path, the same on every host; the directory exists on the leader.

    Raises:
        PeerError: The directory cannot be made, or it has another run's files.
    """
    name = run_id or time.strftime("%Y%m%d-%H%M%S-") + secrets.token_hex(2)
    path = Path(log_dir) / hosts.broadcast("run_id", name.encode() if hosts.is_leader else None).decode()
    with hosts.run_on_all("run directory"):
        if hosts.is_leader:
            path.mkdir(parents=True, exist_ok=True)
            if any(path.iterdir()):
                raise ConfigError(
                    f"run directory {path} is not empty; the samples and metrics of two runs would mix. Choose another "
                    "trainer.run_id (null makes one up), or remove the directory."
                )
    return path


def closing_summary(run_dir: Path, result: TrainResult, num_train_steps: int, saved: Path | None) -> str:
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
    if result.stopped_by is not None and saved is None:
        done += ", no checkpoint was saved"
    lines = ["", f"{done}: {result.completed_steps} of {num_train_steps} steps, last loss {result.loss:.4f}"]
    found = [
        ("samples", run_dir / "samples.jsonl"),
        *(("metrics", path) for path in sorted(run_dir.glob("metrics*.jsonl"))),
        *(("W&B run", path) for path in sorted(run_dir.glob("wandb/*run-*"))),
    ]
    if saved is not None:
        found.append(("checkpoint", saved))
    lines += [f"  {name:<11}{path}" for name, path in found if path.exists()]
    if result.tracker_errors:
        lines.append(f"  the tracker failed {result.tracker_errors} times; metrics are incomplete")
    lines += ["try next:", *(f"  {line}" for line in _next_steps(run_dir, saved))]
    return "\n".join(lines)


def _next_steps(run_dir: Path, saved: Path | None) -> list[str]:
    steps = []
    for path in sorted(run_dir.glob("wandb/offline-run-*")):
        steps.append(f"wandb sync {path}   # upload the run with its table of samples")
    if saved is not None:
        steps.append(f"lockstep train-lm --initialize_from_hf {saved} ...   # go on from the trained model")
    steps.append("--inference_eval.prompts '[\"your prompt\"]'   # ask something else while it trains")
    return steps
