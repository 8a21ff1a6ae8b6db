"""``lockstep eval``: tasks of lm-evaluation-harness on a checkpoint, their rows and scores on disk."""

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

from rich.table import Table

from lockstep.batch_inference.checkpoint import Checkpoint, checkpoint_at, load
from lockstep.batch_inference.config import JobConfig
from lockstep.callback.evaluation import PREFIX, TaskResults, TaskRounds, TasksConfig
from lockstep.config_fields import FilePath, check_fields, encode_config
from lockstep.engine import EngineConfig
from lockstep.errors import ConfigError, LockstepError, check_log_dir, refuse_keys
from lockstep.files import check_file, write_file
from lockstep.hosts import (
    Hosts,
    JobHosts,
    closing_on_leader,
    config_digest,
    giving_back_leases,
    leader_only,
    take_lease,
)
from lockstep.json_text import parse_json
from lockstep.limits import read_small
from lockstep.placement import make_mesh
from lockstep.printable import print_lines, without_credentials, write_to_stdout
from lockstep.report import WANDB_RUN, BackgroundTracker, append_jsonl, build_tracker, check_trackers
from lockstep.storage import HUB_WAIT_S
from lockstep.terminal import console
from lockstep.text import TEMPLATE_DATE, fetch_tokenizer, fix_template_date, load_tokenizer, tokenizer_digest
from lockstep.training import CheckpointFields, SavedModel
from lockstep.urls import check_links

SCORE_S = 600.0  # seconds that the harness may take to score the answers


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalConfig(CheckpointFields):
    """Settings of ``eval``: which tasks, on which checkpoint, and where the scores go."""

    REFUSED: ClassVar[Mapping[str, str]] = {"tasks.every": "It is for training. Remove it."}

    checkpoint: FilePath
    """A Hugging Face checkpoint, a training run of ours, or one of its checkpoints: a directory or a URL."""
    chat_template_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Variables for the chat template of the tokenizer, such as ``{enable_thinking: false}``."""
    trainer: JobConfig = dataclasses.field(default_factory=JobConfig)
    """Devices, hosts, trackers, directories."""
    engine: EngineConfig = dataclasses.field(default_factory=EngineConfig)
    """Capacities and layout. ``dtype`` is also the type in which the checkpoint is loaded; null: as it is stored."""
    tasks: TasksConfig = dataclasses.field(default_factory=TasksConfig)
    """The tasks; on the command line ``--tasks a,b`` names them."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.checkpoint:
            raise ConfigError("checkpoint is empty. Give a directory or a URL.")
        if not self.tasks.names:
            raise ConfigError("there are no tasks. Name some: --tasks gsm8k,arc_easy, or the path of a task file.")
        refuse_keys(self, "eval")


@giving_back_leases()
def evaluate(config: EvalConfig, hosts: Hosts) -> int:
    """Run the tasks; every process makes the same call.

    Raises:
        PeerError: A process could not go on; raised on every process.
    """
    hosts.agree("config", {"configuration": config_digest(config)})

    def fetch() -> bytes:
        check_trackers(config.trainer.tracker)
        check_log_dir(config.trainer.log_dir)
        checkpoint = checkpoint_at(config.checkpoint, "checkpoint", config.base_model)
        checkpoint.limits()  # what is no model is refused before a tokenizer is looked for beside it
        name = config.tokenizer or checkpoint.tokenizer
        return fetch_tokenizer(name, config.trust_remote_code, checkpoint.described_at)

    fetched = hosts.broadcast_from_leader("tokenizer", fetch, HUB_WAIT_S)
    with hosts.run_on_all("reading tokenizer and checkpoint") as phase:
        checkpoint = checkpoint_at(config.checkpoint, "checkpoint", config.base_model)
        name = config.tokenizer or checkpoint.tokenizer
        trusted, kwargs = config.trust_remote_code, config.chat_template_kwargs
        tokenizer = load_tokenizer(name, trusted, fetched, checkpoint.described_at, kwargs)
        phase.agree({"checkpoint": checkpoint.fingerprint(), "tokenizer": tokenizer_digest(tokenizer)})
        mesh = make_mesh(config.trainer.mesh_shape)
    date = fix_template_date(tokenizer, lambda: _kept_date(config, checkpoint), hosts.broadcast_from_leader)
    outcomes: list[TaskResults | Exception] = []
    rounds = TaskRounds(
        "eval",
        config.tasks,
        dataclasses.replace(config.engine, max_seq_len=config.tasks.max_seq_len or config.engine.max_seq_len),
        tokenizer,
        lambda _, results: outcomes.append(results),
        JobHosts(hosts),
        hosts.timeout_s,
    )
    with hosts.run_on_all("finding the tasks"):
        if hosts.is_leader:
            rounds.check()
    output: _Output | None = None
    with hosts.run_on_all("output"):
        if hosts.is_leader:
            output = _Output(config, {TEMPLATE_DATE: date} if date else {})

    def close() -> None:
        if output is not None:
            output.close()

    with closing_on_leader(hosts, close):
        model, _, _ = load(hosts, checkpoint, mesh, config.engine.dtype)
        if not rounds.run(0, model):
            return 1
        # The others wait longer than the leader may take, however short their other waits are.
        with hosts.scope("scoring", hosts.timeout_s + SCORE_S) as scope:
            with scope.run_on_all("scoring", "scoring the answers"):
                if output is not None:
                    output.write(_scored(rounds, outcomes))
    return 0


