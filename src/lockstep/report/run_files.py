"""The files of a run that a reader of results looks at."""

import dataclasses
import os
from pathlib import Path
from typing import Final

from lockstep.errors import ConfigError

ROWS: Final = (
    "samples.jsonl",
    "samples/samples.jsonl",
    "samples/samples-host-*.jsonl",
    "samples-host-*.jsonl",
    "rollouts.jsonl",
)
"""Where the rows of a run are, below its directory: the first pattern that is there counts."""
METRICS: Final = "metrics*.jsonl"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunFiles:
    """What a run directory has for a reader.

    Args:
        name: The name of the run, as it is shown.
        directory: The directory of the run.
        rows: The files of rows; several where hosts write their own.
        metrics: The files of metrics.
    """

    name: str
    directory: Path
    rows: tuple[Path, ...]
    metrics: tuple[Path, ...]

    def stamp(self) -> tuple[tuple[str, int, int, int], ...]:
        """What changes when a file is written or replaced: name, inode, size and time of change of each."""
        found = []
        for path in (*self.rows, *self.metrics):
            try:
                stat = path.stat()
            except FileNotFoundError:  # being replaced
                continue
            found.append((str(path), stat.st_ino, stat.st_size, stat.st_mtime_ns))
        return tuple(found)


def find_run(given: str | os.PathLike[str]) -> RunFiles:
    """Find the files of a run, which need not have been written yet.

    Args:
        given: The directory of a run, or a file of rows. The metrics of a file's run are looked for beside it.

    Raises:
        ConfigError: There is no such file or directory, or it is behind a URL.
    """
    text = os.fspath(given)
    if "://" in text:
        raise ConfigError(f"{text} is a URL; only local files are read. Copy the run's files here first.")
    path = Path(text)
    if path.is_dir():
        return RunFiles(name=path.resolve().name, directory=path, rows=_rows(path), metrics=_metrics(path))
    if not path.exists():
        raise ConfigError(
            f"{text} does not exist. Name the directory of a run (trainer.log_dir/trainer.run_id, such as "
            f"runs/my-run) or a file of its rows.{_nearby(path.parent)}"
        )
    directory = path.resolve().parent
    name = directory.name if path.name in ROWS else f"{directory.name}/{path.stem}"
    return RunFiles(name=name, directory=path.parent, rows=(path,), metrics=_metrics(path.parent))


def require_rows(run: RunFiles) -> None:
    """Check that a run has rows.

    Args:
        run: The files of the run.

    Raises:
        ConfigError: It has none; the message names a run that has, where there is one close by.
    """
    if not run.rows:
        raise ConfigError(
            f"{run.directory} has no samples.jsonl and no rollouts.jsonl. A run writes them from its first round of "
            f"samples on (inference_eval.eval_every); name its directory or its file.{_nearby(run.directory)}"
        )


def _rows(directory: Path) -> tuple[Path, ...]:
    for pattern in ROWS:
        if found := sorted(directory.glob(pattern)):
            return tuple(found)
    return ()


def _metrics(directory: Path) -> tuple[Path, ...]:
    return tuple(sorted(directory.glob(METRICS)))


def _nearby(directory: Path) -> str:
    """The newest run below a directory, as a sentence, or nothing."""
    if not directory.is_dir():
        return ""
    runs = [each for each in directory.iterdir() if each.is_dir() and (_rows(each) or _metrics(each))]
    return f" Did you mean {max(runs, key=lambda each: each.stat().st_mtime)}?" if runs else ""
