"""Settings of ``lockstep sample``."""

import dataclasses
from typing import Any, Literal

from lockstep.config_fields import FilePath, check_fields
from lockstep.engine import EngineConfig, SamplingFields
from lockstep.errors import ConfigError, check_at_least, check_one_of, check_run_dir
from lockstep.hosts import DistributedConfig
from lockstep.report import EvaluationFields, JsonlTrackerConfig, TrackerConfig, check_metrics
from lockstep.text import read_prompts
from lockstep.training import CheckpointFields

InferenceMode = Literal["global_mesh", "host_data_parallel"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobConfig:
    """Devices, directory and trackers of the sampler, with the keys of a training run."""

    mesh_shape: str = "auto"
    """The mesh of a checkpoint: ``auto`` (over all devices), or sizes ``dp,fsdp,tp``. In mode host_data_parallel the
    devices are those of one host."""
    tracker: TrackerConfig | tuple[TrackerConfig, ...] = dataclasses.field(default_factory=JsonlTrackerConfig)
    """Trackers of metrics and table: one or a list (``type: wandb | tensorboard | jsonl | noop``)."""
    distributed: DistributedConfig = dataclasses.field(default_factory=DistributedConfig)
    """The job that the hosts join. ``timeout_s`` also bounds every device call."""
    run_id: str | None = None
    """The name of the run and of its directory; null: the leader makes one from the time. A run goes on where it was
    interrupted when it is started again with the same name."""
    log_dir: FilePath = "runs"
    """The parent of the run directory."""

    def __post_init__(self) -> None:
        check_fields(self, "trainer.")
        check_run_dir(self.log_dir, self.run_id)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleConfig(CheckpointFields, EvaluationFields, SamplingFields):
    """Settings of ``sample``: what to ask which checkpoint, on which devices, and where the answers go."""

    hf_checkpoint: FilePath | None = None
    """Hugging Face checkpoint: a directory or a URL."""
    chat_template_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Variables for the chat template of the tokenizer, such as ``{enable_thinking: false}``."""
    checkpoint_path: FilePath | None = None
    """Checkpoint of a training run of ours, one that it goes on from (``step-N``) or one in the Hugging Face format:
    its run directory, a directory of runs (the newest checkpoint counts), the directory or URL of the run's
    checkpoints, or the checkpoint itself."""
    trainer: JobConfig = dataclasses.field(default_factory=JobConfig)
    """Devices, hosts, trackers, directories."""
    engine: EngineConfig = dataclasses.field(default_factory=EngineConfig)
    """Capacities and layout. ``dtype`` is also the type in which the checkpoint is loaded; null: as it is stored."""
    inference_mode: InferenceMode = "global_mesh"
    """``global_mesh``: the model is sharded over the devices of all hosts, which work on the same prompts in lockstep.
    ``host_data_parallel``: every host has the whole model on its own devices and works on its own share of the
    prompts. The draws are the same, and the tokens up to a near-tie that rounding decides."""
    n_rounds: int = 1
    """The number of times that all prompts are answered; round r draws with seed + r."""
    max_prompts_per_batch: int | None = None
    """The number of prompts that are in the engine at a time, and that are written together, at most. Null: worked out
    from the lengths of the prompts and the memory."""
    max_new_tokens: int = 256
    host_data_parallel_output_dir: FilePath | None = None
    """The directory of every host's rows and of the merged file, shared between hosts or not; null: ``samples`` in the
    run directory. Where it is a URL, rows are written to ``samples`` too and every batch is uploaded when it is
    written. A run goes on where it was interrupted when it is started again with the same directory."""
    enable_host_rows_gather: bool = True
    """Gather all rows on the leader at the end: merged file, table. False: rows stay where their host wrote them."""
    write_parquet: bool = False
    """Write the merged rows as Parquet too; needs pyarrow (``pip install 'jax-lockstep[parquet]'``)."""
    keep_tokens: bool = False
    """Write the id and the log-probability of every token into the rows too, as ``token_ids`` and ``logprobs``. The
    last digits of log-probabilities depend on layout and hosts: the files of two jobs are then not the same bytes."""
    defer_tracker_logs_until_end: bool = True
    """Keep what the live view shows and give it to the tracker at the end; false: as the run goes on."""
    resume: Literal["auto", "force"] = "auto"
    """``auto``: go on with the rows in the output directory if they come from the same checkpoint and settings, else
    refuse and say what differs. ``force``: go on whatever differs."""

    def __post_init__(self) -> None:
        check_fields(self)
        fix = "Set hf_checkpoint to a Hugging Face checkpoint, or checkpoint_path to a training run of ours."
        check_one_of(self, "hf_checkpoint", "checkpoint_path", fix)
        if self.base_model is not None and self.hf_checkpoint is not None:
            raise ConfigError(f"base_model is {self.base_model!r}; hf_checkpoint has no adapters. Remove it.")
        check_at_least(self, 1, "n_rounds", fix=". Use 1 to ask every prompt once.")
        if not 0 <= self.seed <= 2**32 - self.n_rounds:
            raise ConfigError(
                f"seed is {self.seed} and n_rounds is {self.n_rounds}; every round draws with a seed of its own from "
                f"seed on, so seed must be 0 to {2**32 - self.n_rounds}. Choose another seed."
            )
        check_at_least(self, 1, "max_prompts_per_batch", fix=". Use null to let lockstep work it out.")
        if self.host_data_parallel_output_dir == "":
            raise ConfigError("host_data_parallel_output_dir is empty. Use a directory, a URL, or null.")
        if self.write_parquet and not self.enable_host_rows_gather:
            raise ConfigError(
                "write_parquet is true and enable_host_rows_gather is false: there is no merged file to write. Set "
                "enable_host_rows_gather to true, or write_parquet to false."
            )
        if self.drafts == "last_round":
            raise ConfigError(
                "drafts is last_round; the sampler keeps no earlier answers, so it would do nothing. Use ngram or "
                "auto, which guess from the prompt and the other answers to it, or none."
            )
        if not isinstance(self.prompts, str):
            read_prompts(self.prompts)
        self.check_sampling()
        check_metrics(self.metrics)

    @property
    def source(self) -> str:
        """The checkpoint of the weights, as given."""
        source = self.hf_checkpoint or self.checkpoint_path
        assert source is not None
        return source
