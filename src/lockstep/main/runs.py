"""The commands that are processes of a job: ``train-*``, ``sample``, ``eval`` and ``export``."""

import dataclasses
import functools
import json
import logging
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Final

import draccus
from rich.table import Table

from lockstep.batch_inference import Checkpoint, CheckpointFields, JobConfig, SampleConfig, checkpoint_at, load
from lockstep.batch_inference import sample as run_sample
from lockstep.callback.evaluation import PREFIX, TaskResults, TaskRounds, TasksConfig
from lockstep.config_fields import FilePath, check_fields
from lockstep.engine import EngineConfig
from lockstep.errors import ConfigError, LockstepError, check_log_dir, refuse_keys
from lockstep.files import check_file, write_file
from lockstep.hosts import (
    DistributedConfig,
    Hosts,
    JobHosts,
    closing_on_leader,
    config_digest,
    digest,
    giving_back_leases,
    leader_only,
    start,
    take_lease,
)
from lockstep.json_text import parse_json
from lockstep.limits import read_small
from lockstep.main.arguments import name_words, parse_arguments
from lockstep.models import export_hf, save_peft, save_target
from lockstep.placement import make_mesh
from lockstep.printable import get_logger, print_lines, show_log, without_credentials, write_to_stdout
from lockstep.report import WANDB_RUN, BackgroundTracker, append_jsonl, build_tracker, check_trackers
from lockstep.storage import HUB_WAIT_S
from lockstep.terminal import console
from lockstep.text import TEMPLATE_DATE, fetch_tokenizer, fix_template_date, load_tokenizer, tokenizer_digest
from lockstep.training import (
    HF_DTYPES,
    SavedModel,
    TrainConfig,
    TrainGrpoConfig,
    TrainLmConfig,
    TrainPreferenceConfig,
    TrainSimpoConfig,
    saved_model,
)
from lockstep.training import train as run_train
from lockstep.urls import check_links


def train(cls: type[TrainConfig], arguments: Sequence[str]) -> int:
    """Train as the command line says; the exit code is that of `lockstep.training.train`."""
    config = parse_arguments(cls, [re.sub(r"^--resume(?==|$)", "--trainer.resume", each) for each in arguments])
    hosts = _join(config.trainer.distributed)
    logging.getLogger("absl").setLevel(logging.WARNING)  # orbax says a dozen things about every save
    return run_train(config, hosts)


train_lm = functools.partial(train, TrainLmConfig)
train_preference = functools.partial(train, TrainPreferenceConfig)
train_simpo = functools.partial(train, TrainSimpoConfig)
train_grpo = functools.partial(train, TrainGrpoConfig)


def sample(arguments: Sequence[str]) -> int:
    """Sample as the command line says; 1 where a host failed."""
    config = parse_arguments(SampleConfig, arguments)
    return run_sample(config, _join(config.trainer.distributed))


def _join(distributed: DistributedConfig) -> Hosts:
    """Join the job; the leader alone logs what is no warning."""
    hosts = start(distributed)
    show_log(logging.INFO if hosts.is_leader else logging.WARNING)
    return hosts


log = get_logger(__name__)

SCORE_S = 600.0  # seconds that the harness may take to score the answers


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalConfig(CheckpointFields):
    """Settings of ``eval``: which tasks, on which checkpoint, and where the scores go."""

    REFUSED: ClassVar[Mapping[str, str]] = {"tasks.every": "It is for training. Remove it."}

    checkpoint: FilePath
    """A Hugging Face checkpoint, a training run of ours, or one of its checkpoints: a directory or a URL."""
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


