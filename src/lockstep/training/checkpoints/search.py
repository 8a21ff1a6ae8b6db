"""The newest whole checkpoint of a run, and files of its directory that are kept beside the checkpoints."""

import json
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from lockstep.credentials import get_logger
from lockstep.errors import ConfigError
from lockstep.training.checkpoints.checkpoint import CheckpointDirectory, CheckpointMetadata, DamagedCheckpointError
from lockstep.urls import checkpoint_path

log = get_logger(__name__)

SHARED_BY = "shared.json"  # the file by which the processes see that they have the same directory


class CheckpointSearch:
    """The search for the checkpoint that a run goes on from; the leader runs it."""

    def __init__(self, directory: CheckpointDirectory) -> None:
        self.directory = directory
        self.damaged: dict[int, str] = {}
        """The damage of checkpoints, by step. The leader's is complete."""
        self._removed: dict[int, threading.Event] = {}

    def run(self, resume: Literal["auto", "must", "never"]) -> str:
        """Return what the other processes need to know, as JSON: how to see that they share the directory, and the
        metadata of the newest checkpoint that is not known to be damaged, or null.

        Raises:
            ConfigError: There is none or one against ``resume``; all are damaged, or the newest is and ``resume`` is
                ``must``.
        """
        self.directory.path.mkdir(parents=True, exist_ok=True)
        self._remove_unfinished()
        shared = f"{time.time_ns()}"
        (self.directory.path / SHARED_BY).write_text(shared)
        steps = self.directory.steps()
        if steps and resume == "never":
            raise ConfigError(
                f"trainer.resume is never, but {self.directory.path} has a checkpoint of step {steps[-1]}: the "
                "checkpoints of two runs would mix. Choose another trainer.run_id, or go on with resume: auto."
            )
        if resume == "must" and not steps:
            raise ConfigError(
                f"trainer.resume is must, but there is no checkpoint in {self.directory.path}. Check trainer.run_id "
                "and trainer.checkpointer.base_path, or use resume: auto to start from the beginning."
            )
        metadata = self._newest(steps, resume)
        return json.dumps([shared, metadata and metadata.to_json()])

    def _remove_unfinished(self) -> None:
        """Remove what interrupted saves have left, in a thread: of a bucket that may take minutes."""
        left = {step: threading.Event() for step in self.directory.unfinished() if step not in self._removed}
        self._removed |= left

        def remove() -> None:
            for step, removed in left.items():
                self.directory.discard(step)
                removed.set()

        for step in left:
            log.warning("%s was not complete and is removed", self.directory.of(step))
        if left:
            threading.Thread(target=remove, name="lockstep-checkpoint-removal", daemon=True).start()

    def wait_removed(self, step: int, timeout_s: float) -> None:
        """Wait until nothing that an interrupted save has left of a step is being removed: a new one goes there."""
        if step in self._removed and not self._removed[step].wait(timeout_s):
            raise TimeoutError(
                f"what an interrupted save has left in {self.directory.of(step)} was not removed within {timeout_s:g} s"
            )

    def _newest(self, steps: list[int], resume: str) -> CheckpointMetadata | None:
        found = None
        for step in (step for step in reversed(steps) if step not in self.damaged):
            try:
                found = self.directory.metadata(step)
                break
            except DamagedCheckpointError as error:
                self.damaged[step] = str(error)
        passed = [step for step in reversed(steps) if step in self.damaged and (found is None or step > found.step)]
        if not passed:
            return found
        damage = "\n  ".join(f"{self.directory.of(step)}: {self.damaged[step]}" for step in passed)
        if resume == "must" or found is None:
            why = "there is no older one" if found is None else "trainer.resume is must"
            others = "" if found is None else f"use resume: auto to go on from step {found.step}, "
            raise ConfigError(
                f"the newest checkpoint is damaged, and {why}:\n  {damage}\nBring the files back from a copy, {others}"
                "or choose another trainer.run_id for a new run."
            )
        log.warning(
            "the run goes on from step %d and not from a newer checkpoint, which is damaged and stays as it is:\n  %s",
            found.step,
            damage,
        )
        return found

    def check_shared(self, shared: str) -> None:
        """Find out whether this process sees the directory of the leader."""
        file = self.directory.path / SHARED_BY
        if not file.exists() or file.read_text() != shared:
            raise ConfigError(
                f"the directory of checkpoints {self.directory.path} is not the one that process 0 sees: each process "
                "writes its own part there. Set trainer.checkpointer.base_path to a gs:// URL or to a file system that "
                "all hosts share."
            )


def keep_files(checkpoints: str, run_dir: Path, names: Iterable[str]) -> None:
    """Copy files of a run directory beside the checkpoints of the run, where they are new; one process calls it.

    Args:
        names: The names of the files; one that is not there is left out.
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
        names: The names of the files; one that was not kept is left out.
    """
    for name in names:
        target, copy = run_dir / name, checkpoint_path(checkpoints) / name
        if not target.exists() and copy.exists():
            run_dir.mkdir(parents=True, exist_ok=True)
            draft = target.with_suffix(".tmp")
            draft.write_bytes(copy.read_bytes())
            draft.replace(target)
