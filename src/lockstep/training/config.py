"""How a run is set up, in Levanter's words."""

import dataclasses
from typing import Literal

from jax.sharding import Mesh

from lockstep.errors import ConfigError
from lockstep.hosts import DistributedConfig
from lockstep.placement import data_shards
from lockstep.report import JsonlTrackerConfig, TrackerConfig
from lockstep.training.checkpointer_config import CheckpointerConfig
from lockstep.training.precision import Precision, parse_precision


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """Settings of `Trainer`.

    Raises:
        ConfigError: A value is out of its range.
    """

    seed: int = 0
    """The seed of the initial parameters and of the order of the data."""
    num_train_steps: int = 1000
    """The number of optimizer steps of the whole run."""
    train_batch_size: int = 32
    """The number of rows of one optimizer step, over all devices."""
    per_device_parallelism: int = -1
    """The number of rows that a device works on at a time; a step then takes several microbatches. -1: all at once."""
    steps_per_eval: int | None = None
    """The number of steps between two validations on ``data.validation_urls``; null: after the last step alone."""
    per_device_eval_parallelism: int = -1
    """The number of validation rows that a device works on at a time; -1: as many as in training."""
    mp: str = "p=f32"
    """Float types, as in jmp: those of the parameters and of the arithmetic, e.g. ``p=f32,c=bf16``."""
    mesh_shape: str = "auto"
    """``auto`` (FSDP over all devices), ``host_local`` (data parallel over hosts), or sizes ``dp,fsdp,tp``."""
    tracker: TrackerConfig | tuple[TrackerConfig, ...] = dataclasses.field(default_factory=JsonlTrackerConfig)
    """Where metrics go: one tracker or a list of them (``type: wandb | jsonl | noop``)."""
    distributed: DistributedConfig = dataclasses.field(default_factory=DistributedConfig)
    """How the hosts find each other."""
    run_id: str | None = None
    """The name of the run and of its directory; null: the leader makes one from the time, and no later start can go on
    with the run."""
    checkpointer: CheckpointerConfig | None = None
    """Checkpoints from which a later start of the same command goes on, given a ``run_id``; null: none."""
    resume: Literal["auto", "must", "never"] = "auto"
    """Whether to go on from the newest checkpoint of this ``run_id``: where there is one, always (else it is an error),
    or never (then the run must be new)."""
    log_dir: str = "runs"
    """The parent of the run directory."""

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**32:
            raise ConfigError(f"trainer.seed is {self.seed}; it must be at least 0 and less than 2**32. Change it.")
        for name in ("num_train_steps", "train_batch_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"trainer.{name} is {getattr(self, name)}; it must be at least 1. Raise it.")
        if self.per_device_parallelism < 1 and self.per_device_parallelism != -1:
            raise ConfigError(
                f"trainer.per_device_parallelism is {self.per_device_parallelism}; it must be at least 1, or -1 for "
                "all rows of a device at once."
            )
        if self.per_device_eval_parallelism < 1 and self.per_device_eval_parallelism != -1:
            raise ConfigError(
                f"trainer.per_device_eval_parallelism is {self.per_device_eval_parallelism}; it must be at least 1, or "
                "-1 for as many rows as in training."
            )
        if self.steps_per_eval is not None and self.steps_per_eval < 1:
            raise ConfigError(
                f"trainer.steps_per_eval is {self.steps_per_eval}; it must be at least 1, or null for a validation "
                "after the last step alone."
            )
        if self.run_id is not None and (not self.run_id or set(self.run_id) & set("/\\") or self.run_id[0] == "."):
            raise ConfigError(
                f"trainer.run_id is {self.run_id!r}; it names a directory, so it must not be empty, hold a slash or "
                "start with a dot. Choose another, or null."
            )
        if self.resume == "must" and (self.checkpointer is None or self.run_id is None):
            missing = "trainer.checkpointer" if self.checkpointer is None else "trainer.run_id"
            raise ConfigError(
                f"trainer.resume is must, but {missing} is null, so there is no checkpoint to find. Set both "
                "trainer.checkpointer and the trainer.run_id of the run to go on with."
            )
        parse_precision(self.mp)

    @property
    def precision(self) -> Precision:
        """The float types that ``mp`` names."""
        return parse_precision(self.mp)

    def microbatches(self, mesh: Mesh) -> int:
        """The number of microbatches of one step on a mesh.

        Args:
            mesh: The mesh of the run.

        Returns:
            The number, which is 1 where ``per_device_parallelism`` is -1.

        Raises:
            ConfigError: The batch cannot be divided over the devices or over the microbatches.
        """
        shards = data_shards(mesh)
        if self.train_batch_size % shards:
            below, above = self.train_batch_size // shards * shards, -(-self.train_batch_size // shards) * shards
            raise ConfigError(
                f"trainer.train_batch_size is {self.train_batch_size}, but the mesh {dict(mesh.shape)} splits a batch "
                f"into {shards} equal parts. Use a multiple of {shards}, e.g. {below or above} or {above}, or another "
                "mesh_shape."
            )
        rows = self.train_batch_size // shards
        if self.per_device_parallelism == -1:
            return 1
        if rows % self.per_device_parallelism:
            divisors = [n for n in range(1, rows + 1) if rows % n == 0]
            raise ConfigError(
                f"trainer.per_device_parallelism is {self.per_device_parallelism}, which does not divide the {rows} "
                f"rows that each device has of a batch of {self.train_batch_size}. Use one of {divisors}, or -1."
            )
        return rows // self.per_device_parallelism

    def eval_batch_size(self, mesh: Mesh) -> int:
        """The number of validation rows that all devices work on at a time.

        Args:
            mesh: The mesh of the run.

        Raises:
            ConfigError: As for `microbatches`.
        """
        if self.per_device_eval_parallelism != -1:
            return data_shards(mesh) * self.per_device_eval_parallelism
        return self.train_batch_size // self.microbatches(mesh)
