"""The configuration of a run, in Levanter's words."""

import dataclasses
from collections.abc import Callable
from typing import Final, Literal

import jax.numpy as jnp
from jax.sharding import Mesh

from lockstep.config_fields import FilePath, check_fields
from lockstep.errors import ConfigError, check_at_least, check_run_dir
from lockstep.hosts import DistributedConfig
from lockstep.models import LlamaConfig, Numerics
from lockstep.models.attention import AttentionBackend
from lockstep.placement import CP, data_shards, gather_tokens
from lockstep.report import JsonlTrackerConfig, TrackerConfig
from lockstep.training.checkpoints.config import CheckpointerConfig
from lockstep.training.loop.profiler import ProfilerConfig
from lockstep.training.loop.stopping import LossSpikeConfig
from lockstep.training.step.train_state import Precision, StepSettings, parse_precision

PACKED_PARTS: Final = 8
"""The most microbatches that packed rows are divided into where a device could compute all of its rows at once: with
more, less is computed for nothing, on average half of one, but each gathers the weights once more."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """Settings of `Trainer`.

    Raises:
        ConfigError: A value is out of its range.

    Example:
        >>> lockstep.training.TrainerConfig(num_train_steps=100, train_batch_size=64).mesh_shape
        'auto'
    """

    seed: int = 0
    """The seed of the initial parameters and of the order of the data."""
    num_train_steps: int = 1000
    """The number of optimizer steps of the whole run."""
    train_batch_size: int = 32
    """The number of rows of one optimizer step, over all devices."""
    per_device_parallelism: int | Literal["auto"] = -1
    """The number of rows that a device works on at a time; a step then takes several microbatches. -1: all at once;
    ``auto``: the most with which the compiled step fits. The log says how many: give that number to have a run bit for
    bit again where less memory is free. In ``train-grpo``, whose packed rows leave microbatches empty, both take an
    eighth of a device's rows at most, or as many as have work for the time in which weights are gathered."""
    memory_bytes_per_device: int | None = None
    """With ``per_device_parallelism: auto``, the bytes of a device that training may use; null: what is free."""
    steps_per_eval: int | None = None
    """The number of steps between two validations on ``data.validation_urls``; null: after the last step alone."""
    per_device_eval_parallelism: int = -1
    """The number of validation rows that a device works on at a time; -1: as many as in training, and 1
    with ``per_device_parallelism: auto``."""
    mp: str = "p=f32"
    """Float types, as in jmp: those of the parameters and of the arithmetic, e.g. ``p=f32,c=bf16``."""
    mesh_shape: str = "auto"
    """``auto`` (FSDP over all devices), ``host_local`` (data parallel over hosts), or sizes ``dp,fsdp,tp``: of each
    slice, where there are several, which are data parallel. Sizes by name, as ``pp=2,fsdp=-1``: ``pp`` stages, slices
    or parts of one, have some of the layers each, and ``pp`` times the microbatches of a step pass through (GPipe)."""
    pipeline_repeats: int = 1
    """The number of times that a microbatch passes through all stages: 1, or a multiple of ``pp`` that divides the
    layers of a stage. The bubble is smaller by as much; stages exchange layers once a step, and states more often."""
    dcn_reduce_dtype: Literal["float32", "bfloat16"] | None = None
    """The type in which several slices add up their gradients, once a step; null: that of the parameters."""
    attn_backend: AttentionBackend | None = None
    """The attention backend, as ``model.attn_backend``, for a run with ``initialize_from_hf``, which has no such
    block; null: as the model says."""
    numerics: Numerics | None = None
    """``exact`` or ``fast``, as ``model.numerics``, for a run with ``initialize_from_hf``; null: as the model says."""
    tracker: TrackerConfig | tuple[TrackerConfig, ...] = dataclasses.field(default_factory=JsonlTrackerConfig)
    """The destination of metrics: one tracker or a list of them (``type: wandb | tensorboard | jsonl | noop``)."""
    distributed: DistributedConfig = dataclasses.field(default_factory=DistributedConfig)
    """The job that the hosts join."""
    run_id: str | None = None
    """The name of the run and of its directory; null: the leader makes one from the time, and no later start can go on
    with the run."""
    checkpointer: CheckpointerConfig | None = None
    """Checkpoints from which a later start of the same command goes on, given a ``run_id``; null: none."""
    resume: Literal["auto", "must", "never"] = "auto"
    """Whether to go on from the newest checkpoint of this ``run_id``: where there is one, or from an older one where
    that is damaged; always (none, or a damaged one, is an error); or never (then the run must be new)."""
    on_nan: Literal["raise", "skip", "stop"] = "raise"
    """The reaction of all hosts to a step whose loss or gradient is not finite: raise; leave its update out and go on
    (the schedule then waits too); or leave it out and end the run in order, with a checkpoint where there is a
    ``checkpointer``."""
    loss_spike: LossSpikeConfig | None = None
    """When a loss is so large that ``on_nan`` acts on it too; null: never."""
    profiler: ProfilerConfig | None = None
    """A profiler trace of some steps, in ``profiler`` below the run directory, for TensorBoard; null: none."""
    log_dir: FilePath = "runs"
    """The parent of the run directory."""

    def __post_init__(self) -> None:
        check_fields(self, "trainer.")
        if not 0 <= self.seed < 2**32:
            raise ConfigError(f"trainer.seed is {self.seed}; it must be at least 0 and less than 2**32. Change it.")
        check_at_least(self, 1, "num_train_steps", "train_batch_size", "pipeline_repeats", block="trainer.")
        parallelism = self.per_device_parallelism
        if parallelism not in ("auto", -1) and int(parallelism) < 1:
            raise ConfigError(
                f"trainer.per_device_parallelism is {parallelism}; it must be at least 1, or -1 for all rows of a "
                "device at once, or auto."
            )
        if self.memory_bytes_per_device is not None and (parallelism != "auto" or self.memory_bytes_per_device < 1):
            raise ConfigError(
                f"trainer.memory_bytes_per_device is {self.memory_bytes_per_device}; it is for per_device_parallelism: "
                f"auto (now {parallelism}) and must be above 0. Remove it or correct it."
            )
        if self.per_device_eval_parallelism < 1 and self.per_device_eval_parallelism != -1:
            raise ConfigError(
                f"trainer.per_device_eval_parallelism is {self.per_device_eval_parallelism}; it must be at least 1, or "
                "-1 for as many rows as in training."
            )
        alone = ", or null for a validation after the last step alone."
        check_at_least(self, 1, "steps_per_eval", block="trainer.", fix=alone)
        check_run_dir(self.log_dir, self.run_id)
        if self.resume == "must" and (self.checkpointer is None or self.run_id is None):
            missing = "trainer.checkpointer" if self.checkpointer is None else "trainer.run_id"
            raise ConfigError(
                f"trainer.resume is must, but {missing} is null, so there is no checkpoint to find. Set both "
                "trainer.checkpointer and the trainer.run_id of the run to go on with."
            )
        parse_precision(self.mp)
        if self.profiler is not None:
            self.profiler.check(self.num_train_steps)

    @property
    def precision(self) -> Precision:
        """The float types that ``mp`` names."""
        return parse_precision(self.mp)

    @property
    def step_settings(self) -> StepSettings:
        """The settings that are part of the program of the train step."""
        return StepSettings(
            precision=self.precision,
            repeats=self.pipeline_repeats,
            skip_bad=self.on_nan != "raise",
            reduce_dtype=self.reduce_dtype,
        )

    @property
    def reduce_dtype(self) -> jnp.dtype | None:
        """The type that ``dcn_reduce_dtype`` names."""
        return None if self.dcn_reduce_dtype is None else jnp.dtype(self.dcn_reduce_dtype)

    def with_run_settings(self, model: LlamaConfig) -> LlamaConfig:
        """The model's configuration with the attention and the numerics of this run.

        Args:
            model: The configuration of the model block, or of a checkpoint.

        Raises:
            ConfigError: The two name different attention.
        """
        if self.numerics is not None:
            model = dataclasses.replace(model, numerics=self.numerics)
        if self.attn_backend is None:
            return model
        if model.attn_backend not in ("default", self.attn_backend):
            raise ConfigError(
                f"trainer.attn_backend is {self.attn_backend} and model.attn_backend is {model.attn_backend}; only one "
                "can be used. Remove one of them."
            )
        return dataclasses.replace(model, attn_backend=self.attn_backend)

    def step_bytes(self, measure: Callable[[], int]) -> int:
        """The bytes of a device that the train step may use, parameters and optimizer state among them.

        Args:
            measure: Finds them where no ``memory_bytes_per_device`` says how many.
        """
        return measure() if self.memory_bytes_per_device is None else self.memory_bytes_per_device

    def microbatches(self, mesh: Mesh, *, packed_length: int | None = None) -> int:
        """The number of microbatches of one step on a mesh.

        Args:
            packed_length: The tokens of a row, where a batch may end in microbatches without tokens, which are left out
                (`PackedBatches`); else None.

        Returns:
            The number. Where ``per_device_parallelism`` is -1 or not yet known (``auto``) it is 1, or of packed rows at
            most `PACKED_PARTS`, each with tokens enough that its products take as long as a gather of the weights.

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
        if self.per_device_parallelism in ("auto", -1):
            if packed_length is None:
                return 1
            tokens = rows * packed_length // mesh.shape.get(CP, 1)
            least = gather_tokens(mesh, self.precision.compute.itemsize)
            parts = range(PACKED_PARTS, 1, -1)
            return next((number for number in parts if rows % number == 0 and tokens >= number * least), 1)
        assert isinstance(self.per_device_parallelism, int)
        if rows % self.per_device_parallelism:
            divisors = [n for n in range(1, rows + 1) if rows % n == 0]
            raise ConfigError(
                f"trainer.per_device_parallelism is {self.per_device_parallelism}, which does not divide the {rows} "
                f"rows that each device has of a batch of {self.train_batch_size}. Use one of {divisors}, or -1."
            )
        return rows // self.per_device_parallelism

    def eval_batch_size(self, mesh: Mesh) -> int:
        """The number of validation rows that all devices work on at a time."""
        if self.per_device_eval_parallelism != -1:
            return data_shards(mesh) * self.per_device_eval_parallelism
        if self.per_device_parallelism == "auto":
            return data_shards(mesh)
        return self.train_batch_size // self.microbatches(mesh)
