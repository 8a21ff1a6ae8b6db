"""The commands: one table, from which the command line, ``lockstep plan`` and the configuration page are made.

It is plain text until a command is chosen: a command's module, which imports what the command needs, is imported then.
"""

import dataclasses
import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from lockstep.errors import ConfigError

if TYPE_CHECKING:
    from lockstep.plan import Workload


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """One command of ``lockstep``.

    Args:
        name: The word after ``lockstep``.
        summary: What the command does, in a line of ``lockstep --help``.
        module: The module with its ``main(arguments) -> exit code``.
        config_class: The name of its configuration's dataclass in that module; None: it has none of its own.
        workload_function: ``module:function`` that makes a `Workload` of (name, configuration, model), for
            ``lockstep plan``; None: the command cannot be planned.
        joins_job: Whether it can be a process of a job, whose end the others must learn of; False: jax is not loaded.
    """

    name: str
    summary: str
    module: str
    config_class: str | None = None
    workload_function: str | None = None
    joins_job: bool = True

    def run(self, arguments: Sequence[str]) -> int:
        """Run the command.

        Args:
            arguments: The command line after the command's name.

        Returns:
            The exit code.

        Raises:
            ConfigError: The configuration cannot work.
        """
        return int(importlib.import_module(self.module).main(arguments))

    def config(self) -> type[Any]:
        """The dataclass of the command's configuration."""
        assert self.config_class is not None, f"{self.name} has no configuration"
        cls: type[Any] = getattr(importlib.import_module(self.module), self.config_class)
        return cls

    def workload(self, config: Any, model: str | None = None) -> "Workload":
        """What a configuration asks of the devices.

        Args:
            config: A configuration of this command.
            model: The name or the checkpoint of a model that replaces the configuration's own; None: its own.

        Raises:
            ConfigError: The model's shape cannot be found, or values do not go together.
        """
        assert self.workload_function is not None, f"{self.name} cannot be planned"
        module, _, function = self.workload_function.partition(":")
        workload: Workload = getattr(importlib.import_module(module), function)(self.name, config, model)
        return workload


COMMANDS: Final = (
    Command(
        name="train-lm",
        summary="train a language model on text, completions or chats",
        module="lockstep.main.train_lm",
        config_class="TrainLmConfig",
        workload_function="lockstep.main.plan_workload:training_workload",
    ),
    Command(
        name="train-simpo",
        summary="train on preference pairs with SimPO",
        module="lockstep.main.train_simpo",
        config_class="TrainSimpoConfig",
        workload_function="lockstep.main.plan_workload:training_workload",
    ),
    Command(
        name="train-grpo",
        summary="reinforcement learning with GRPO on questions with verifiable answers",
        module="lockstep.main.train_grpo",
        config_class="TrainGrpoConfig",
        workload_function="lockstep.main.plan_workload:training_workload",
    ),
    Command(
        name="sample",
        summary="answer prompts from a checkpoint, every prompt exactly once",
        module="lockstep.main.sample",
        config_class="SampleConfig",
        workload_function="lockstep.main.plan_workload:sampling_workload",
    ),
    Command(
        name="eval",
        summary="score a checkpoint by tasks of lm-evaluation-harness",
        module="lockstep.main.eval",
        config_class="EvalConfig",
    ),
    Command(
        name="convert",
        summary="write the rows of a run as Parquet or as logs of inspect_ai",
        module="lockstep.main.convert",
        config_class="ConvertConfig",
    ),
    Command(
        name="export",
        summary="make a Hugging Face checkpoint of a training checkpoint",
        module="lockstep.main.export",
        config_class="ExportConfig",
    ),
    Command(
        name="doctor",
        summary="look at machine, job and pod: what needs a fix, how fast they are, a self-test",
        module="lockstep.main.doctor",
        config_class="DoctorConfig",
    ),
    Command(
        name="plan",
        summary="compile a configuration for a TPU slice without a TPU: does it fit, how fast",
        module="lockstep.main.plan",
    ),
    Command(
        name="report",
        summary="make one HTML file of a run: prompts by steps, differences, curves; or of two runs",
        module="lockstep.main.report",
        joins_job=False,
    ),
    Command(
        name="tail",
        summary="show the newest samples and metrics of a run while it goes on",
        module="lockstep.main.tail",
        joins_job=False,
    ),
    Command(
        name="launch",
        summary="start a command on every worker of a TPU slice, a cluster or this machine",
        module="lockstep.launch",
        joins_job=False,
    ),
)
"""Every command, in the order of ``lockstep --help``."""


def find_command(name: str) -> Command:
    """The command of a name.

    Args:
        name: The word after ``lockstep``.

    Raises:
        ConfigError: There is no such command.
    """
    for command in COMMANDS:
        if command.name == name:
            return command
    known = ", ".join(command.name for command in COMMANDS)
    raise ConfigError(f"unknown command {name!r}. Known commands: {known}. See lockstep --help.")


def configured_commands() -> dict[str, Command]:
    """The commands that have a configuration of their own, by name."""
    return {command.name: command for command in COMMANDS if command.config_class is not None}


def planned_commands() -> dict[str, Command]:
    """The commands that ``lockstep plan`` can plan, by name."""
    return {command.name: command for command in COMMANDS if command.workload_function is not None}
