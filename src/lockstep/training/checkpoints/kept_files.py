"""Files of a run directory of which the checkpoints have a copy: at a later start the machine may be another one."""

from collections.abc import Iterable
from pathlib import Path

from lockstep.training.checkpoints.checkpoint import CheckpointDirectory
from lockstep.urls import checkpoint_path


def keep_files(checkpoints: str, run_dir: Path, names: Iterable[str]) -> None:
    """Copy files of a run directory beside the checkpoints of the run, where they are new; one process calls it.

    Args:
        checkpoints: The directory or URL of the run's checkpoints.
        run_dir: The run directory.
        names: The names of the files; one that is not there is left out.

    Raises:
        OSError: A file cannot be written.
    """
    present = [name for name in names if (run_dir / name).exists()]
    if not present:
        return
    directory = CheckpointDirectory(checkpoints)
    for name in present:
        source, copy = run_dir / name, directory.path / name
        if copy.exists() and copy.read_bytes() == source.read_bytes():
            continue
        directory.path.mkdir(parents=True, exist_ok=True)
        directory.write_whole(copy, source.read_bytes())


def bring_files(checkpoints: str, run_dir: Path, names: Iterable[str]) -> None:
    """Copy what `keep_files` kept into a run directory that does not have it; one process calls it.

    Args:
        checkpoints: The directory or URL of the run's checkpoints.
        run_dir: The run directory.
        names: The names of the files; one that was not kept is left out.

    Raises:
        OSError: A file cannot be read or written.
    """
    for name in names:
        target, copy = run_dir / name, checkpoint_path(checkpoints) / name
        if not target.exists() and copy.exists():
            run_dir.mkdir(parents=True, exist_ok=True)
            draft = target.with_suffix(".tmp")
            draft.write_bytes(copy.read_bytes())
            draft.replace(target)
