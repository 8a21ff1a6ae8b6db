"""The table of commands: what it names is there, and the rest is made from it."""

import argparse
import dataclasses
import importlib
import subprocess
import sys

import pytest

from lockstep.errors import ConfigError, LockstepError
from lockstep.hosts import Hosts, MemoryClient
from lockstep.main.commands import COMMANDS, Arguments, configured_commands, find_command, planned_commands, seconds
from tests import tiny
from tests.tasks import write_tasks


def test_arguments_are_not_guessed():
    parser = Arguments("tail", lambda parser: parser.add_argument("--interval"))
    with pytest.raises(ConfigError, match=r"unrecognized arguments: --int 3\. See lockstep tail --help\."):
        parser.parse_args(["--int", "3"])


@pytest.mark.parametrize("text", ["0", "x", "nan", "-1", "1e9"])
def test_seconds_have_a_range(text):
    assert seconds("0.1") == 0.1
    with pytest.raises(argparse.ArgumentTypeError, match="is not a number of seconds from 0.1 to 86400"):
        seconds(text)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_what_a_row_names_is_there(command):
    for name in filter(None, (command.function, command.options, command.workload_function)):
        module, _, function = name.partition(":")
        assert callable(getattr(importlib.import_module(module), function))
    if command.config_class is not None:
        assert dataclasses.is_dataclass(command.config())


def test_what_can_be_planned_has_a_configuration():
    assert set(planned_commands()) <= set(configured_commands())
    assert len({command.name for command in COMMANDS}) == len(COMMANDS)


def test_an_unknown_command_lists_the_known_ones():
    with pytest.raises(
        ConfigError, match=r"unknown command 'trian'\. .*Known commands: demo, train-lm, .*plan, .*See lockstep"
    ):
        find_command("trian")
    with pytest.raises(ConfigError, match="'train_lm'. Did you mean train-lm. Known"):
        find_command("train_lm")


def test_the_table_imports_no_command():
    """``lockstep --help`` must not import what only a command needs."""
    modules = "set(sys.modules) & {'lockstep.plan', 'lockstep.training', 'lockstep.main.runs'}"
    text = f"import sys, lockstep.main.cli as cli; cli.run(['--help']); assert not ({modules}), {modules}"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


RUN_DIR = "--trainer.log_dir"
TRAIN = "lockstep.training.run.config:load_tokenizer"
SAMPLE = "lockstep.batch_inference.run:load"
EVALUATE = "lockstep.batch_inference.evaluation:load"
ASKED = ["--checkpoint_path", "CHECKPOINT", "--prompts", "[one]", "--max_new_tokens", "4"]
TASKS = ["CHECKPOINT", "--tasks", "own_words", "--tasks.task_dir", "TASKS"]
OUTPUTS = [
    ("demo", ["--directory"], "lockstep.main.demo:launch"),
    ("train-lm", ["--config_path", "config/demo.yaml", RUN_DIR], TRAIN),
    ("train-preference", ["--config_path", "config/dpo_tiny.yaml", RUN_DIR], TRAIN),
    ("train-simpo", ["--config_path", "config/simpo_tiny.yaml", RUN_DIR], TRAIN),
    ("train-grpo", ["--config_path", "config/grpo_demo.yaml", RUN_DIR], TRAIN),
    ("sample", [*ASKED, RUN_DIR], SAMPLE),
    ("sample", [*ASKED, "--host_data_parallel_output_dir"], SAMPLE),
    ("eval", [*TASKS, RUN_DIR], EVALUATE),
    (
        "eval",
        [*TASKS, "--trainer.tracker", "{type: tensorboard, logdir: OUTPUT}"],
        "lockstep.batch_inference.evaluation:load",
    ),
    ("export", ["CHECKPOINT", "OUTPUT"], "lockstep.training.checkpoints.export:export_hf"),
    ("report", ["data/demo", "--output"], "lockstep.report.page_file:make_payload"),
    ("convert", ["ROWS", "--format", "parquet", "--output"], "lockstep.report.row_formats:_columns"),
    ("convert", ["ROWS", "--format", "inspect", "--output"], "lockstep.report.convert:write_inspect_log"),
    ("plan", ["--config_path", "config/demo.yaml", "--topology", "v5p-8", "--json"], "lockstep.main.prepare:make_plan"),
    ("check", ["--json", "OUTPUT", "--", "true"], "lockstep.main.check:check_command"),
    ("check", ["--html", "OUTPUT", "--", "true"], "lockstep.main.check:check_command"),
    ("doctor", ["--json"], "lockstep.doctor.examine:measure_coordination"),
    ("doctor", ["--calibrate"], "lockstep.doctor.examine:measure_coordination"),
    ("launch", ["--prefix", "always", "--log_dir", "OUTPUT", "--", "true"], "lockstep.launch.machines:LocalJob"),
]
"""Command, its words (the output comes last where they do not say where), and the beginning of its long work."""
WITHOUT_OUTPUT = {"tail", "completion", "data"}


def test_every_command_with_an_output_is_among_them():
    assert {name for name, _, _ in OUTPUTS} | WITHOUT_OUTPUT == {command.name for command in COMMANDS}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    directory = tmp_path_factory.mktemp("inputs")
    tiny.save_checkpoint(str(directory / "checkpoints"))
    (directory / "samples.jsonl").write_text('{"step": 0, "prompt_id": 0}\n')
    return {
        "CHECKPOINT": str(directory / "checkpoints"),
        "TASKS": write_tasks(directory / "tasks"),
        "ROWS": str(directory / "samples.jsonl"),
    }


@pytest.mark.parametrize(
    ("name", "words", "work"),
    [pytest.param(*output, marks=pytest.mark.slow if output[0] == "eval" else ()) for output in OUTPUTS],
    ids=lambda value: value if isinstance(value, str) else value[-1],
)
def test_an_output_that_cannot_be_written_is_refused_before_the_work(
    name, words, work, inputs, tmp_path, monkeypatch, capsys
):
    (tmp_path / "file").touch()
    output = str(tmp_path / "file" / "output")
    module, _, function = work.partition(":")
    monkeypatch.setattr(importlib.import_module(module), function, lambda *_, **__: pytest.fail("the work began"))
    monkeypatch.setattr("lockstep.main.runs._join", lambda _: Hosts(MemoryClient.hub(1)[0]))
    monkeypatch.setattr("lockstep.main.results.show_log", lambda _: None)
    monkeypatch.setattr("lockstep.main.prepare.show_log", lambda _: None)
    given = [inputs.get(word, word.replace("OUTPUT", output)) for word in words]
    if given == [inputs.get(word, word) for word in words]:
        given.append(output)
    try:
        assert find_command(name).run(given) != 0
        said = capsys.readouterr().err  # the launcher has its own main
    except LockstepError as error:
        said = str(error)
    assert str(tmp_path / "file") in said
