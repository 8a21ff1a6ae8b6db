"""The table of commands: what it names is there, and the rest is made from it."""

import argparse
import dataclasses
import importlib
import subprocess
import sys

import pytest

from lockstep.errors import ConfigError
from lockstep.main.commands import COMMANDS, Arguments, configured_commands, find_command, planned_commands, seconds


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
        ConfigError, match=r"unknown command 'trian'\. Known commands: demo, train-lm, .*plan, .*See lockstep"
    ):
        find_command("trian")


def test_the_table_imports_no_command():
    """``lockstep --help`` must not import what only a command needs."""
    modules = "set(sys.modules) & {'lockstep.main.plan', 'lockstep.training', 'lockstep.main.runs'}"
    text = f"import sys, lockstep.main.cli as cli; cli.run(['--help']); assert not ({modules}), {modules}"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
