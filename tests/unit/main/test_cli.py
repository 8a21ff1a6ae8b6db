"""The command line."""

import signal
import subprocess
import sys

import pytest

from lockstep.errors import ConfigError
from lockstep.launch import without_debug
from lockstep.main import cli
from lockstep.main.commands import COMMANDS


def test_commands(capsys):
    assert cli.run(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {command.name} " in shown and command.summary in shown for command in COMMANDS)
    assert cli.run([]) == 2
    with pytest.raises(ConfigError, match="unknown command 'train'. Known commands: demo, train-lm, .*train-simpo"):
        cli.run(["train"])
    assert cli.run(["train-simpo", "--help"]) == 0
    assert "--gamma_beta_ratio" in capsys.readouterr().out


def test_version(capsys):
    assert cli.run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("lockstep 0.")


@pytest.mark.parametrize("arguments", [["--help", "trainer"], ["--config_path", "none.yaml", "-h", "trainer"]])
def test_help_of_one_block(capsys, arguments):
    assert cli.run(["train-lm", *arguments]) == 0
    shown = capsys.readouterr().out
    assert "--trainer.seed" in shown and "--inference_eval.seed" not in shown


def test_help_after_another_programs_words_is_that_programs(monkeypatch):
    given = []
    monkeypatch.setattr("lockstep.main.runs.run_export", lambda arguments: given.append(arguments) or 0)
    assert cli.run(["export", "--", "python", "--help"]) == 0
    assert given == [["--", "python", "--help"]]


@pytest.mark.parametrize(
    ("arguments", "rest", "debug"),
    [
        (["sample", "--debug", "--seed", "1"], ["sample", "--seed", "1"], True),
        (["sample", "--seed", "1"], ["sample", "--seed", "1"], False),
        (["launch", "--", "lockstep", "--debug"], ["launch", "--", "lockstep", "--debug"], False),
        (["launch", "--debug", "--", "lockstep", "--debug"], ["launch", "--", "lockstep", "--debug"], True),
    ],
)
def test_debug_is_taken_from_the_words_of_the_command_itself(arguments, rest, debug):
    assert without_debug(arguments) == (rest, debug)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
@pytest.mark.parametrize("debug", [False, True])
def test_a_mistake_in_any_command_is_a_line_and_for_debugging_a_stack(monkeypatch, capsys, command, debug):
    def mistaken(self, arguments):
        raise ConfigError(f"{self.name} was given {arguments}")

    monkeypatch.setattr("lockstep.main.commands.Command.run", mistaken)
    words = ["--a", "1", *(["--debug"] if debug else [])]
    monkeypatch.setattr(sys, "argv", ["lockstep", command.name, *words])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 1
    printed = capsys.readouterr().err
    given = words if command.own_help else words[:2]
    assert printed.splitlines()[-1] == f"error: {command.name} was given {given}"
    assert ("Traceback" in printed) == debug


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "code"), [(["--help"], 0), (["completion", "bash"], 128 + signal.SIGPIPE)], ids=["help", "completion"]
)
def test_a_reader_that_leaves_early_sees_no_error(words, code):
    command = [sys.executable, "-c", "from lockstep.main.cli import main; main()", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert (process.stderr.read(), process.wait()) == (b"", code)
