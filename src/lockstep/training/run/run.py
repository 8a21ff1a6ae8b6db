"""A training run: from a configuration to a trained model, the same steps on every host; and its exports."""

import dataclasses
import functools
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import draccus
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import PyTree

from lockstep.callback import InferenceEvalConfig, SampleCallback
from lockstep.callback.evaluation import PREFIX as TASKS_PREFIX
from lockstep.errors import PeerError, check_log_dir
from lockstep.hosts import Hosts, closing_on_leader, config_digest, giving_back_leases, leader_only, try_leader_only
from lockstep.models import (
    LlamaConfig,
    LlamaLMHeadModel,
    LoraModel,
    config_to_hf,
    fingerprint,
    join_trained,
    load_config,
    load_hf,
    padded_vocab_size,
    read_vocab_size,
    save_hf,
    split_trained,
)
from lockstep.placement import make_mesh, parameter_axes
from lockstep.printable import get_logger, hide_credentials, print_lines
from lockstep.report import (
    FINISH_S,
    BackgroundTracker,
    NoopTracker,
    Tracker,
    check_trackers,
    load_metrics,
    rewind_tracker,
)
from lockstep.storage import HUB_WAIT_S
from lockstep.text import check_vocab, fetch_tokenizer, stop_ids, token_count, tokenizer_digest
from lockstep.training.checkpoints.saved_model import SavedAdapters, model_spec, save_tokenizer
from lockstep.training.data import DataConfig
from lockstep.training.data.example_check import ExampleSource, check_examples
from lockstep.training.loop.hooks import StepInfo
from lockstep.training.loop.stopping import StopRequest
from lockstep.training.loop.trainer import Trainer
from lockstep.training.loop.validation import Validation
from lockstep.training.run.config import Data, Setup, TrainConfig, check_validation
from lockstep.training.run.run_dir import (
    check_save_paths,
    closing_summary,
    make_run_dir,
    rewind,
    shown_path,
    start_tracker,
    take_leases,
    template_date_facts,
)
from lockstep.training.step.train_state import TrainState
from lockstep.urls import absolute_path

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = get_logger(__name__)

LAST_FLUSH_S = 2.0
"""Seconds that reports of rounds still have when everything else is done; at the end of training they had more."""
STOPPED_FINISH_S = 10.0  # seconds that closing the tracker may take after a signal: a machine may be taken away


