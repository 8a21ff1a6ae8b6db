"""The commands that are processes of a job: ``train-*``, ``sample``, ``eval`` and ``export``."""

import functools
import json
import logging
import re
from collections.abc import Sequence

from lockstep.batch_inference import EvalConfig, SampleConfig, evaluate
from lockstep.batch_inference import sample as run_sample
from lockstep.hosts import DistributedConfig, Hosts, start
from lockstep.main.arguments import name_words, parse_arguments
from lockstep.printable import show_log
from lockstep.training import (
    ExportConfig,
    TrainConfig,
    TrainGrpoConfig,
    TrainLmConfig,
    TrainPreferenceConfig,
    TrainSimpoConfig,
    export,
)
from lockstep.training import train as run_train


def train(cls: type[TrainConfig], arguments: Sequence[str]) -> int:
    """Train as the command line says; the exit code is that of `lockstep.training.train`."""
    config = parse_arguments(cls, [re.sub(r"^--resume(?==|$)", "--trainer.resume", argument) for argument in arguments])
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


def run_eval(arguments: Sequence[str]) -> int:
    """Evaluate as the command line says."""
    config = parse_arguments(EvalConfig, name_tasks(arguments))
    return evaluate(config, _join(config.trainer.distributed))


def name_tasks(arguments: Sequence[str]) -> list[str]:
    """The command line with a key before its first word, and names of tasks as the list that they are."""
    changed: list[str] = []
    rest = name_words(arguments, ["checkpoint"], "lockstep eval CHECKPOINT --tasks TASK[,TASK...]")
    while rest:
        key, equals, value = rest.pop(0).partition("=")
        if not equals:
            value = rest.pop(0) if rest and not rest[0].startswith("--") else ""
        if key == "--tasks" and value and value[0] not in "{[":
            value = json.dumps([task.strip() for task in value.split(",")])
        changed += ["--tasks.names" if key == "--tasks" and value[:1] == "[" else key, *([value] if value else [])]
    return changed


def run_export(arguments: Sequence[str]) -> int:
    """Export as the command line says."""
    config = parse_arguments(
        ExportConfig,
        name_words(arguments, ["checkpoint", "output"], "lockstep export CHECKPOINT OUTPUT [--key VALUE ...]"),
    )
    return export(config, _join(config.distributed))
