"""A checkpoint that is being written."""

import os
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lockstep.exits import give_work_up
from lockstep.training.checkpoints.checkpoint import CheckpointMetadata

if TYPE_CHECKING:
    from etils import epath


class Save:
    """A checkpoint that is being written.

    Args:
        arrays: The state, until `take_arrays`.
        directory: The directory of the checkpoint, for the log.
    """

    def __init__(self, metadata: CheckpointMetadata, arrays: Mapping[str, Any], directory: "epath.Path") -> None:
        self.metadata, self.step, self.directory = metadata, metadata.step, directory
        # `done`: whether it is a checkpoint is known; `ended`: old ones are removed, and nothing is left to do.
        self.copied, self.given_up, self.done, self.ended = (threading.Event() for _ in range(4))
        self.error = ""
        self.late = False  # whether a save after it was left out because of it; the same on every host
        self._arrays: Mapping[str, Any] = arrays
        self._began, self._clock = time.monotonic(), time.strftime("%H:%M:%S")

    def __str__(self) -> str:
        """Name it in a message."""
        return f"the checkpoint of step {self.step}, written since {self._clock} to {os.fspath(self.directory)}"

    @property
    def seconds(self) -> float:
        """The seconds since it began."""
        return time.monotonic() - self._began

    def give_up(self) -> None:
        """Have its thread end where it can, and the process end without it."""
        self.given_up.set()
        give_work_up(self.ended.is_set)

    def take_arrays(self) -> Mapping[str, Any]:
        """Return the arrays once, so that they live no longer than they are needed."""
        arrays, self._arrays = self._arrays, {}
        return arrays
