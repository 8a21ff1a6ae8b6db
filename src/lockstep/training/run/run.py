"""A training run: from a configuration to a trained model, the same steps on every host."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from lockstep.callback import InferenceEvalConfig, SampleCallback
from lockstep.callback.evaluation import PREFIX as TASKS_PREFIX
from lockstep.config_fields import encode_config
from lockstep.exits import ENDING
from lockstep.hosts import Hosts, closing_on_leader, giving_back_leases
from lockstep.models import split_trained
from lockstep.printable import get_logger, hide_credentials, print_lines
from lockstep.report import BackgroundTracker, rewind_tracker
from lockstep.training.checkpoints.saved_model import model_spec, save_tokenizer
from lockstep.training.loop.saves import RunRecord
from lockstep.training.loop.stopping import StopRequest, TrainResult
from lockstep.training.loop.trainer import Trainer
from lockstep.training.loop.validation import Validation
from lockstep.training.run.config import Setup, TrainConfig
from lockstep.training.run.hf_saves import HfSaves
from lockstep.training.run.initial_model import initializer, load_frozen, make_model
from lockstep.training.run.opening import OpenRun, open_run
from lockstep.training.run.run_dir import closing_summary, rewind, shown_path
from lockstep.training.step.train_state import TrainState

log = get_logger(__name__)

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
    run = open_run(config, hosts)
    with closing_on_leader(hosts, lambda: run.close(hosts.timeout_s)):
        trainer = _trainer(config, run, hosts)
        saves = HfSaves(config, run.run_dir, run.tokenizer, run.token_ids, hosts)
        with hosts.run_on_all("hf_save_path", "writing to hf_save_path"):
            if hosts.is_leader:
                saves.check(trainer.checkpoints)
        init = initializer(run.model_config, run.vocab_size, run.adapters)
        frozen = None if run.adapters is None else load_frozen(run.adapters, run.model_config, trainer.mesh, hosts)

        def initial_model() -> PyTree:
            return make_model(config, run.model_config, init, frozen, trainer, hosts)

        state = _restore(init, frozen, trainer, run.run_dir, hosts)
        hosts.phase("making the model")
        model = initial_model() if state is None else state.model
        _add_hooks(config, run, trainer, saves, model, hosts)
        batches = config.make_batches(
            Setup(
                data=run.rows,
                tokenizer=run.tokenizer,
                model=model,
                initial_model=initial_model,
                trainer=trainer,
                run_dir=run.run_dir,
            )
        )
        if hosts.is_leader:
            log.info("%s", _announce(config, model, run))
        hosts.phase("training")
        result = trainer.train(model if state is None else state, batches)
        del model, state
        saved = _save_last(config, run, saves, result, hosts)
    if hosts.is_leader:
        print_lines(closing_summary(run.run_dir, result, config.trainer.num_train_steps, saved))
    return result.exit_code


def _trainer(config: TrainConfig, run: OpenRun, hosts: Hosts) -> Trainer:
    """The trainer, with the tokenizer beside its checkpoints."""
    trainer = Trainer(
        config.trainer,
        config.optimizer.build(config.trainer.num_train_steps, config.renewal),
        run.objective,
        hosts,
        mesh=run.mesh,
        tracker=run.tracker,
        schedule=config.optimizer.schedule(config.trainer.num_train_steps),
        run=RunRecord(
            directory=run.run_dir,
            facts=run.facts,
            config=hide_credentials(encode_config(config)),
            model=model_spec(run.model_config, run.token_ids, run.adapters),
        ),
    )
    with hosts.run_on_all("tokenizer beside the checkpoints"):
        if hosts.is_leader and trainer.checkpoints is not None:
            save_tokenizer(trainer.checkpoints, run.tokenizer)
    return trainer


def _add_hooks(
    config: TrainConfig, run: OpenRun, trainer: Trainer, saves: HfSaves, model: PyTree, hosts: Hosts
) -> None:
    """Add sampling, saves and validation, in this order."""
    if config.inference_eval.enabled:
        alarms = config.inference_eval.alarms.of_trained(trained=config.initialize_from_hf is not None)
        run.samples = SampleCallback(
            dataclasses.replace(config.inference_eval, alarms=alarms),
            run.tokenizer,
            tracker=run.tracker,
            output_dir=run.run_dir,
            hosts=hosts,
            dtype=config.trainer.precision.compute.name,
        )
        run.samples.check(model)
        trainer.add_hook(run.samples)
    if config.hf_save_steps is not None:
        trainer.add_hook(saves, every=config.hf_save_steps)
    if run.validation:
        validation = Validation(trainer, run.objective, run.validation, perplexity=config.source.CROSS_ENTROPY)
        trainer.add_hook(validation, config.trainer.steps_per_eval or config.trainer.num_train_steps)


def _save_last(config: TrainConfig, run: OpenRun, saves: HfSaves, result: TrainResult, hosts: Hosts) -> str | None:
    """Save the last model where the run has a place for it; return that place."""
    if result.stopped_by is not None and isinstance(run.tracker, BackgroundTracker):
        run.tracker.finish_s = min(run.tracker.finish_s, STOPPED_FINISH_S)
    with StopRequest(hosts):  # a signal from now on must not leave half a checkpoint
        # A machine that is taken away (SIGTERM) leaves what it has; Ctrl-C ends at once, unless all steps are done.
        done = result.completed_steps == config.trainer.num_train_steps
        if config.hf_save_path is None or not (done or result.stopped_by in (None, *ENDING)):
            return None
        hosts.phase("saving")
        return saves.save_last(result.eval_model, None if result.complete else result.completed_steps)


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


def _announce(config: TrainConfig, model: PyTree, run: OpenRun) -> str:
    n_parameters, n_trained = (
        sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(tree)) for tree in (model, split_trained(model)[0])
    )
    trained = "" if n_trained == n_parameters else f", of which {n_trained:,} are trained,"
    shape = ", ".join(f"{name} {size}" for name, size in run.mesh.shape.items())
    return (
        f"{n_parameters:,} parameters{trained} on mesh ({shape}); {len(run.rows):,} rows, batch "
        f"{config.trainer.train_batch_size}, {config.trainer.num_train_steps} steps; run directory "
        f"{shown_path(run.run_dir)}"
    )