def run_eval(arguments: Sequence[str]) -> int:
    """Evaluate as the command line says."""
    config = parse_arguments(EvalConfig, name_tasks(arguments))
    return evaluate(config, _join(config.trainer.distributed))


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
        name = config.tokenizer or checkpoint.tokenizer
        return fetch_tokenizer(name, config.trust_remote_code, checkpoint.described_at)

    fetched = hosts.broadcast_from_leader("tokenizer", fetch, HUB_WAIT_S)
    with hosts.run_on_all("reading tokenizer and checkpoint") as phase:
        checkpoint = checkpoint_at(config.checkpoint, "checkpoint", config.base_model)
        name = config.tokenizer or checkpoint.tokenizer
        tokenizer = load_tokenizer(name, config.trust_remote_code, fetched, checkpoint.described_at)
        phase.agree({"checkpoint": checkpoint.fingerprint(), "tokenizer": tokenizer_digest(tokenizer)})
        mesh = make_mesh(config.trainer.mesh_shape)
    date = fix_template_date(tokenizer, lambda: _kept_date(config, checkpoint), hosts.broadcast_from_leader)
    found: list[TaskResults | Exception] = []
    rounds = TaskRounds(
        "eval",
        config.tasks,
        dataclasses.replace(config.engine, max_seq_len=config.tasks.max_seq_len or config.engine.max_seq_len),
        tokenizer,
        lambda _, results: found.append(results),
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
                    output.write(_scored(rounds, found))
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


def name_tasks(arguments: Sequence[str]) -> list[str]:
    """The command line with a key before its first word, and names of tasks as the list that they are."""
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
        built = build_tracker(config.trainer.tracker, run_dir, name, draccus.encode(config))
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportConfig(CheckpointFields):
    """Settings of ``export``."""

    checkpoint: FilePath
    """The run directory of a training run, the directory or URL of its checkpoints, or one of them (``step-N``)."""
    output: FilePath
    """The directory or URL of the Hugging Face checkpoint; one that is there is replaced."""
    step: int | None = None
    """The number of completed steps of the checkpoint; null: the newest."""
    dtype: str | None = None
    """The float type of the tensors, ``float32`` or ``bfloat16``; null: as they are stored."""
    adapters: bool = False
    """Whether to write the adapters of a run with ``lora`` alone, as PEFT stores them, instead of the merged model."""
    distributed: DistributedConfig = dataclasses.field(default_factory=DistributedConfig)
    """The settings by which the processes find each other; each of several writes files of its own."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.dtype not in (None, *HF_DTYPES):
            raise ConfigError(f"dtype is {self.dtype!r}; it must be {' or '.join(HF_DTYPES)}, or null.")
        if self.adapters and (self.dtype or self.tokenizer):
            raise ConfigError(
                "adapters is true, so dtype and tokenizer have no effect: PEFT takes both from the base "
                "model. Remove them."
            )
        for name in ("checkpoint", "output"):
            if not getattr(self, name):
                raise ConfigError(f"{name} is empty. Give a directory or a URL.")


def run_export(arguments: Sequence[str]) -> int:
    """Export as the command line says."""
    config = parse_arguments(
        ExportConfig,
        name_words(arguments, ["checkpoint", "output"], "lockstep export CHECKPOINT OUTPUT [--key VALUE ...]"),
    )
    return export(config, _join(config.distributed))


@giving_back_leases()
def export(config: ExportConfig, hosts: Hosts) -> int:
    """Export; every process makes the same call."""
    asked = [config.checkpoint, config.output, config.step, config.dtype, config.adapters, config.tokenizer]
    asked += [config.base_model]
    hosts.agree("config", {"config": digest(repr(asked))})
    start_s = time.monotonic()

    def fetch() -> bytes:
        model = saved_model(config.checkpoint, config.step, config.base_model)
        name = config.tokenizer or model.tokenizer
        return fetch_tokenizer(name, config.trust_remote_code, model.described_at)

    fetched = hosts.broadcast_from_leader("tokenizer", fetch, HUB_WAIT_S)
    with hosts.run_on_all("reading the checkpoint's metadata") as phase:
        model = saved_model(config.checkpoint, config.step, config.base_model)
        name = config.tokenizer or model.tokenizer
        tokenizer = load_tokenizer(name, config.trust_remote_code, fetched, model.described_at)
        phase.agree({"checkpoint": model.fingerprint()})
        if config.adapters and model.adapters is None:
            raise ConfigError(
                f"adapters is true, and {model.path} has none: its run trained the whole model. Remove it."
            )
        # PEFT loads the base that is named beside the adapters, which may be elsewhere; a merged model needs it now.
        base, read = (model.base(), None) if config.adapters else ("", model.reader())
    with hosts.run_on_all("output", "writing to output"):
        if hosts.is_leader:
            place = save_target(config.output, secrets.token_hex(4))
            place.check()
            take_lease(config.output, file=place.lease, fix="output")
            log.info("exporting %s", model.path)
    if read is None:
        with hosts.run_on_all("writing the adapters", "exporting"):
            if hosts.is_leader:
                assert model.adapters is not None
                lora = model.adapters.lora
                with leader_only():
                    save_peft(config.output, model.config, lora, without_credentials(base), model.pair_reader())
                print_lines(without_credentials(f"exported the adapters of {model.path} to {config.output}"))
        return 0
    export_hf(
        model.skeleton(),
        read,
        config.output,
        tokenizer=tokenizer,
        dtype=config.dtype,
        vocab_size=model.vocab_size,
        hosts=hosts,
    )
    if hosts.is_leader:
        path, output = without_credentials(model.path), without_credentials(config.output)
        print_lines(
            f"exported {path} to {output} in {time.monotonic() - start_s:.1f} s",
            f"try next:\n  lockstep sample --hf_checkpoint {output} --prompts '[\"your prompt\"]'",
        )
    return 0
