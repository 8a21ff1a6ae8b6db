"""Checkpoints in a configuration: their directory, when one is made, and which of them stay."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from lockstep.config_fields import FilePath, check_fields
from lockstep.errors import ConfigError, check_at_least
from lockstep.files import write_file
from lockstep.json_text import parse_json
from lockstep.limits import read_small
from lockstep.printable import without_credentials

RESUMABLE = "resumable.json"
"""The file of a run directory that a later start may go on in; it says where the checkpoints are, without credentials.
"""
HF_DTYPES: Final = ("float32", "bfloat16")  # the float types in which a Hugging Face checkpoint can be saved


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointFields:
    """The keys of commands that read a checkpoint, beside its place."""

    tokenizer: FilePath | None = None
    """Hugging Face tokenizer: a directory, a URL or a name; null: that of the checkpoint or its run."""
    trust_remote_code: FilePath | None = None
    """The ``tokenizer`` again, where Python code that it brings may be run; null: none is."""
    base_model: FilePath | None = None
    """The directory or URL of the base model of a checkpoint of adapters, or the configuration file of the run
    in YAML, whose ``initialize_from_hf`` it is; null: the one that its run had, which must be beside the
    checkpoints."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeepConfig:
    """Which checkpoints stay when a newer one is complete."""

    newest: int = 2
    """The number of newest checkpoints that stay."""
    every: int | None = None
    """Checkpoints whose step is a multiple of this stay for good; null: none."""

    def __post_init__(self) -> None:
        check_fields(self, "checkpointer.keep.")
        check_at_least(self, 1, "newest", "every", block="checkpointer.keep.")

    @staticmethod
    def from_list(values: list[Any]) -> dict[str, Any]:
        """The keys that a list in Levanter's form means: ``[{every: 1000}]``, checkpoints that stay for good.

        Raises:
            ConfigError: It means something that there are no keys for.
        """
        first = values[0] if len(values) == 1 else None
        if isinstance(first, Mapping) and first.keys() <= {"every", "until"} and first.get("until") is None:
            return {"every": first.get("every")}
        raise ConfigError(
            f"checkpointer.keep is the list {values!r:.200}. Of Levanter's lists only one entry with every means the "
            "same here, as [{every: 1000}]: steps cannot stay until a step. Write keep: {newest: 2, every: 1000}."
        )

    def removed(self, steps: list[int]) -> list[int]:
        """Return which checkpoints go."""
        older = steps[: -self.newest]
        return [step for step in older if self.every is None or step % self.every]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointerConfig:
    """Settings of the checkpoints of a run."""

    base_path: FilePath = "checkpoints"
    """A directory that all hosts share, or a ``gs://`` URL. A relative path is below the run directory; to an absolute
    one and to a URL the ``run_id`` is appended."""
    every: int | None = 1000
    """The number of steps between two checkpoints; null: by time alone. There is always one after the last step."""
    every_minutes: float | None = None
    """The minutes between two checkpoints, by the leader's clock; null: by steps alone. With both, whichever comes
    first."""
    keep: KeepConfig = dataclasses.field(default_factory=KeepConfig)
    """Which checkpoints stay."""
    save_on_preemption: bool = True
    """Save after the step at which SIGTERM ends the run."""
    grace_s: float = 30.0
    """Seconds that SIGTERM leaves before the machine is gone, 30 for spot VMs: a save that takes longer is announced in
    the log, and ``lockstep plan`` says whether it fits."""
    timeout_s: float = 1800.0
    """Seconds after which a save that is not complete is given up; training goes on."""

    def __post_init__(self) -> None:
        check_fields(self, "checkpointer.")
        if self.every is None and self.every_minutes is None:
            raise ConfigError(
                "checkpointer.every and checkpointer.every_minutes are both null, so nothing would be saved before the "
                "last step. Set one of them."
            )
        check_at_least(self, 1, "every", block="checkpointer.")
        check_at_least(self, 0, "every_minutes", "grace_s", "timeout_s", block="checkpointer.", above=True)
        if self.keep.every is not None and self.every is None:
            raise ConfigError(
                f"checkpointer.keep.every is {self.keep.every}, but checkpointer.every is null: checkpoints by time "
                f"have any step. Set every to a divisor of {self.keep.every}."
            )
        if self.keep.every is not None and self.every is not None and self.keep.every % self.every:
            raise ConfigError(
                f"checkpointer.keep.every is {self.keep.every}, but there is a checkpoint every {self.every} steps "
                f"only. Set it to a multiple of {self.every}."
            )

    @property
    def in_bucket(self) -> bool:
        """Whether ``base_path`` is a URL."""
        return "://" in self.base_path

    def path(self, run_dir: Path, run_id: str) -> str:
        """Return where the checkpoints of a run are."""
        if self.in_bucket:
            return f"{self.base_path.rstrip('/')}/{run_id}"
        base = Path(self.base_path)
        return str(base / run_id if base.is_absolute() else run_dir / base)


def write_resumable(run_dir: Path, base_path: str) -> None:
    """Write where the checkpoints of a run are, without credentials."""
    write_file(run_dir / RESUMABLE, json.dumps({"base_path": without_credentials(base_path)}))


def resumable_base(run_dir: Path) -> str | None:
    """Return what `write_resumable` has written; None where it has not."""
    file = run_dir / RESUMABLE
    if not file.is_file():
        return None
    fix = "Give the directory of the checkpoints itself, or choose another trainer.run_id."
    base_path = parse_json(read_small(file), str(file), dict, fix).get("base_path")
    if not isinstance(base_path, str) or not base_path or "\0" in base_path or ".." in base_path.split("/"):
        raise ConfigError(f"{file} has base_path {base_path!r}, which is no directory of checkpoints. {fix}")
    return base_path
