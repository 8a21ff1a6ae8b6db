"""What the training commands share: from a command line to a trained model, the same steps on every host."""

import dataclasses
import functools
import logging
import re
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import draccus
import haliax as hax
import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import PyTree

from lockstep.callback import InferenceEvalConfig, SampleCallback
from lockstep.credentials import get_logger, hide_credentials
from lockstep.errors import ConfigError
from lockstep.hosts import Hosts, config_digest, leader_only, start, try_leader_only
from lockstep.main.adapters import describe_adapters, load_frozen
from lockstep.main.arguments import parse_arguments
from lockstep.main.hf_saves import HF_DTYPES, HfSaves
from lockstep.main.run_dir import closing_summary, make_run_dir, rewind
from lockstep.main.run_tracker import start_tracker
from lockstep.main.setup import Data, LoadsData, Setup
from lockstep.models import (
    LlamaConfig,
    LlamaLMHeadModel,
    LoraConfig,
    LoraModel,
    ModelConfig,
    config_to_hf,
    join_trained,
    load_config,
    load_hf,
    padded_vocab_size,
    read_hf_config,
    split_trained,
)
from lockstep.placement import PARAMETER_AXES, make_mesh
from lockstep.report import FINISH_S, BackgroundTracker, NoopTracker, Tracker, check_trackers, load_metrics
from lockstep.text import check_vocab, load_tokenizer, token_count, tokenizer_digest
from lockstep.training import (
    Batches,
    BatchSource,
    CachedRows,
    LossFn,
    OptimizerConfig,
    StopRequest,
    Trainer,
    TrainerConfig,
    TrainState,
    Validation,
    model_spec,
    save_tokenizer,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = get_logger(__name__)

type MakeObjective = Callable[[PreTrainedTokenizerBase], LossFn]
"""Makes the objective of a run, once its tokenizer is known."""

LAST_FLUSH_S = 2.0
"""Seconds that reports of rounds still have when everything else is done; at the end of training they had more."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Settings that all training commands have.

    Raises:
        ConfigError: Not exactly one of ``model`` and ``initialize_from_hf`` is given, or a value of ``hf_save_…``
            cannot work or would have no effect.
    """

    trainer: TrainerConfig = dataclasses.field(default_factory=TrainerConfig)
    """The training loop."""
    model: ModelConfig | None = None
    """The shape of a model from scratch; null with ``initialize_from_hf``."""
    initialize_from_hf: str | None = None
    """The Hugging Face checkpoint to start from, a directory or a URL; null: a model from scratch."""
    gradient_checkpointing: Literal["nothing", "full", "dots", "offload"] | None = None
    """With ``initialize_from_hf``, what ``model.gradient_checkpointing`` is for a model from scratch; null: full."""
    lora: LoraConfig | None = None
    """Low-rank adapters on the model of ``initialize_from_hf``, which alone are trained; null: all of it is."""
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    """The optimizer and its schedule."""
    tokenizer: str
    """The Hugging Face tokenizer: a directory or a name."""
    trust_remote_code: str | None = None
    """The ``tokenizer`` again, where Python code that it brings may be run; null: none is."""
    inference_eval: InferenceEvalConfig = dataclasses.field(default_factory=lambda: InferenceEvalConfig(enabled=False))
    """The samples while training; without this block there are none."""
    hf_save_path: str | None = None
    """Where to save the trained model as a Hugging Face checkpoint: a directory, where a relative path is below the run
    directory, or a URL; null: nowhere."""
    hf_save_steps: int | None = None
    """The number of steps between two Hugging Face checkpoints while training, at ``<hf_save_path>-step-N``; null: none
    before the last step."""
    hf_save_dtype: str | None = None
    """The float type of Hugging Face checkpoints, ``float32`` or ``bfloat16``; null: that of the parameters."""

    def __post_init__(self) -> None:
        if (self.model is None) == (self.initialize_from_hf is None):
            given = "neither is" if self.model is None else "both are"
            raise ConfigError(
                f"exactly one of model and initialize_from_hf is needed, but {given} given. Set model to train from "
                "scratch, or initialize_from_hf to go on from a checkpoint."
            )
        if self.gradient_checkpointing is not None and self.model is not None:
            raise ConfigError(
                f"gradient_checkpointing is {self.gradient_checkpointing}, but the model is from scratch: set "
                "model.gradient_checkpointing instead."
            )
        if self.lora is not None and self.model is not None:
            raise ConfigError(
                "lora is given, but the model is from scratch: its random weights would stay as they are. Set "
                "initialize_from_hf instead of model, or leave lora out."
            )
        if self.hf_save_steps is not None and self.hf_save_steps < 1:
            raise ConfigError(f"hf_save_steps is {self.hf_save_steps}; it must be at least 1. Raise it, or set null.")
        if self.hf_save_dtype not in (None, *HF_DTYPES):
            raise ConfigError(f"hf_save_dtype is {self.hf_save_dtype!r}; it must be {' or '.join(HF_DTYPES)}, or null.")
        for name in ("hf_save_steps", "hf_save_dtype"):
            if self.hf_save_path is None and getattr(self, name) is not None:
                raise ConfigError(f"{name} is set and hf_save_path is null, so it has no effect. Set hf_save_path.")

    def facts(self) -> dict[str, str]:
        """Return what the hosts, and a checkpoint to go on from, must have in common, beyond tokenizer and data."""
        return {}


def run_command[Config: RunConfig, Loaded: Data](
    cls: type[Config],
    arguments: Sequence[str],
    parts: Callable[
        [Config], tuple[LoadsData[Loaded], MakeObjective, Callable[[Setup[Loaded]], Batches | BatchSource]]
    ],
) -> int:
    """Run a training command.

    Args:
        cls: The class of its configuration.
        arguments: The arguments of its command line.
        parts: A function that takes data, and what makes the objective and batches, from the configuration.

    Returns:
        The exit code: 0, 128 + signal for a run that a signal ended, 1 for one that ``on_nan`` ended.

    Raises:
        ConfigError: The configuration cannot work.
        PeerError: A host failed where all must go on together.
        HostError: The hosts lost each other.
    """
    config = parse_arguments(cls, [re.sub(r"^--resume(?==|$)", "--trainer.resume", each) for each in arguments])
    data, make_objective, make_batches = parts(config)
    hosts = start(config.trainer.distributed)
    logging.basicConfig(level=logging.INFO if hosts.is_leader else logging.WARNING, format="%(name)s: %(message)s")
    logging.getLogger("absl").setLevel(logging.WARNING)  # orbax says a dozen things about every save
    return train(config, data, make_objective, make_batches, hosts)


def rows_as_batches(setup: Setup[CachedRows]) -> Batches:
    """Return the batches of a command whose rows are read from files: the rows themselves.

    Args:
        setup: What is there before the first step.
    """
    return setup.data


def train[Loaded: Data](
    config: RunConfig,
    data: LoadsData[Loaded],
    make_objective: MakeObjective,
    make_batches: Callable[[Setup[Loaded]], Batches | BatchSource],
    hosts: Hosts,
) -> int:
    """Train; every host does the same: prepare, agree, train with samples, save, sum up.

    Args:
        config: The configuration of the run.
        data: The data to train on.
        make_objective: Makes the objective to minimise.
        make_batches: Makes the batches of what was loaded; launches programs only through the trainer.
        hosts: The processes of the job.

    Returns:
        The exit code, see `run_command`.

    Raises:
        PeerError: Preparing or saving failed on a host.
        DisagreementError: The hosts have different configurations or data.
        ConfigError: The model does not fit the mesh.
    """
    hosts.agree("config", {"config": config_digest(config)})
    with hosts.run_on_all("reading tokenizer") as prepared:
        if hosts.is_leader:
            check_trackers(config.trainer.tracker)
        _check_validation(config.trainer, data)
        mesh = make_mesh(config.trainer.mesh_shape)
        config.trainer.microbatches(mesh)
        tokenizer = load_tokenizer(config.tokenizer, config.trust_remote_code)
        model_config, token_ids = _model_shape(config, tokenizer)
        check_vocab(tokenizer, token_ids)
        vocab_size = token_ids
        if config.initialize_from_hf is None:
            vocab_size = padded_vocab_size(token_ids, mesh.shape["tp"])
        load_metrics(config.inference_eval.metrics if config.inference_eval.enabled else ())
        objective = make_objective(tokenizer)
        facts = {"tokenizer": tokenizer_digest(tokenizer), **config.facts()}
        adapters = describe_adapters(config, model_config)
        if adapters is not None:
            facts |= {"base model": adapters.fingerprint, "lora.alpha / lora.r": str(adapters.lora.scale)}
        prepared.agree(facts)
    rows = data.load(tokenizer, model_config.max_seq_len, config.trainer.seed, hosts)
    validation = data.load_validation(tokenizer, model_config.max_seq_len, hosts)
    facts["training data"] = rows.digest()
    hosts.agree("training data", facts)
    run_dir = make_run_dir(config.trainer, hosts)
    tracker: Tracker = NoopTracker()
    with hosts.run_on_all("tracker"):
        if hosts.is_leader:
            built = start_tracker(config.trainer, run_dir, draccus.encode(config))
            # The others wait for the leader at their end, at most timeout_s.
            tracker = BackgroundTracker(built, leader_only, finish_s=min(FINISH_S, hosts.timeout_s / 2))
    samples: SampleCallback | None = None
    try:
        schedule = config.optimizer.schedule(config.trainer.num_train_steps)
        optimizer = config.optimizer.build(config.trainer.num_train_steps)
        trainer = Trainer(
            config.trainer,
            optimizer,
            objective,
            hosts,
            mesh=mesh,
            tracker=tracker,
            schedule=schedule,
            run_dir=run_dir,
            facts=facts,
            run_config=hide_credentials(draccus.encode(config)),
            model_spec=model_spec(model_config, token_ids, adapters),
        )
        with hosts.run_on_all("tokenizer beside the checkpoints"):
            if hosts.is_leader and trainer.checkpoints is not None:
                save_tokenizer(trainer.checkpoints, tokenizer)
        frozen: LoraModel | None = None
        init: Callable[[jax.Array], PyTree] = functools.partial(_init_model, model_config, vocab_size)
        if adapters is not None:
            init = functools.partial(adapters.lora.init, model_config)
            frozen = load_frozen(adapters, model_config, trainer.mesh, hosts)
        state = _restore(init, frozen, trainer, run_dir, hosts)
        hosts.phase("making the model")
        model = _make_model(config, model_config, init, frozen, trainer, hosts) if state is None else state.model
        if config.inference_eval.enabled:
            samples = SampleCallback(
                config.inference_eval,
                tokenizer,
                tracker=tracker,
                output_dir=run_dir,
                hosts=hosts,
                dtype=config.trainer.precision.compute.name,
            )
            samples.check(model)
            trainer.add_hook(samples)
        saves = HfSaves(config, run_dir, tokenizer, token_ids, hosts)
        if config.hf_save_steps is not None:
            trainer.add_hook(saves, every=config.hf_save_steps)
        if validation:
            every = config.trainer.steps_per_eval or config.trainer.num_train_steps
            trainer.add_hook(Validation(trainer, objective, validation, perplexity=data.CROSS_ENTROPY), every)
        setup = Setup(
            data=rows,
            tokenizer=tokenizer,
            model=model,
            model_max_seq_len=model_config.max_seq_len,
            initial_model=lambda: _make_model(config, model_config, init, frozen, trainer, hosts),
            trainer=trainer,
            tracker=tracker,
            run_dir=run_dir,
        )
        batches = make_batches(setup)
        del setup
        if hosts.is_leader:
            log.info("%s", _announce(config, model, rows, mesh, run_dir))
        hosts.phase("training")
        result = trainer.train(model if state is None else state, batches)
        del model, state
        saved = None
        with StopRequest(hosts.preemption):  # a signal from now on must not leave half a checkpoint
            # A machine that is taken away (SIGTERM) leaves what it has; Ctrl-C ends at once.
            if result.stopped_by in (None, signal.SIGTERM) and config.hf_save_path is not None:
                hosts.phase("saving")
                complete = result.stopped_by is None and not result.diverged
                saved = saves.save_last(result.eval_model, None if complete else result.completed_steps)
    finally:
        if hosts.is_leader:
            if samples is not None:  # where an error ended training, the rounds before it are reported too
                samples.flush(min(LAST_FLUSH_S, hosts.timeout_s / 4))
            try_leader_only("closing the tracker", tracker.finish, "what it had written is kept")
    if hosts.is_leader:
        print(closing_summary(run_dir, result, config.trainer.num_train_steps, saved), flush=True)
    if result.stopped_by is not None:
        return 128 + result.stopped_by
    return 1 if result.diverged else 0


def _model_shape(config: RunConfig, tokenizer: "PreTrainedTokenizerBase") -> tuple[LlamaConfig, int]:
    """Configuration and number of token ids, before any weight is made or read."""
    if config.initialize_from_hf is not None:
        shape = config.trainer.with_attention(load_config(config.initialize_from_hf))
        if config.gradient_checkpointing is not None:
            shape = dataclasses.replace(shape, gradient_checkpointing=config.gradient_checkpointing)
        return shape, int(read_hf_config(config.initialize_from_hf)["vocab_size"])
    assert isinstance(config.model, LlamaConfig)
    token_ids = token_count(tokenizer)
    if config.hf_save_path is not None:
        config_to_hf(config.model, token_ids)  # refuses now what could not be saved after the last step
    return config.trainer.with_attention(config.model), token_ids


def _init_model(config: LlamaConfig, vocab_size: int, key: jax.Array) -> LlamaLMHeadModel:
    return LlamaLMHeadModel.init(hax.Axis("vocab", vocab_size), config, key=key)


def _restore(
    init: Callable[[jax.Array], PyTree], frozen: PyTree, trainer: Trainer, run_dir: Path, hosts: Hosts
) -> TrainState | None:
    """The state to go on from, with the files of the run as they were then; None: the run begins."""
    state = trainer.restore(init, frozen)
    came_from = trainer.resumed_from
    with hosts.run_on_all("files of the run"):
        if hosts.is_leader:
            step = -1 if came_from is None else came_from.step
            redone = came_from is not None and not came_from.hooks_called
            rewind(run_dir, metrics_step=step, samples_step=step - 1 if redone else step)
            if trainer.config.checkpointer is not None and trainer.config.run_id is None:
                log.warning(
                    "trainer.run_id is null: a later start finds the checkpoints of this run only with "
                    "--trainer.run_id %s",
                    run_dir.name,
                )
    return state


def _make_model(
    config: RunConfig,
    model_config: LlamaConfig,
    init: Callable[[jax.Array], PyTree],
    frozen: PyTree,
    trainer: Trainer,
    hosts: Hosts,
) -> PyTree:
    if config.initialize_from_hf is None or frozen is not None:
        return join_trained(trainer.init_model(init), frozen)
    dtype = config.trainer.precision.param
    return load_hf(config.initialize_from_hf, trainer.mesh, PARAMETER_AXES, dtype, config=model_config, hosts=hosts)


def _announce(config: RunConfig, model: PyTree, rows: Data, mesh: Mesh, run_dir: Path) -> str:
    n_parameters, n_trained = (
        sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(tree)) for tree in (model, split_trained(model)[0])
    )
    trained = "" if n_trained == n_parameters else f", of which {n_trained:,} are trained,"
    shape = ", ".join(f"{name} {size}" for name, size in mesh.shape.items())
    return (
        f"{n_parameters:,} parameters{trained} on mesh ({shape}); {len(rows):,} rows, batch "
        f"{config.trainer.train_batch_size}, {config.trainer.num_train_steps} steps; run directory {run_dir}"
    )


def _check_validation(config: TrainerConfig, data: LoadsData[Any]) -> None:
    for name in ("steps_per_eval", "per_device_eval_parallelism"):
        value = getattr(config, name)
        if value not in (None, -1) and not data.validation_urls:
            raise ConfigError(
                f"trainer.{name} is {value}, but data.validation_urls is empty, so it has no effect. Name files to "
                "validate with, or leave it out."
            )
