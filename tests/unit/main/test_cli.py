"""The command line."""

import pytest

from lockstep.errors import ConfigError
from lockstep.main import cli
from lockstep.main.commands import COMMANDS


def test_commands(capsys):
    assert cli.run(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {command.name} " in shown and command.summary in shown for command in COMMANDS)
    assert cli.run([]) == 2
    with pytest.raises(ConfigError, match="unknown command 'train'. Known commands: train-lm, .*train-simpo"):
        cli.run(["train"])
    assert cli.run(["train-simpo", "--help"]) == 0
    assert "--gamma_beta_ratio" in capsys.readouterr().out
