"""Which checkpoint a run goes on from, and whether it may."""

import json
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal

from lockstep.errors import ConfigError
from lockstep.hosts import Hosts
from lockstep.json_text import from_peer
from lockstep.printable import get_logger
from lockstep.storage import call_storage
from lockstep.training.checkpoints.checkpoint import (
    CheckpointDirectory,
    CheckpointMetadata,
    DamagedCheckpointError,
    changes,
    is_there,
    read_file,
)

if TYPE_CHECKING:
    from etils import epath

log = get_logger(__name__)

SHARED_BY = "shared.json"  # the file by which the processes see that they have the same directory


class CheckpointSearch:
    """The search for the checkpoint that a run goes on from; the leader makes it."""

    def __init__(self, directory: CheckpointDirectory) -> None:
        self.directory = directory
        self.damaged: dict[int, str] = {}
        """The damage of checkpoints, by step. The leader's is complete."""
        self._removed: dict[int, threading.Event] = {}

    def find(self, hosts: Hosts, resume: Literal["auto", "must", "never"]) -> CheckpointMetadata | None:
        """See `Checkpointer.find`."""

        def on_time[Result](work: Callable[[], Result]) -> Result:
            wait_s = 0.8 * hosts.timeout_s  # who waits for storage says so before others give up waiting for it
            return call_storage(f"looking for checkpoints in {self.directory.path}", work, wait_s, try_s=wait_s)

        text = hosts.broadcast_from_leader("finding the checkpoint", lambda: on_time(lambda: self.run(resume)).encode())
        shared_by, metadata = from_peer(text, tuple[str, str | None], "the leader's checkpoint")
        with hosts.run_on_all("sharing the directory of checkpoints"):
            on_time(lambda: self.check_shared(shared_by))
        return None if metadata is None else CheckpointMetadata.from_json(metadata)

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
        self.directory.write_whole(self.directory.path / SHARED_BY, shared.encode())
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
        newest = None
        for step in (step for step in reversed(steps) if step not in self.damaged):
            try:
                newest = self.directory.metadata(step)
                break
            except DamagedCheckpointError as error:
                self.damaged[step] = str(error)
        passed = [step for step in reversed(steps) if step in self.damaged and (newest is None or step > newest.step)]
        if not passed:
            return newest
        damage = "\n  ".join(f"{self.directory.of(step)}: {self.damaged[step]}" for step in passed)
        if resume == "must" or newest is None:
            why = "there is no older one" if newest is None else "trainer.resume is must"
            older = "" if newest is None else f"use resume: auto to go on from step {newest.step}, "
            raise ConfigError(
                f"the newest checkpoint is damaged, and {why}:\n  {damage}\nBring the files back from a copy, {older}"
                "or choose another trainer.run_id for a new run."
            )
        log.warning(
            "the run goes on from step %d and not from a newer checkpoint, which is damaged and stays as it is:\n  %s",
            newest.step,
            damage,
        )
        return newest

    def check_shared(self, shared: str) -> None:
        """Find out whether this process sees the directory of the leader."""
        file = self.directory.path / SHARED_BY
        if not is_there(file) or read_file(file).decode(errors="replace") != shared:
            raise ConfigError(
                f"the directory of checkpoints {self.directory.path} is not the one that process 0 sees: each process "
                "writes its own part there. Set trainer.checkpointer.base_path to a gs:// URL or to a file system that "
                "all hosts share."
            )


def check_fits(
    directory: "epath.Path", metadata: CheckpointMetadata, facts: Mapping[str, str], shapes: Mapping[str, str]
) -> None:
    """Refuse a checkpoint of another run.

    Args:
        directory: Where it is.
        facts: The facts of this run.
        shapes: The type and shape of its arrays, by name.

    Raises:
        ConfigError: It differs; the message has the first differences.
    """
    wrong = [f"{line} (now)" for line in changes(metadata.facts, facts)]
    wrong += [f"array {line} (now)" for line in changes(metadata.shapes, shapes)]
    if wrong:
        more = f"\n  and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        raise ConfigError(
            f"this run cannot go on from {directory}; they differ in\n  "
            + "\n  ".join(wrong[:8])
            + f"{more}\nUse the values of the checkpoint, or another trainer.run_id for a new run."
        )