@giving_back_leases()
def train(config: TrainConfig, hosts: Hosts) -> int:
    """Train; every host does the same: prepare, agree, train with samples, save, sum up.

    Returns:
        The exit code: 0, 128 + signal for a run that a signal ended, 1 for one that ``on_nan`` or an alarm ended.

    Raises:
        PeerError: Preparing or saving failed on a host.
        DisagreementError: The hosts have different configurations or data.
        ConfigError: The model does not fit the mesh.
    """
    source = config.source
    hosts.agree("config", {"config": config_digest(config)})

    def fetch() -> bytes:
        check_trackers(config.trainer.tracker)  # before anything is read
        check_log_dir(config.trainer.log_dir)
        return fetch_tokenizer(config.tokenizer, config.trust_remote_code, config.initialize_from_hf or "")

    fetched = hosts.broadcast_from_leader("tokenizer", fetch, HUB_WAIT_S)
    with hosts.run_on_all("reading tokenizer") as prepared:
        check_validation(config.trainer, source)
        mesh = make_mesh(config.trainer.mesh_shape)
        config.trainer.microbatches(mesh)
        tokenizer = config.read_tokenizer(fetched)
        model_config, token_ids = model_shape(config, tokenizer)
        check_vocab(tokenizer, token_ids)
        vocab_size = token_ids if config.model is None else padded_vocab_size(token_ids, mesh.shape["tp"])
        if config.inference_eval.enabled:
            load_metrics(config.inference_eval.metrics)
            config.inference_eval.alarms.load_action()
        objective = config.make_objective(tokenizer)
        facts = {"tokenizer": tokenizer_digest(tokenizer), **config.facts()}
        adapters = describe_adapters(config, model_config)
        if adapters is not None:
            facts |= {"base model": adapters.fingerprint, "lora.alpha / lora.r": str(adapters.lora.scale)}
        prepared.agree(facts)
    facts |= template_date_facts(config.trainer, tokenizer, hosts)
    rows = source.load(tokenizer, model_config.max_seq_len, config.trainer.seed, hosts, token_ids)
    validation = source.load_validation(tokenizer, model_config.max_seq_len, hosts, token_ids)
    facts["training data"] = rows.digest()
    hosts.agree("training data", facts)
    if isinstance(config.data, DataConfig) and isinstance(rows, ExampleSource):  # a program's own rows may have neither
        ends = config.inference_eval.sampling_params(stop_ids(tokenizer)).stop_token_ids
        row_length, seed = config.data.row_length(model_config.max_seq_len), config.trainer.seed
        check_examples(config.data, rows, tokenizer, ends, length=row_length, seed=seed, hosts=hosts)
    run_dir = make_run_dir(config.trainer, hosts)
    tracker: Tracker = NoopTracker()
    with hosts.run_on_all("tracker"):
        if hosts.is_leader:
            take_leases(config.trainer, run_dir)
            built = start_tracker(config.trainer, run_dir, draccus.encode(config))
            # The others wait for the leader at their end, at most timeout_s.
            tracker = BackgroundTracker(built, leader_only, finish_s=min(FINISH_S, hosts.timeout_s / 2))
    samples: SampleCallback | None = None

    def close() -> None:
        if samples is not None:  # where an error ended training, the rounds before it are reported too
            samples.flush(min(LAST_FLUSH_S, hosts.timeout_s / 4))
        try_leader_only("closing the tracker", tracker.finish, "what it had written is kept")

    with closing_on_leader(hosts, close):
        schedule = config.optimizer.schedule(config.trainer.num_train_steps)
        optimizer = config.optimizer.build(config.trainer.num_train_steps, config.renewal)
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
        saves = HfSaves(config, run_dir, tokenizer, token_ids, hosts)
        with hosts.run_on_all("hf_save_path", "writing to hf_save_path"):
            if hosts.is_leader:
                saves.check(trainer.checkpoints)
        init = initializer(model_config, vocab_size, adapters)
        frozen = None if adapters is None else load_frozen(adapters, model_config, trainer.mesh, hosts)
        state = _restore(init, frozen, trainer, run_dir, hosts)
        hosts.phase("making the model")
        model = make_model(config, model_config, init, frozen, trainer, hosts) if state is None else state.model
        if config.inference_eval.enabled:
            alarms = config.inference_eval.alarms.of_trained(trained=config.initialize_from_hf is not None)
            samples = SampleCallback(
                dataclasses.replace(config.inference_eval, alarms=alarms),
                tokenizer,
                tracker=tracker,
                output_dir=run_dir,
                hosts=hosts,
                dtype=config.trainer.precision.compute.name,
            )
            samples.check(model)
            trainer.add_hook(samples)
        if config.hf_save_steps is not None:
            trainer.add_hook(saves, every=config.hf_save_steps)
        if validation:
            every = config.trainer.steps_per_eval or config.trainer.num_train_steps
            trainer.add_hook(Validation(trainer, objective, validation, perplexity=source.CROSS_ENTROPY), every)
        setup = Setup(
            data=rows,
            tokenizer=tokenizer,
            model=model,
            model_max_seq_len=model_config.max_seq_len,
            initial_model=lambda: make_model(config, model_config, init, frozen, trainer, hosts),
            trainer=trainer,
            run_dir=run_dir,
        )
        batches = config.make_batches(setup)
        del setup
        if hosts.is_leader:
            log.info("%s", _announce(config, model, rows, mesh, shown_path(run_dir)))
        hosts.phase("training")
        result = trainer.train(model if state is None else state, batches)
        if result.stopped_by is not None and isinstance(tracker, BackgroundTracker):
            tracker.finish_s = min(tracker.finish_s, STOPPED_FINISH_S)
        del model, state
        saved = None
        with StopRequest(hosts):  # a signal from now on must not leave half a checkpoint
            # A machine that is taken away (SIGTERM) leaves what it has; Ctrl-C ends at once, unless all steps are done.
            done = result.completed_steps == config.trainer.num_train_steps
            if (result.stopped_by in (None, signal.SIGTERM) or done) and config.hf_save_path is not None:
                hosts.phase("saving")
                saved = saves.save_last(result.eval_model, None if result.complete else result.completed_steps)
    if hosts.is_leader:
        print_lines(closing_summary(run_dir, result, config.trainer.num_train_steps, saved))
    return result.exit_code


