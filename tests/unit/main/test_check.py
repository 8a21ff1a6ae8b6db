import os
import signal
import time

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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_processes_too(number, monkeypatch):
    ended = []

    def check_command(command, **options):
        try:
            os.kill(os.getpid(), number)
            time.sleep(60)
        finally:
            ended.append(command)

    monkeypatch.setattr("lockstep.main.check.check_command", check_command)
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # a run of the tests may be under nohup
    try:
        assert main(["--", "python", "x.py"]) == 128 + number and ended == [["python", "x.py"]]
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)


def test_help_of_the_checked_command_is_its_own(capsys):
    assert run(["check", "--help"]) == 0
    assert "--stall_s" in capsys.readouterr().out
