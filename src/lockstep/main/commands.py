"""The commands: one table, from which the command line, ``lockstep plan`` and the configuration page are made.

It is plain text until a command is chosen: a command's module, which imports what the command needs, is imported then.
"""

import argparse
import dataclasses
import difflib
import importlib
import signal
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, NoReturn

from lockstep.errors import ConfigError

if TYPE_CHECKING:
    from lockstep.plan import Workload


class Arguments(argparse.ArgumentParser):
    """A parser whose errors are those of a configuration; the help is `lockstep.main.help`'s."""

    def __init__(self, command: str, add_options: Callable[[argparse.ArgumentParser], None]) -> None:
        super().__init__(prog=f"lockstep {command}", allow_abbrev=False, add_help=False)
        add_options(self)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}. See {self.prog} --help.")


def seconds(text: str) -> float:
    """Return a time of at least a tenth of a second, as an argument has it."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.1 <= value <= 86_400:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0.1 to 86400")
    return value


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """One command of ``lockstep``."""

    name: str
    purpose: str
    summary: str
    function: str  # `module:function` of `(arguments) -> exit code`, as those below
    example: str  # a command line; lines after the first are indented
    usage: str = "[--config_path FILE.yaml] [--key.in.dots VALUE ...]"  # what goes after its name
    description: str = ""  # in more words than the summary
    options: str | None = None  # adds what is no key to an argparse parser
    own_help: bool = False  # whether it prints its help itself: it depends on the other arguments
    config_class: str | None = None  # its configuration's dataclass
    workload_function: str | None = None  # makes a `Workload` for `lockstep plan`
    joins_job: bool = True  # whether it is a process of a job, and loads jax

    def run(self, arguments: Sequence[str]) -> int:
        function = _load(self.function)
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # as `lockstep.main.cli.main` has it until here
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return int(function(arguments))

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Add what it can be given beside keys."""
        if self.options is not None:
            _load(self.options)(parser)

    @property
    def reads_config(self) -> bool:
        """Whether it reads ``--config_path`` and keys of a configuration, its own or another command's."""
        return "--config_path" in self.usage

    def config(self) -> type[Any]:
        assert self.config_class is not None, f"{self.name} has no configuration"
        cls: type[Any] = _load(self.config_class)
        return cls

    def workload(self, config: Any, model: str | None = None) -> "Workload":
        """The workload of a configuration; ``model``, a name or a checkpoint, replaces the configuration's own."""
        assert self.workload_function is not None, f"{self.name} cannot be planned"
        workload: Workload = _load(self.workload_function)(self.name, config, model)
        return workload