def _restore(
    init: Callable[[jax.Array], PyTree], frozen: PyTree, trainer: Trainer, run_dir: Path, hosts: Hosts
) -> TrainState | None:
    """The state to go on from, with the files of the run as they were then; None: the run begins."""
    state = trainer.restore(init, frozen)
    came_from = trainer.resumed_from
    with hosts.run_on_all("files of the run"):
        if hosts.is_leader:
            step = -1 if came_from is None else came_from.step
            # Where a signal came after the round of the step, the callback does not make it again.
            made = came_from is None or came_from.hooks_called or _last_round(came_from.hooks) == step
            rounds_step = step if made else step - 1
            rewind(run_dir, metrics_step=step, samples_step=rounds_step)
            rounds = (f"{InferenceEvalConfig.BLOCK}/", f"{TASKS_PREFIX}/")
            rewind_tracker(trainer.tracker, step=step, rounds_step=rounds_step, rounds=rounds)
            if trainer.config.checkpointer is not None and trainer.config.run_id is None:
                log.warning(
                    "trainer.run_id is null: a later start finds the checkpoints of this run only with "
                    "--trainer.run_id %s",
                    run_dir.name,
                )
    return state


def _last_round(hooks: Mapping[str, Any]) -> int | None:
    """The step of the last round of samples by the states of hooks; None where there was none."""
    state = hooks.get(InferenceEvalConfig.BLOCK)
    return state.get("last_step") if isinstance(state, Mapping) else None


def _announce(config: TrainConfig, model: PyTree, rows: Data, mesh: Mesh, run_dir: Path) -> str:
    n_parameters, n_trained = (
        sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(tree)) for tree in (model, split_trained(model)[0])
    )
    trained = "" if n_trained == n_parameters else f", of which {n_trained:,} are trained,"
    shape = ", ".join(f"{name} {size}" for name, size in mesh.shape.items())
    return (
        f"{n_parameters:,} parameters{trained} on mesh ({shape}); {len(rows):,} rows, batch "
        f"{config.trainer.train_batch_size}, {config.trainer.num_train_steps} steps; run directory {run_dir}"
    )


class HfSaves:
    """Saves the model of a run, or its average; a hook of its trainer. Every host makes the same calls.

    A save that fails while training goes on is logged and counted. When the job is asked to end, a save that is under
    way is given up, because the checkpoint that a resume begins at needs the time; the resumed run then makes it.
    """

    name = "hf_saves"

    def __init__(
        self, config: TrainConfig, run_dir: Path, tokenizer: "PreTrainedTokenizerBase", vocab_size: int, hosts: Hosts
    ) -> None:
        self._config, self._run_dir, self._tokenizer, self._vocab_size = config, run_dir, tokenizer, vocab_size
        self._hosts, self._dtype = hosts, config.hf_save_dtype
        if self._dtype is None and config.lora is None:  # an average has a type of its own; adapters have their base's
            self._dtype = config.trainer.precision.param.name
        self.errors = 0  # saves that failed while training went on
        self.interrupted = False
        """Whether the last save was given up because the job is asked to end; the same on every host."""

    def check(self, checkpoints: str | None) -> None:
        """Find out on this process whether the models can be saved, see `check_save_paths`."""
        config, every = self._config, self._config.hf_save_steps
        if config.hf_save_path is None:
            return
        steps = () if every is None else range(every, config.trainer.num_train_steps, every)
        taken = {"initialize_from_hf": config.initialize_from_hf, "tokenizer": config.tokenizer}
        taken |= {"the run directory": str(self._run_dir), "that of the checkpoints": checkpoints}
        check_save_paths([*map(self._path, steps), self._path(None)], taken)

    def on_step(self, info: StepInfo, force: bool = False) -> None:
        """Save the model after a step; the last one is saved by `save_last`."""
        self.interrupted = False
        if force or info.step < 0 or info.next_step >= self._config.trainer.num_train_steps:
            return
        start = time.monotonic()
        path = self._path(info.next_step)
        try:
            self.interrupted = not self._save(info.eval_model, path, interrupted=self._hosts.preemption.requested)
        except PeerError as error:
            self.errors += 1
            if self._hosts.is_leader:
                log.error("the model of step %d was not saved, training goes on: %s", info.next_step, error)
            return
        if self._hosts.is_leader and not self.interrupted:
            log.info("model saved as %s in %.1f s", path, time.monotonic() - start)

    def save_last(self, model: Any, step: int | None) -> str:
        """Save the last model.

        Args:
            step: The number of completed steps where a signal ended the run; None for a full run.

        Raises:
            PeerError: A host could not write.
        """
        path = self._path(step)
        self._save(model, path)
        return path

    def _save(self, model: Any, path: str, **options: Any) -> bool:
        return save_hf(
            model,
            path,
            tokenizer=self._tokenizer,
            dtype=self._dtype,
            vocab_size=self._vocab_size,
            hosts=self._hosts,
            **options,
        )

    def _path(self, step: int | None) -> str:
        assert self._config.hf_save_path is not None
        name = self._config.hf_save_path.rstrip("/") + ("" if step is None else f"-step-{step}")
        return name if "://" in name else str(self._run_dir / name)


