"""Train with and without samples on the devices that are there: the safety suite of the repository, where it matters.

One training run is made twice, plain and with samples between its steps. After step 1 the round fails on the last host,
which cannot read the model. After each of the next steps there is a round in one layout, so that a loss that differs
says after which. After the last step but one, all layouts answer again, from the same weights.
"""

import dataclasses
import functools
import gc
import json
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import haliax as hax
import jax
from jax.sharding import Mesh

from lockstep.errors import HostError
from lockstep.hosts import Hosts
from lockstep.json_text import from_peer
from lockstep.main.doctor.finding import Finding, failed
from lockstep.main.doctor.layout_rounds import Layout, LayoutRounds
from lockstep.main.doctor.text_model import make_rows, make_tokenizer, shape_for
from lockstep.main.doctor.verdicts import SEND, TrainingRun, judge_failure, judge_layouts, judge_losses, judge_memory
from lockstep.models import LlamaConfig, LlamaLMHeadModel, padded_vocab_size
from lockstep.placement import data_shards, make_mesh, tensor_sizes
from lockstep.placement.device import used_bytes
from lockstep.training import OptimizerConfig, Trainer, TrainerConfig, lm_loss


def self_test(
    hosts: Hosts, mesh_shape: str, deadline: float, *, all_layouts: bool = True
) -> tuple[list[Finding], dict[str, Any]]:
    """Train with and without samples; every process makes the same call.

    Args:
        hosts: The processes of the job.
        mesh_shape: The training mesh.
        deadline: The time (`time.monotonic`) on the leader after which no other layout is begun.
        all_layouts: Whether to decode in every layout, or only in that of ``auto`` and in that of training.

    Returns:
        What was found, and JSON values for the report.

    Raises:
        HostError: The processes lost each other.
    """
    what = f"self-test on mesh {mesh_shape}"
    begin = time.monotonic()
    try:
        findings, values = _self_test(hosts, what, mesh_shape, deadline, all_layouts=all_layouts)
    except HostError as error:
        if not error.on_every_process:
            raise
        return [dataclasses.replace(failed(what, error), fix=SEND)], {}
    return findings, {what: {"seconds": time.monotonic() - begin, **values}}


def _self_test(
    hosts: Hosts, what: str, mesh_shape: str, deadline: float, *, all_layouts: bool
) -> tuple[list[Finding], Mapping[str, Any]]:
    with hosts.run_on_all(what):
        mesh = make_mesh(mesh_shape)
        shape_for(mesh)
    dtype = "float32" if mesh.devices.flat[0].platform == "cpu" else "bfloat16"
    layouts: list[Layout] = ["auto", "training"]
    if all_layouts:
        layouts += [{"tensor": size} for size in tensor_sizes(dict(mesh.shape))]
    with tempfile.TemporaryDirectory(prefix="lockstep-self-test-") as directory:
        rounds = LayoutRounds(hosts, layouts, dtype, Path(directory), deadline)
        plain = _train(hosts, mesh, rounds.steps, dtype, None)
        sampled = _train(hosts, mesh, rounds.steps, dtype, rounds)
        rounds.finish()
        # The leader alone has the answers and their numbers.
        told = hosts.broadcast_from_leader(
            f"{what}: layouts",
            lambda: json.dumps([dataclasses.asdict(each) for each in judge_layouts(what, rounds.results())]).encode(),
        )
    with hosts.launch_on_all(f"{what}: losses and launches") as phase:
        phase.agree({f"losses {what} samples": " ".join(run.losses) for what, run in _named(plain, sampled)})
    return [
        judge_losses(what, plain, sampled, rounds.layouts),
        judge_failure(what, rounds.failing.rounds, rounds.failing.skipped_rounds, hosts.count),
        *from_peer(told, list[Finding], "what the leader found"),
        judge_memory(what, plain, sampled),
        Finding.ok(
            f"{what}: launches",
            f"{hosts.ledger.count} launches since doctor began, the same in the same order on every process",
        ),
    ], {f"losses {what} samples": list(run.losses) for what, run in _named(plain, sampled)}


def _named(plain: TrainingRun, sampled: TrainingRun) -> list[tuple[str, TrainingRun]]:
    return [("without", plain), ("with", sampled)]


def _train(hosts: Hosts, mesh: Mesh, steps: int, dtype: str, rounds: LayoutRounds | None) -> TrainingRun:
    """Train the small model for some steps, with rounds of samples between them or without."""
    tokenizer, shape = make_tokenizer(), shape_for(mesh)
    batch_size = 2 * data_shards(mesh)
    precision = "p=f32" if dtype == "float32" else "p=f32,c=bf16"
    config = TrainerConfig(num_train_steps=steps, train_batch_size=batch_size, mp=precision)
    optimizer = OptimizerConfig(learning_rate=1e-2, warmup=0)
    trainer = Trainer(config, optimizer.build(steps), lm_loss, hosts, mesh=mesh)
    losses: dict[int, str] = {}
    trainer.add_hook(lambda info: losses.__setitem__(info.step, float(info.loss).hex()))
    if rounds is not None:
        trainer.add_hook(rounds)
    vocab = hax.Axis("vocab", padded_vocab_size(len(tokenizer), mesh.shape["tp"]))
    trainer.train(trainer.init_model(functools.partial(_init, vocab, shape)), make_rows(tokenizer, 4 * batch_size))
    traces = trainer.train_step_traces
    del trainer
    gc.collect()
    return TrainingRun(losses=[losses[step] for step in range(steps)], traces=traces, used=used_bytes())


def _init(vocab: hax.Axis, shape: LlamaConfig, key: jax.Array) -> LlamaLMHeadModel:
    return LlamaLMHeadModel.init(vocab, shape, key=key)