def _load(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


BEGIN: Final = "begin here"
TRAIN: Final = "train"
SAMPLE: Final = "sample from a checkpoint"
LOOK: Final = "look at results"
PREPARE: Final = "prepare a run"
POD: Final = "on many machines"
SHELL: Final = "set up a shell"

COMMANDS: Final = (
    Command(
        name="demo",
        purpose=BEGIN,
        summary="train a small model on this machine in a minute or two, and watch it learn",
        function="lockstep.main.demo:main",
        example="lockstep demo --processes 4",
        usage="[options]",
        description="Trains a small model on this machine's CPU and shows what it answers while it learns. It runs as "
        "a job on a pod does: several processes, each with a part of the weights, which sample in lockstep. "
        "Configuration and data are written to a directory, to be changed and run again.",
        options="lockstep.main.demo:add_options",
        joins_job=False,
    ),
    Command(
        name="train-lm",
        purpose=TRAIN,
        summary="train a language model on text, completions or chats",
        function="lockstep.main.runs:train_lm",
        example="lockstep train-lm --config_path config/demo.yaml --trainer.num_train_steps 100",
        config_class="lockstep.main.runs:TrainLmConfig",
        workload_function="lockstep.plan.workload:training_workload",
    ),
    Command(
        name="train-preference",
        purpose=TRAIN,
        summary="train on preferences with DPO, KTO, ORPO, CPO, SimPO or a loss of your own",
        function="lockstep.main.runs:train_preference",
        example="lockstep train-preference --config_path config/dpo_tiny.yaml --objective.beta 0.3",
        config_class="lockstep.main.runs:TrainPreferenceConfig",
        workload_function="lockstep.plan.workload:training_workload",
    ),
    Command(
        name="train-simpo",
        purpose=TRAIN,
        summary="train on preference pairs with SimPO",
        function="lockstep.main.runs:train_simpo",
        example="lockstep train-simpo --config_path config/simpo_tiny.yaml --inference_eval.eval_every 10",
        config_class="lockstep.main.runs:TrainSimpoConfig",
        workload_function="lockstep.plan.workload:training_workload",
    ),
    Command(
        name="train-grpo",
        purpose=TRAIN,
        summary="reinforcement learning with GRPO on questions with verifiable answers",
        function="lockstep.main.runs:train_grpo",
        example="lockstep train-grpo --config_path config/grpo_gsm8k_qwen25_3b_v6e_8.yaml --trainer.seed 1",
        config_class="lockstep.main.runs:TrainGrpoConfig",
        workload_function="lockstep.plan.workload:training_workload",
    ),
    Command(
        name="sample",
        purpose=SAMPLE,
        summary="answer prompts from a checkpoint, every prompt exactly once",
        function="lockstep.main.runs:sample",
        example="lockstep sample --hf_checkpoint path/to/Llama-3.1-8B-Instruct --prompts questions.jsonl",
        config_class="lockstep.main.runs:SampleConfig",
        workload_function="lockstep.plan.workload:sampling_workload",
    ),
    Command(
        name="eval",
        purpose=SAMPLE,
        summary="score a checkpoint by tasks of lm-evaluation-harness",
        function="lockstep.main.runs:run_eval",
        example="lockstep eval path/to/Llama-3.1-8B-Instruct --tasks gsm8k,arc_easy",
        usage="CHECKPOINT --tasks TASK[,TASK...] [--config_path FILE.yaml] [--key VALUE ...]",
        description="Scores a checkpoint by tasks of lm-evaluation-harness. CHECKPOINT is a Hugging Face checkpoint or "
        "one of a training run, a directory or a URL. A task is one of the harness, or the path of a file of your own.",
        config_class="lockstep.batch_inference:EvalConfig",
    ),
    Command(
        name="export",
        purpose=SAMPLE,
        summary="make a Hugging Face checkpoint of a training checkpoint",
        function="lockstep.main.runs:run_export",
        example="lockstep export runs/my-run exported --dtype bfloat16",
        usage="CHECKPOINT OUTPUT [--config_path FILE.yaml] [--key VALUE ...]",
        description="Makes a Hugging Face checkpoint of a training checkpoint. CHECKPOINT is a run directory, the "
        "directory or URL of its checkpoints, or one of them. No device is needed.",
        config_class="lockstep.training:ExportConfig",
    ),
    Command(
        name="report",
        purpose=LOOK,
        summary="make one HTML file of a run: prompts by steps, differences, curves; or of two runs",
        function="lockstep.main.results:run_report",
        example="lockstep report runs/my-run runs/another-run --output compared.html",
        usage="RUN [RUN] [options]",
        description="Makes one HTML file of a run: what the model said to every prompt at every step, what changed, "
        "the curves. It needs no network and nothing beside it, so it can be mailed. Two runs are shown side by side. "
        "RUN is a run's directory (runs/my-run), or a file of rows such as samples.jsonl or rollouts.jsonl.",
        options="lockstep.main.results:add_report_options",
        joins_job=False,
    ),
    Command(
        name="tail",
        purpose=LOOK,
        summary="show the newest samples and metrics of a run while it goes on",
        function="lockstep.main.results:run_tail",
        example="lockstep tail runs/my-run --rows 4",
        usage="RUN [options]",
        description="Shows the newest samples and the newest value of every metric of a run, and goes on as the run "
        "does. At a terminal they stay in place; in a log every new sample and every new set of metrics is a line. "
        "RUN is a run's directory (runs/my-run), or a file of its rows.",
        options="lockstep.main.results:add_tail_options",
        joins_job=False,
    ),
    Command(
        name="convert",
        purpose=LOOK,
        summary="write the rows of a run as Parquet or as logs of inspect_ai",
        function="lockstep.main.results:run_convert",
        example="lockstep convert runs/my-run --format inspect",
        usage="RUN --format parquet|inspect [--output PATH]",
        description="Writes the rows of a run as Parquet, a file beside each file of rows, or as logs of inspect_ai, "
        "one for each step and task: inspect view --log-dir RUN/inspect. RUN is a run directory, or a file of its rows "
        "(.jsonl); of a directory the answers and the answers to tasks are written.",
        config_class="lockstep.report:ConvertConfig",
    ),
    Command(
        name="plan",
        purpose=PREPARE,
        summary="compile a configuration for a TPU slice without a TPU: does it fit, how fast",
        function="lockstep.main.prepare:run_plan",
        example="lockstep plan --config_path config/grpo_gsm8k_qwen25_3b_v6e_8.yaml --topology v6e-8",
        usage="--topology NAME [--config_path FILE.yaml] [options] [--key.in.dots VALUE ...]",
        description="Compiles the programs of a configuration (train step, moving the weights, prefill, decode) for a "
        "TPU slice, on a machine without a TPU: what fits, what is exchanged, how fast it can be at best. Exit code 0 "
        "if it fits, 1 if it does not. Keys of the configuration can be given too, and win over the file.",
        options="lockstep.main.prepare:add_plan_options",
    ),
    Command(
        name="data",
        purpose=PREPARE,
        summary="look at training data as the model will see it: ends, masks, thoughts, duplicates, cut rows",
        function="lockstep.main.data:run_data",
        example="lockstep data --check --config_path config/demo.yaml",
        usage="--check [FILE ...] [--config_path FILE.yaml] [options] [--key.in.dots VALUE ...]",
        description="Makes tokens of training data as a run would, with its tokenizer, chat template and lengths, says "
        "how many examples are wrong in which way, and shows five with their loss masks. Without --config_path, FILE "
        "and --tokenizer say what is looked at. Exit code 1 if a run would be refused, else 0.",
        options="lockstep.main.data:add_options",
    ),
    Command(
        name="check",
        purpose=PREPARE,
        summary="run any JAX script on simulated processes and find what would stop it on a pod",
        function="lockstep.main.check:main",
        example="lockstep check --processes 2 --devices_per_process 2 -- python train.py --steps 5",
        usage="[options] -- command [arguments]",
        description="Runs a command as several processes with CPU devices, sees every launch of a device program on "
        "each and compares them: what would hang or fail on a pod, with the source line on every process. Exit code 0 "
        "if nothing was found, else 1.",
        options="lockstep.main.check:add_options",
        joins_job=False,
    ),
    Command(
        name="doctor",
        purpose=PREPARE,
        summary="look at machine, job and pod: what needs a fix, how fast they are, a self-test",
        function="lockstep.main.prepare:run_doctor",
        example="lockstep doctor --config_path config/simpo_tiny.yaml --self-test",
        usage="[--self-test] [--config_path FILE.yaml] [--key VALUE ...]",
        description="Looks at this machine, the processes of the job, their devices and what connects them; start it "
        "on every host as you would start a run. --config_path names the configuration of a run, and what that reaches "
        "for is looked at too; any key that is not listed here is one of that run's. Exit code 0 if nothing needs a "
        "fix, else 1.",
        config_class="lockstep.doctor:DoctorConfig",
    ),
    Command(
        name="launch",
        purpose=POD,
        summary="start a command on every worker of a TPU slice, a cluster or this machine",
        function="lockstep.launch:main",
        example="lockstep launch --processes 2 -- lockstep train-lm --config_path config/demo.yaml",
        usage="[run] [options] -- command [arguments]",
        options="lockstep.launch:add_all_options",
        own_help=True,
        joins_job=False,
    ),
    Command(
        name="completion",
        purpose=SHELL,
        summary="print what bash, zsh or fish needs to complete commands and keys",
        function="lockstep.main.help:completion",
        example="lockstep completion bash > ~/.local/share/bash-completion/completions/lockstep",
        usage="{bash,zsh,fish}",
        description="Prints the completion script of a shell. bash: see the example. zsh: lockstep completion zsh > "
        "~/.zfunc/_lockstep, where fpath has ~/.zfunc. fish: lockstep completion fish > "
        "~/.config/fish/completions/lockstep.fish. Make it again after an upgrade.",
        options="lockstep.main.help:add_options",
        joins_job=False,
    ),
)
"""Every command, in the order of ``lockstep --help``."""


def find_command(name: str) -> Command:
    """The command of a name."""
    for command in COMMANDS:
        if command.name == name:
            return command
    known = [command.name for command in COMMANDS]
    close = difflib.get_close_matches(name[:80], known, n=1)
    hint = f"Did you mean {close[0]}? " if close else ""
    raise ConfigError(f"unknown command {name!r}. {hint}Known commands: {', '.join(known)}. See lockstep --help.")


def configured_commands() -> dict[str, Command]:
    """The commands that have a configuration of their own, by name."""
    return {command.name: command for command in COMMANDS if command.config_class is not None}


def planned_commands() -> dict[str, Command]:
    """The commands that ``lockstep plan`` can plan, by name."""
    return {command.name: command for command in COMMANDS if command.workload_function is not None}