def describe_adapters(config: TrainConfig, model: LlamaConfig) -> SavedAdapters | None:
    """Return the adapters of a run as its checkpoints describe them; None where it trains the whole model.

    Raises:
        ConfigError: The adapters do not fit the model, or there is no checkpoint of it.
    """
    base = config.initialize_from_hf
    if config.lora is None or base is None:
        return None
    config.lora.shapes(model)
    return SavedAdapters(
        lora=config.lora.resolved(config.trainer.precision.compute.name),
        base=absolute_path(base),
        fingerprint=fingerprint(base),
    )


def load_frozen(adapters: SavedAdapters, model: LlamaConfig, mesh: Mesh, hosts: Hosts) -> LoraModel:
    """Read the base model, for `lockstep.models.join_trained`; every host makes this call.

    Raises:
        PeerError: A host could not read its part; raised on every host.
    """
    hosts.phase("loading the base model")
    dtype = jnp.dtype(adapters.lora.base_dtype)
    base = load_hf(adapters.base, mesh, parameter_axes(mesh), dtype, config=model, hosts=hosts)
    return LoraModel(base=base, adapters=None, scale=adapters.lora.scale)


def model_shape(config: TrainConfig, tokenizer: "PreTrainedTokenizerBase") -> tuple[LlamaConfig, int]:
    """Configuration and number of token ids, before any weight is drawn or read."""
    if config.initialize_from_hf is not None:
        shape = config.trainer.with_run_settings(load_config(config.initialize_from_hf))
        if config.gradient_checkpointing is not None:
            shape = dataclasses.replace(shape, gradient_checkpointing=config.gradient_checkpointing)
        return shape, read_vocab_size(config.initialize_from_hf)
    assert isinstance(config.model, LlamaConfig)
    token_ids = token_count(tokenizer)
    if config.hf_save_path is not None:
        config_to_hf(config.model, token_ids)  # refuses now what could not be saved after the last step
    return config.trainer.with_run_settings(config.model), token_ids


def initializer(model: LlamaConfig, vocab_size: int, adapters: SavedAdapters | None) -> Callable[[jax.Array], PyTree]:
    """Return the function of a key that draws the weights that are trained: the model, or its adapters alone."""
    if adapters is not None:
        return functools.partial(adapters.lora.init, model)
    return lambda key: LlamaLMHeadModel.init(hax.Axis("vocab", vocab_size), model, key=key)


def make_model(
    config: TrainConfig,
    model_config: LlamaConfig,
    init: Callable[[jax.Array], PyTree],
    frozen: PyTree,
    trainer: Trainer,
    hosts: Hosts,
) -> PyTree:
    """Return the model before the first step, drawn or read; every host makes this call."""
    if config.initialize_from_hf is None or frozen is not None:
        return join_trained(trainer.init_model(init), frozen)
    dtype = config.trainer.precision.param
    axes = parameter_axes(trainer.mesh)
    return load_hf(config.initialize_from_hf, trainer.mesh, axes, dtype, config=model_config, hosts=hosts)
