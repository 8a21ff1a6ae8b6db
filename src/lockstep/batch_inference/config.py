"""Settings of ``lockstep sample``."""

import dataclasses
from typing import Any, Literal

from lockstep.engine import EngineConfig
from lockstep.errors import ConfigError
from lockstep.hosts import DistributedConfig
from lockstep.report.metrics import load_metrics
from lockstep.report.trackers import JsonlTrackerConfig, TrackerConfig
from lockstep.text import read_prompts
from lockstep.types import SamplingParams

InferenceMode = Literal["global_mesh", "host_data_parallel"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobConfig:
    """Where the sampler runs and where its results go, in the words of a training run.

    Raises:
        ConfigError: a value out of its range.
    """

    mesh_shape: str = "auto"
    """How a checkpoint lies on the devices: ``auto`` (sharded over all of them), or sizes ``dp,fsdp,tp``. In mode
    host_data_parallel these are the devices of one host."""
    tracker: TrackerConfig | tuple[TrackerConfig, ...] = dataclasses.field(default_factory=JsonlTrackerConfig)
    """Where metrics and the table go: one tracker or a list of them (``type: wandb | jsonl | noop``)."""
    distributed: DistributedConfig = dataclasses.field(default_factory=DistributedConfig)
    """How the hosts find each other. ``timeout_s`` also bounds every device call."""
    run_id: str | None = None
    """Name of the run and of its directory; null: the leader makes one up from the time. A run goes on where it was
    interrupted when it is started again with the same name."""
    log_dir: str = "runs"
    """Parent of the run directory."""

    def __post_init__(self) -> None:
        if self.run_id is not None and (not self.run_id or set(self.run_id) & set("/\\") or self.run_id[0] == "."):
            raise ConfigError(
                f"trainer.run_id is {self.run_id!r}; it names a directory, so it must not be empty, hold a slash or "
                "start with a dot. Choose another, or null."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """Settings of ``sample``: what to ask which checkpoint, on which devices, and where the answers go.

    Raises:
        ConfigError: a value that cannot work; names the field, the value, the limit and the fix.
        PromptError: an inline list of prompts that is empty or holds an empty prompt.
    """

    hf_checkpoint: str | None = None
    """Hugging Face checkpoint: a directory or a URL."""
    checkpoint_path: str | None = None
    """Checkpoint of a training run of ours: its run directory, a directory of runs (the newest with a checkpoint
    counts), or the checkpoint itself."""
    tokenizer: str | None = None
    """Hugging Face tokenizer: a directory, a URL or a name; null: the one beside the checkpoint."""
    trainer: JobConfig = dataclasses.field(default_factory=JobConfig)
    """Devices, hosts, trackers, directories."""
    engine: EngineConfig = dataclasses.field(default_factory=EngineConfig)
    """Capacities and layout. ``dtype`` is also the type in which the checkpoint is loaded; null: as it is stored."""
    inference_mode: InferenceMode = "global_mesh"
    """``global_mesh``: the model is sharded over the devices of all hosts, which work on the same prompts in lockstep.
    ``host_data_parallel``: every host has the whole model on its own devices and works on its own share of the
    prompts. The tokens are the same."""
    prompts: list[dict[str, Any] | str] | str = dataclasses.field(default_factory=list)
    """A list of texts, ``{prompt, answer}`` or ``{messages, answer}``, or a .txt or .jsonl file (local or URL)."""
    prompt_field: str = "prompt"
    """Field of a .jsonl line that holds the prompt, a text."""
    messages_field: str = "messages"
    """Field of a .jsonl line that holds the messages of a chat, a list of ``{role, content}``."""
    answer_field: str = "answer"
    """Field of a .jsonl line that holds the reference answer."""
    n_rounds: int = 1
    """Times that all prompts are answered; round r draws with seed + r."""
    n_generations: int = 1
    """Answers per prompt and round."""
    max_prompts_per_batch: int | None = None
    """Prompts that are in the engine at a time, and that are written together, at most. Null: worked out from the
    lengths of the prompts and the memory."""
    max_new_tokens: int = 256
    """Tokens to sample per answer at most."""
    temperature: float = 0.0
    """0 is greedy."""
    top_k: int | None = None
    """Draw from the k most probable tokens; null: from all."""
    top_p: float = 1.0
    """Draw from the smallest set of most probable tokens that has this probability; 1: from all."""
    min_p: float = 0.0
    """Draw from the tokens at least this times as probable as the most probable one; 0: from all."""
    repetition_penalty: float = 1.0
    """Divides the positive logits of tokens seen before and multiplies the negative ones; 1: none."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of every token in the answer so far."""
    frequency_penalty: float = 0.0
    """Subtracted from the logit of a token once for each time it is in the answer so far."""
    min_tokens: int = 0
    """Tokens to sample before an answer may end with a stop token."""
    ignore_eos: bool = False
    """Stop tokens do not end an answer: every answer has ``max_new_tokens``."""
    stop_token_ids: list[int] | None = None
    """Tokens that end an answer; null: the tokenizer's end-of-sequence and end-of-turn tokens."""
    stop: list[str] = dataclasses.field(default_factory=list)
    """Texts that end an answer, also where they straddle tokens; what is shown ends before the text."""
    seed: int = 0
    """With round, prompt, generation and position, all that a random draw depends on."""
    metrics: list[str] = dataclasses.field(default_factory=list)
    """Numbers per answer, and their means: ``exact_match``, ``gsm8k``, ``regex=PATTERN``, ``length``, ``repetition``,
    ``perplexity``, or ``module:function`` of (row, prompt) -> float."""
    host_data_parallel_output_dir: str | None = None
    """Directory of every host's rows and of the merged file, shared between hosts or not; null: ``samples`` in the run
    directory. Of a URL, that directory is worked in, and every batch is uploaded when it is written. A run goes on
    where it was interrupted when it is started again with the same directory."""
    enable_host_rows_gather: bool = True
    """Gather all rows on the leader at the end: merged file, table. False: rows stay where their host wrote them."""
    write_parquet: bool = False
    """Write the merged rows as Parquet too; needs pyarrow (``pip install 'jax-lockstep[parquet]'``)."""
    skip_samples_table: bool = False
    """No table of rows in the tracker and none at the terminal."""
    defer_tracker_logs_until_end: bool = True
    """Keep what the live view shows and give it to the tracker at the end; false: as the run goes on."""
    resume: Literal["auto", "force"] = "auto"
    """``auto``: go on with the rows in the output directory if they come from the same checkpoint and settings, else
    refuse and say what differs. ``force``: go on whatever differs."""

    def __post_init__(self) -> None:
        if (self.hf_checkpoint is None) == (self.checkpoint_path is None):
            given = "neither is" if self.hf_checkpoint is None else "both are"
            raise ConfigError(
                f"exactly one of hf_checkpoint and checkpoint_path is needed, but {given} given. Set hf_checkpoint to "
                "a Hugging Face checkpoint, or checkpoint_path to a training run of ours."
            )
        for name, choices in (
            ("inference_mode", ("global_mesh", "host_data_parallel")),
            ("resume", ("auto", "force")),
        ):
            if getattr(self, name) not in choices:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be {' or '.join(choices)}.")
        if self.n_rounds < 1:
            raise ConfigError(f"n_rounds is {self.n_rounds}; it must be at least 1. Use 1 to ask every prompt once.")
        if not 0 <= self.seed <= 2**32 - self.n_rounds:
            raise ConfigError(
                f"seed is {self.seed} and n_rounds is {self.n_rounds}; every round draws with a seed of its own from "
                f"seed on, so seed must be 0 to {2**32 - self.n_rounds}. Choose another seed."
            )
        if self.max_prompts_per_batch is not None and self.max_prompts_per_batch < 1:
            raise ConfigError(
                f"max_prompts_per_batch is {self.max_prompts_per_batch}; it must be at least 1. Use null to let "
                "lockstep work it out."
            )
        if self.host_data_parallel_output_dir == "":
            raise ConfigError("host_data_parallel_output_dir is empty. Use a directory, a URL, or null.")
        given_stop: object = self.stop
        if isinstance(given_stop, str):
            raise ConfigError(f"stop is {given_stop!r}; it must be a list of strings. Use [{given_stop!r}].")
        if not isinstance(self.prompts, str):
            read_prompts(self.prompts)
        self._check_effect()
        self.sampling_params((), 0)
        load_metrics(self.metrics)

    def _check_effect(self) -> None:
        """Refuses what would do nothing: a configuration says what happens."""
        neutral: dict[str, Any] = {"top_k": None, "top_p": 1.0, "min_p": 0.0}
        for name, value in neutral.items():
            if self.temperature == 0 and getattr(self, name) != value:
                raise ConfigError(
                    f"{name} is {getattr(self, name)} and temperature is 0, which is greedy: {name} would do nothing. "
                    f"Set temperature to more than 0, or remove {name}."
                )
        if self.ignore_eos and self.min_tokens:
            raise ConfigError(
                f"min_tokens is {self.min_tokens} and ignore_eos is true: no stop token ends an answer, so min_tokens "
                "would do nothing. Remove one of the two."
            )
        if self.write_parquet and not self.enable_host_rows_gather:
            raise ConfigError(
                "write_parquet is true and enable_host_rows_gather is false: there is no merged file to write. Set "
                "enable_host_rows_gather to true, or write_parquet to false."
            )

    @property
    def source(self) -> str:
        """What the weights are read from, as given."""
        source = self.hf_checkpoint or self.checkpoint_path
        assert source is not None
        return source

    def sampling_params(self, stop_ids: tuple[int, ...], round_: int) -> SamplingParams:
        """How every prompt of a round is sampled.

        Args:
            stop_ids: of the tokenizer, used where ``stop_token_ids`` is null.
            round_: from 0.

        Raises:
            ConfigError: a value out of its range.
        """
        return SamplingParams(
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            stop_token_ids=stop_ids if self.stop_token_ids is None else tuple(self.stop_token_ids),
            stop=tuple(self.stop),
            seed=self.seed + round_,
            n_generations=self.n_generations,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            min_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
        )
