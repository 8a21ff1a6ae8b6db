"""``lockstep eval``: tasks of lm-evaluation-harness on a checkpoint, on any number of hosts."""

import dataclasses
import json
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import draccus
import rich
from rich.table import Table

from lockstep.batch_inference import JobConfig, checkpoint_at, load
from lockstep.callback.evaluation import PREFIX, TaskResults, TaskRounds, TasksConfig
from lockstep.credentials import get_logger
from lockstep.engine import EngineConfig
from lockstep.errors import ConfigError, LockstepError, refuse_keys
from lockstep.hosts import Hosts, config_digest, leader_only, start
from lockstep.main.arguments import name_words, parse_arguments
from lockstep.placement import make_mesh
from lockstep.report import WANDB_RUN, BackgroundTracker, append_jsonl, build_tracker
from lockstep.text import fetch_tokenizer, load_tokenizer, tokenizer_digest
from lockstep.urls import HUB_WAIT_S

log = get_logger(__name__)

SCORE_S = 600.0
"""Seconds that the harness may take to score the answers."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Settings of ``eval``: which tasks, on which checkpoint, and where the scores go.

    Raises:
        ConfigError: A value cannot work.
    """

    REFUSED: ClassVar[Mapping[str, str]] = {"tasks.every": "It is for training. Remove it."}

    checkpoint: str
    """A Hugging Face checkpoint, a training run of ours, or one of its checkpoints: a directory or a URL."""
    tokenizer: str | None = None
    """Hugging Face tokenizer: a directory, a URL or a name; null: the one beside the checkpoint."""
    trust_remote_code: str | None = None
    """The ``tokenizer`` again, where Python code that it brings may be run; null: none is."""
    base_model: str | None = None
    """The directory or URL of the base model of a checkpoint of adapters; null: the one that its run had, which must be
    beside the checkpoints."""
    trainer: JobConfig = dataclasses.field(default_factory=JobConfig)
    """Devices, hosts, trackers, directories."""
    engine: EngineConfig = dataclasses.field(default_factory=EngineConfig)
    """Capacities and layout. ``dtype`` is also the type in which the checkpoint is loaded; null: as it is stored."""
    tasks: TasksConfig = dataclasses.field(default_factory=TasksConfig)
    """The tasks; on the command line ``--tasks a,b`` names them."""

    def __post_init__(self) -> None:
        if not self.checkpoint:
            raise ConfigError("checkpoint is empty. Give a directory or a URL.")
        if not self.tasks.names:
            raise ConfigError("there are no tasks. Name some: --tasks gsm8k,arc_easy, or the path of a task file.")
        refuse_keys(self, "eval")


def main(arguments: Sequence[str]) -> int:
    """Evaluate as the command line says.

    Raises:
        ConfigError: The configuration cannot work.
        PeerError: A process could not go on.
    """
    config = parse_arguments(EvalConfig, named(arguments))
    hosts = start(config.trainer.distributed)
    logging.basicConfig(level=logging.INFO if hosts.is_leader else logging.WARNING, format="%(name)s: %(message)s")
    return evaluate(config, hosts)


def evaluate(config: EvalConfig, hosts: Hosts) -> int:
    """Run the tasks; every process makes the same call.

    Raises:
        PeerError: A process could not go on; raised on every process.
        DisagreementError: The processes have different configurations, tokenizers or checkpoints.
    """
    hosts.agree("config", {"configuration": config_digest(config)})

    def fetch() -> bytes:
        name = config.tokenizer or checkpoint_at(config.checkpoint, "checkpoint", config.base_model).tokenizer
        return fetch_tokenizer(name, config.trust_remote_code)

    fetched = hosts.broadcast_from_leader("tokenizer", fetch, HUB_WAIT_S)
    with hosts.run_on_all("reading tokenizer and checkpoint") as phase:
        checkpoint = checkpoint_at(config.checkpoint, "checkpoint", config.base_model)
        tokenizer = load_tokenizer(config.tokenizer or checkpoint.tokenizer, config.trust_remote_code, fetched)
        phase.agree({"checkpoint": checkpoint.fingerprint(), "tokenizer": tokenizer_digest(tokenizer)})
        mesh = make_mesh(config.trainer.mesh_shape)
    found: list[TaskResults | Exception] = []
    rounds = TaskRounds(
        "eval",
        config.tasks,
        dataclasses.replace(config.engine, max_seq_len=config.tasks.max_seq_len or config.engine.max_seq_len),
        tokenizer,
        lambda _, results: found.append(results),
        hosts,
        hosts.timeout_s,
    )
    with hosts.run_on_all("finding the tasks"):
        if hosts.is_leader:
            rounds.check()
    model, _, _ = load(hosts, checkpoint, mesh, config.engine.dtype)
    if not rounds.run(0, model):
        return 1
    # The others wait longer than the leader may take, however short their other waits are.
    with hosts.scope("scoring", hosts.timeout_s + SCORE_S) as scope:
        with scope.run_on_all("scoring", "scoring the answers"):
            if hosts.is_leader:
                _report(config, _scored(rounds, found))
    return 0


