import pytest

from lockstep.errors import ConfigError
from lockstep.main.check import main
from lockstep.main.cli import run


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--processes", "2"], "has no command"),
        (["--processes", "1", "--", "python", "x.py"], "at least 2 processes"),
        (["--ignore", "nothing", "--", "python", "x.py"], "invalid choice"),
        (["python", "x.py"], "unrecognized arguments"),
        (["--json", "/dev/null/where/found.json", "--", "python", "x.py"], "where/found.json cannot be written"),
    ],
)
def test_what_cannot_work_is_said(arguments, said):
    with pytest.raises(ConfigError, match=said):
        main(arguments)


def test_help_of_the_checked_command_is_its_own(capsys):
    assert run(["check", "--help"]) == 0
    assert "--stall_s" in capsys.readouterr().out
