"""The workload of a configuration: the programs that it asks of the devices, without data, weights or trackers."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import jax
import yaml
from jax.sharding import Mesh

from lockstep.batch_inference import Checkpoint, SampleConfig, resolve_checkpoint
from lockstep.engine import DraftSource, EarlierAnswers, EngineConfig
from lockstep.errors import ConfigError, PromptError
from lockstep.models import LlamaConfig, LoraConfig, load_config, read_vocab_size
from lockstep.placement import PP
from lockstep.plan.model_shape import Shape, shape_of
from lockstep.printable import without_credentials
from lockstep.report import EvaluationFields
from lockstep.text import encode, load_tokenizer, read_prompts
from lockstep.training import LossFn, OptimizerConfig, RolloutConfig, SavedModel, TrainConfig, TrainerConfig
from lockstep.training.objectives import routing_column
from lockstep.training.rl.conversations import longest_turns
from lockstep.training.rl.reward_models import ModelReward
from lockstep.training.run import TrainGrpoConfig
from lockstep.training.step.renewal import ReferenceRenewal
from lockstep.types import Request, SamplingParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class Infeasibility:
    """One reason why a configuration cannot run."""

    key: str  # the configuration key to change, with dots; `topology` for the slice itself
    value: Any  # the value of `key`, as given or as it follows from the defaults
    largest: Any  # the largest value of `key` that works; None: none does
    text: str
    place: str = ""  # the `file:line` of the key, or of where to add it


class InfeasibleError(Exception):
    """An `Infeasibility`, raised where it is found."""

    def __init__(self, infeasibility: Infeasibility) -> None:
        super().__init__(infeasibility.text)
        self.infeasibility = infeasibility


def with_common_largest(infeasibilities: Sequence[Infeasibility]) -> list[Infeasibility]:
    """The same reasons; those that name the same key get the largest value that works for all of them."""
    by_key: dict[str, list[Any]] = {}
    for infeasibility in infeasibilities:
        by_key.setdefault(infeasibility.key, []).append(infeasibility.largest)
    least = {key: None if None in largest else min(largest) for key, largest in by_key.items()}
    return [dataclasses.replace(infeasibility, largest=least[infeasibility.key]) for infeasibility in infeasibilities]


def place_of(path: Path | None, key: str, overrides: Sequence[str] = ()) -> str:
    """The place where a key is set.

    Args:
        overrides: The keys that were given on the command line, which win over the file.

    Returns:
        ``file:line`` of the key. Where the file does not have the key, that of the innermost block around it that the
        file has, and what to add there.
    """
    if key in overrides:
        return f"--{key} on the command line"
    if path is None:
        return f"--{key}"
    node = yaml.compose(path.read_text(encoding="utf-8"))
    line, missing = 1, key
    parts = key.split(".")
    for depth, part in enumerate(parts):
        entries = node.value if isinstance(node, yaml.MappingNode) else []
        entry = next(((name, value) for name, value in entries if name.value == part), None)
        if entry is None:
            missing = ".".join(parts[depth:])
            above = ".".join(parts[:depth])
            return f"{path}:{line} (add {missing}{f' to {above}' if above else ''})"
        line, node = entry[0].start_mark.line + 1, entry[1]
    return f"{path}:{line}"


def largest_in(text: str) -> int | None:
    """The bound of a number that a message has, ``Set it to at most 8192``; None where it has none."""
    match = re.search(r"to at most (\d[\d,]*)", text)
    return int(match[1].replace(",", "")) if match else None


def key_in(text: str, keys: Mapping[str, str]) -> str | None:
    """The first configuration key, with dots, that a message names; None where it names none."""
    matches = [(text.index(name), key) for name, key in keys.items() if name in text]
    return min(matches)[1] if matches else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingWorkload:
    """The train step that a configuration asks for."""

    trainer: TrainerConfig
    optimizer: OptimizerConfig
    loss: LossFn
    columns: Mapping[str, jax.ShapeDtypeStruct]  # the shape and the type of one row of each column of the batch
    row_key: str = "data.max_seq_len"  # the configuration key of the length of a row
    rows: str = "sequences"  # what a row is called in messages: pairs, sequences, answers
    sequences_per_row: int = 1  # number of sequences in a row: 2 for pairs
    reference: bool = False  # whether a frozen copy of the model, in the compute type, is on the devices too
    frozen: Sequence[Shape] = ()  # further models, in the compute type: a teacher, reward models
    renewal: ReferenceRenewal | None = None  # how the optimizer keeps it instead; None: it does not
    lora: LoraConfig | None = None  # the adapters, where they alone are trained

    packed: bool = False  # whether a run leaves out microbatches without tokens; they are planned as if there were none

    @property
    def length(self) -> int:
        return int(self.columns["tokens"].shape[-1])

    def microbatches(self, mesh: Mesh) -> int:
        return self.trainer.microbatches(mesh, packed_length=self.length if self.packed else None)

    def bubble(self, mesh: Mesh) -> float:
        """The share of a pipeline's steps in which a stage has no microbatch; 0 without stages."""
        stages = mesh.shape.get(PP, 1)
        return (stages - 1) / (self.trainer.pipeline_repeats * stages * self.microbatches(mesh) + stages - 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingWorkload:
    """A round of sampling that a configuration asks for."""

    name: str  # the block of the configuration that asks for it; empty where it is the whole configuration
    engine: EngineConfig
    engine_block: str  # the block that the engine's keys are in
    requests: Sequence[Request]  # prompts of the right lengths; their token ids mean nothing
    vocab_size: int | None = None  # number of token ids that may be sampled; None: all
    steps: int | None = None  # train steps that learn from a round; None: training does not wait for it
    turns: float = 1.0  # how often a round answers all requests: once for each turn of its conversations

    def key(self, name: str) -> str:
        """The key of a setting of this block, with dots, from the root of the configuration."""
        block = self.engine_block if name in {f.name for f in dataclasses.fields(EngineConfig)} else self.name
        return f"{block}.{name}" if block else name


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """Everything that a configuration asks of the devices, and thus what a plan compiles."""

    command: str
    model: LlamaConfig
    model_key: str
    vocab_size: int
    mesh_shape: str
    dtype: str  # the float type of the weights that are sampled from
    training: TrainingWorkload | None
    sampling: Sequence[SamplingWorkload]
    one_host: bool = False  # whether each host has a mesh of its own
    hosts: int | None = None  # number of processes that the configuration requires; None: any number
    notes: tuple[str, ...] = ()  # what was assumed, a sentence each
    infeasibilities: tuple[Infeasibility, ...] = ()  # known before compiling; all else has values that work

    def calibrated(self, path: str) -> "Workload":
        """The same with a file of measured numbers of the chip for every round of sampling."""
        sampling = [
            dataclasses.replace(round_, engine=dataclasses.replace(round_.engine, calibration=path))
            for round_ in self.sampling
        ]
        return dataclasses.replace(self, sampling=sampling)


CHAT_TOKENS: Final = 64  # the number of tokens that a chat template may add to a message
GSM8K_PROMPT: Final = 256  # tokens of a question with its chat template: the longest of GSM8K has about 240


def training_workload(name: str, config: TrainConfig, model: str | None = None) -> Workload:
    """The workload of the configuration of a training command."""
    notes: list[str] = []
    key = "initialize_from_hf" if config.initialize_from_hf else "model"
    shape = shape_of(model or config.initialize_from_hf, config.model, config.tokenizer, key, config.trust_remote_code)
    notes.append(f"model shape: {shape.source}")
    if config.gradient_checkpointing is not None:
        remat = dataclasses.replace(shape.config, gradient_checkpointing=config.gradient_checkpointing)
        shape = dataclasses.replace(shape, config=remat)
    config, infeasibilities = _rows_of(config, shape.config.max_seq_len)
    columns = config.columns(shape.config.max_seq_len)
    if config.rollouts is not None:
        length = config.data.row_length(shape.config.max_seq_len)
        columns |= routing_column(shape.config, length, replayed=config.rollouts.replay_routing)
    if config.data.length_buckets:
        notes.append("data.length_buckets: the train step is that of the longest rows, which needs the most memory")
    if config.hf_save_path is not None:
        notes.append(
            "hf_save_path: after SIGTERM the model is written there once the checkpoint is, which the seconds of the "
            "stop leave out; cut off, it leaves nothing, and the checkpoint is whole"
        )
    precision = config.trainer.precision
    lora = None if config.lora is None else config.lora.resolved(precision.compute.name)
    frozen = _frozen(config) if isinstance(config, TrainGrpoConfig) else []
    sampling: list[SamplingWorkload] = []
    if config.rollouts is not None:
        sampling.append(_rollouts(config, config.rollouts, shape, notes))
    if config.inference_eval.enabled:
        sampling.append(_samples(config, notes))
    return Workload(
        command=name,
        model=config.trainer.with_run_settings(shape.config),
        model_key=key,
        vocab_size=shape.vocab_size,
        mesh_shape=config.trainer.mesh_shape,
        dtype=precision.param.name if lora is None else str(lora.base_dtype),
        training=TrainingWorkload(
            trainer=config.trainer,
            optimizer=config.optimizer,
            loss=config.loss_fn,
            columns=columns,
            rows=config.row_name,
            sequences_per_row=config.sequences_per_row,
            # Without its adapters, the model is its own reference.
            reference=config.has_reference and lora is None and config.renewal is None,
            lora=lora,
            packed=config.rollouts is not None,
            renewal=config.renewal,
            frozen=frozen,
        ),
        sampling=sampling,
        hosts=config.trainer.distributed.require_process_count,
        notes=tuple(map(without_credentials, notes)),
        infeasibilities=infeasibilities,
    )


def _rows_of(config: TrainConfig, most: int) -> tuple[TrainConfig, tuple[Infeasibility, ...]]:
    """The configuration with rows that the model takes, and why not those that were asked for."""
    try:
        config.data.row_length(most)
    except ConfigError as error:
        asked = config.data.max_seq_len
        data = dataclasses.replace(config.data, max_seq_len=most)
        return dataclasses.replace(config, data=data), (
            Infeasibility(key="data.max_seq_len", value=asked, largest=most, text=str(error)),
        )
    return config, ()


def sampling_workload(name: str, config: SampleConfig, model: str | None = None) -> Workload:
    """The workload of the configuration of ``sample``."""
    notes: list[str] = []
    checkpoint = _trained(config) if model is None else None
    # A training run, in whose place another model is planned, has no tokenizer of that model.
    source = config.hf_checkpoint or model or config.source if checkpoint is None else checkpoint.tokenizer
    if isinstance(checkpoint, SavedModel):
        shape = Shape(config=checkpoint.config, vocab_size=checkpoint.rows, source=checkpoint.path)
        if checkpoint.adapters is not None:
            notes.append("the checkpoint has adapters alone; planned as the model that they make with their base")
    else:
        shape = shape_of(model or source, None, config.tokenizer or source, "hf_checkpoint", config.trust_remote_code)
    notes.append(f"model shape: {shape.source}")
    params = config.sampling_params(tuple(config.stop_token_ids or ()), 0)
    tokenizer = config.tokenizer or source
    lengths = _lengths("", config, tokenizer, config.trust_remote_code, config.engine.max_seq_len, params, notes)
    if config.max_prompts_per_batch is not None:
        lengths = sorted(lengths, reverse=True)[: config.max_prompts_per_batch]
    hosts = config.trainer.distributed.require_process_count
    one_host = config.inference_mode == "host_data_parallel"
    if one_host and hosts:
        lengths = sorted(lengths, reverse=True)[: -(-len(lengths) // hosts)]
        notes.append(f"a host answers {len(lengths)} prompts, its share of those of {hosts} hosts")
    stored = checkpoint.dtype if isinstance(checkpoint, SavedModel) else "bfloat16"
    dtype = config.engine.dtype or stored
    if config.engine.dtype is None and not isinstance(checkpoint, SavedModel):
        notes.append("the checkpoint is taken to be stored in bfloat16; engine.dtype says otherwise")
    return Workload(
        command=name,
        model=shape.config,
        model_key="hf_checkpoint" if config.hf_checkpoint else "checkpoint_path",
        vocab_size=shape.vocab_size,
        mesh_shape=config.trainer.mesh_shape,
        dtype=dtype,
        training=None,
        sampling=[
            SamplingWorkload(
                name="",
                engine=dataclasses.replace(config.engine, dtype=dtype),
                engine_block="engine",
                requests=_requests(lengths, params, config.drafts),
            )
        ],
        one_host=one_host,
        hosts=hosts,
        notes=tuple(map(without_credentials, notes)),
    )


def _trained(config: SampleConfig) -> Checkpoint | None:
    """The checkpoint of a training run, where it can be read from here; None: a name, or a Hugging Face checkpoint."""
    path = config.checkpoint_path
    if path is None or ("://" not in path and not Path(path).is_dir()):
        return None
    return resolve_checkpoint(config)


def _frozen(config: TrainGrpoConfig) -> list[Shape]:
    """The shapes of a run's teacher and reward models."""
    rewards = [reward.model for reward in config.rewards if isinstance(reward, ModelReward)]
    scorers = [
        Shape(config=load_config(path, scorer=True), vocab_size=read_vocab_size(path), source=path) for path in rewards
    ]
    return [*scorers, *([] if config.teacher is None else [shape_of(config.teacher, None, None, "teacher", None)])]


def _rollouts(config: TrainConfig, rollout: RolloutConfig, shape: Shape, notes: list[str]) -> SamplingWorkload:
    """The rollouts of one step: a group of completions of each prompt, or the longest turns of conversations."""
    length = config.data.row_length(shape.config.max_seq_len)
    prompt = min(length - rollout.max_new_tokens, GSM8K_PROMPT)
    count = config.rollout_answers // rollout.n_generations
    notes.append(f"rollout: {count} questions of {prompt} tokens, {rollout.n_generations} answers to each")
    notes.append("update: of rows without room for a second answer; a run packs shorter ones, and leaves rows out")
    routed = shape.config.experts is not None
    params = dataclasses.replace(rollout.sampling_params(()), routed_experts=routed)
    requests, turns = _requests([prompt] * count, params, rollout.drafts), 1.0
    if isinstance(config, TrainGrpoConfig) and (environment := config.environment) is not None:
        turns = min(environment.max_turns, (length - prompt) / rollout.max_new_tokens)
        requests = longest_turns(params, length, config.rollout_answers)
        notes.append(
            f"environment: {len(requests)} conversations of {turns:.3g} answers of {rollout.max_new_tokens} tokens "
            f"(environment.max_turns is {environment.max_turns}, data.max_seq_len leaves room for {length - prompt}); "
            "the tokens and the time of the environment are left out"
        )
    return SamplingWorkload(
        name="rollout",
        engine=rollout.engine_config(config.trainer.precision.compute.name, length),
        engine_block="rollout",
        requests=requests,
        steps=config.updates_per_rollout,
        turns=turns,
    )


def _samples(config: TrainConfig, notes: list[str]) -> SamplingWorkload:
    """A round of ``inference_eval``."""
    samples = config.inference_eval
    params = samples.sampling_params(tuple(samples.stop_token_ids or ()))
    lengths = _lengths(
        "inference_eval", samples, config.tokenizer, config.trust_remote_code, samples.max_seq_len, params, notes
    )
    return SamplingWorkload(
        name="inference_eval",
        engine=samples.engine_config(config.trainer.precision.compute.name),
        engine_block="inference_eval",
        # Where the prompts of a round are drawn, programs are compiled for the longest, as in the run.
        requests=_requests(sorted(lengths, reverse=True)[: samples.prompts_per_round], params, samples.drafts),
    )


def _lengths(
    block: str,
    asked: EvaluationFields,
    tokenizer: str,
    trusted: str | None,
    max_seq_len: int | None,
    params: SamplingParams,
    notes: list[str],
) -> list[int]:
    """The number of tokens of each prompt, exact where the tokenizer is a local directory, else an upper bound."""
    key, source = f"{block}.prompts" if block else "prompts", asked.prompts
    room = None if max_seq_len is None else max_seq_len - params.max_new_tokens
    try:
        prompts = read_prompts(source, asked.prompt_fields, asked.max_line_bytes)
    except PromptError as error:
        if not (isinstance(source, str) and "://" in source and room):
            raise
        notes.append(f"{key}: {source} cannot be read here; taken as 64 prompts of {room} tokens ({error})")
        return [room] * 64
    if Path(tokenizer).expanduser().is_dir():
        encoded = encode(
            load_tokenizer(tokenizer, trusted), prompts, max_seq_len=max_seq_len, max_new_tokens=params.max_new_tokens
        )
        return [len(tokens) for tokens in encoded]
    more = [1 if prompt.messages is None else CHAT_TOKENS * len(prompt.messages) for prompt in prompts]
    lengths = [len(prompt.shown.encode()) + added for prompt, added in zip(prompts, more, strict=True)]
    if room is not None:
        lengths = [min(length, max(room, 1)) for length in lengths]
    notes.append(
        f"{key}: tokenizer {tokenizer} is not a directory here; a prompt counts as its UTF-8 bytes (at most "
        f"{max(lengths)} tokens), which is more than it has"
    )
    return lengths


def _requests(lengths: Sequence[int], params: SamplingParams, source: DraftSource) -> list[Request]:
    drafts = EarlierAnswers(source).drafts(None)
    return [
        Request(prompt_id=i, prompt_tokens=(0,) * length, params=params, drafts=drafts)
        for i, length in enumerate(lengths)
    ]