def named(arguments: Sequence[str]) -> list[str]:
    """The command line with a key before its first word, and names of tasks as the list that they are.

    Returns:
        The command line as every other command reads it.

    Raises:
        ConfigError: There is a word too many.
    """
    changed: list[str] = []
    rest = name_words(arguments, ["checkpoint"], "lockstep eval CHECKPOINT --tasks TASK[,TASK...]")
    while rest:
        key, equals, value = rest.pop(0).partition("=")
        if not equals:
            value = rest.pop(0) if rest and not rest[0].startswith("--") else ""
        if key == "--tasks" and value and value[0] not in "{[":
            value = json.dumps([each.strip() for each in value.split(",")])
        changed += ["--tasks.names" if key == "--tasks" and value[:1] == "[" else key, *([value] if value else [])]
    return changed


def _scored(rounds: TaskRounds, found: Sequence[TaskResults | Exception]) -> TaskResults:
    if not rounds.wait(SCORE_S):
        raise LockstepError(f"the harness has not scored the answers within {SCORE_S:g} s. A task's own code hangs.")
    (result,) = found
    if isinstance(result, Exception):
        raise result
    return result


def _report(config: EvalConfig, results: TaskResults) -> None:
    """Rows and scores on disk, in the tracker and at the terminal."""
    run_dir = Path(config.trainer.log_dir) / (config.trainer.run_id or time.strftime("eval-%Y%m%d-%H%M%S"))
    run_dir.mkdir(parents=True, exist_ok=True)
    rows = run_dir / "tasks.jsonl"
    # Another evaluation replaces files, and is another W&B run: that of the last one has rows of the same step.
    for of_the_last in (rows, run_dir / WANDB_RUN):
        of_the_last.unlink(missing_ok=True)
    append_jsonl(rows, [row.to_dict() for row in results.rows])
    scores = run_dir / "scores.json"
    scores.write_text(json.dumps({"checkpoint": config.checkpoint, "scores": results.scores}, indent=2) + "\n")
    built = build_tracker(config.trainer.tracker, run_dir, run_dir.name, draccus.encode(config))
    tracker = BackgroundTracker(built, leader_only)
    tracker.log(results.scalars(0), step=0)
    tracker.log_rows(f"{PREFIX}/tasks", results.rows, step=0)
    tracker.finish()
    rich.get_console().print("", score_table(results))
    if results.truncated:
        print(f"of {results.truncated} of {results.requests} requests the beginning was left out: they were too long")
    print(f"  scores  {scores}\n  rows    {rows}", flush=True)


def score_table(results: TaskResults) -> Table:
    """The scores of tasks for a terminal.

    Args:
        results: What the tasks found.
    """
    table = Table(title="eval", title_justify="left", title_style="bold")
    for name, side in (("task", "left"), ("score", "left"), ("value", "right"), ("±", "right")):
        table.add_column(name, justify="right" if side == "right" else "left", overflow="fold")
    for task, scores in results.scores.items():
        for name, value in scores.items():
            metric, slash, filter_name = name.partition("/")
            if not metric.endswith("_stderr"):
                error = scores.get(f"{metric}_stderr{slash}{filter_name}")
                table.add_row(task, name, f"{value:.4f}", "" if error is None else f"{error:.4f}")
    return table