SCORES: Final = "scores.json"


def _kept_date(config: EvalConfig, checkpoint: Checkpoint) -> str | None:
    """The date of the chat template in the run that trained the checkpoint, else in the evaluation that is there."""
    if isinstance(checkpoint, SavedModel) and TEMPLATE_DATE in checkpoint.metadata.facts:
        return checkpoint.metadata.facts[TEMPLATE_DATE]
    path = Path(config.trainer.log_dir) / (config.trainer.run_id or "") / SCORES
    if config.trainer.run_id is None or not path.exists():
        return None
    date: str | None = parse_json(read_small(path), str(path), dict, "Remove it.").get(TEMPLATE_DATE)
    return date


def _scored(rounds: TaskRounds, outcomes: Sequence[TaskResults | Exception]) -> TaskResults:
    if not rounds.wait(SCORE_S):
        raise LockstepError(f"the harness has not scored the answers within {SCORE_S:g} s. A task's own code hangs.")
    (result,) = outcomes
    if isinstance(result, Exception):
        raise result
    return result


class _Output:
    """Rows and scores on disk, in the tracker and at the terminal; all of it is opened when this is made.

    Raises:
        ConfigError: Another job writes there now, or the tracker cannot start.
        OSError: A file cannot be written.
    """

    def __init__(self, config: EvalConfig, facts: Mapping[str, str]) -> None:
        self._facts = {"checkpoint": without_credentials(config.checkpoint), **facts}
        name = config.trainer.run_id or time.strftime("eval-%Y%m%d-%H%M%S")
        run_dir = (Path(config.trainer.log_dir) / name).absolute()  # a task's own code may change the directory
        check_links(run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        take_lease(run_dir)
        self._rows, self._scores = run_dir / "tasks.jsonl", run_dir / SCORES
        for path in (self._rows, self._scores):
            check_file(path)
        # Another evaluation is another W&B run: that of the last one has rows of the same step.
        (run_dir / WANDB_RUN).unlink(missing_ok=True)
        built = build_tracker(config.trainer.tracker, run_dir, name, encode_config(config))
        self._tracker = BackgroundTracker(built, leader_only)

    def write(self, results: TaskResults) -> None:
        """Write the results in the place of those of another evaluation.

        Raises:
            LockstepError: Scores are missing; the others are written.
        """
        self._rows.unlink(missing_ok=True)
        append_jsonl(self._rows, [row.to_dict() for row in results.rows])
        write_file(self._scores, json.dumps({**self._facts, "scores": results.scores}, indent=2) + "\n")
        self._tracker.log(results.scalars(0), step=0)
        self._tracker.log_rows(f"{PREFIX}/tasks", results.rows, step=0)
        self.close()
        write_to_stdout(lambda: console().print("", score_table(results)))
        if (cut := results.truncated) > 0:
            print_lines(f"of {cut} of {results.requests} requests the beginning was left out: they were too long")
        print_lines(f"  scores  {self._scores}", f"  rows    {self._rows}")
        if results.failures:
            raise LockstepError(
                f"{len(results.failures)} scores are missing; all answers and the other scores are written. "
                + ". ".join(results.failures)
                + "."
            )

    def close(self) -> None:
        """Close the tracker; a second call does nothing."""
        self._tracker.finish()


LARGE = 1e6  # from here on a score is shown with four digits and a power of ten


def score_table(results: TaskResults) -> Table:
    """The scores of tasks for a terminal."""
    table = Table(title="eval", title_justify="left", title_style="bold")
    for name, side in (("task", "left"), ("score", "left"), ("value", "right"), ("±", "right")):
        table.add_column(name, justify="right" if side == "right" else "left", overflow="fold")
    for task, scores in results.scores.items():
        for name, value in scores.items():
            metric, slash, filter_name = name.partition("/")
            if not metric.endswith("_stderr"):
                error = scores.get(f"{metric}_stderr{slash}{filter_name}")
                shown = f"{value:.4f}" if abs(value) < LARGE else f"{value:.4g}"
                table.add_row(task, name, shown, "" if error is None else f"{error:.4f}")
    return table
