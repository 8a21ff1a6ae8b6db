"""The launcher's own lines, and a platform that does not answer."""

import errno
import io

import pytest

from lockstep.exits import REFUSED, UNREACHABLE
from lockstep.launch.backend import Console, LaunchError, Patience


def test_what_the_launcher_says_of_a_worker_moves_no_terminal_and_has_no_credentials(capsys):
    Console().say("worker a: gone \x1b[2J\x07 at s3://key:hush@bucket/a?sig=hush\nagain")
    assert capsys.readouterr().err == "launch: worker a: gone \\x1b[2J\\x07 at s3://bucket/a?…\nlaunch: again\n"


def test_an_error_of_all_processes_is_shown_once_and_one_of_a_process_as_often_as_it_comes(capsys):
    console = Console()
    for number in (b"1", b"2"):
        for process in range(3):
            console.line(process, b"error: no answer")
            console.line(process, b"try " + number)
    console.line(1, b"error: no answer")
    for process in range(2):
        console.line(process, b"error: disk %d is full" % process)
    shown = capsys.readouterr().out.splitlines()
    once = ["[0] error: no answer"]
    tries = [[f"[{process}] try {number}" for process in range(3)] for number in (1, 2)]
    others = ["[1] error: no answer", "[0] error: disk 0 is full", "[1] error: disk 1 is full"]
    assert shown == once + tries[0] + once + tries[1] + others


def test_what_the_launcher_says_is_in_its_log_where_its_terminal_was_closed(monkeypatch, tmp_path):
    class Closed(io.StringIO):
        def write(self, text):
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("sys.stderr", Closed())
    Console(log=tmp_path / "launcher.log").say("withdrawing the request")
    assert (tmp_path / "launcher.log").read_text() == "launch: withdrawing the request\n"


def raise_(error):
    raise error


def test_it_is_asked_again_and_said_once(capsys):
    patience = Patience(Console())
    away = LaunchError("no answer", UNREACHABLE)
    assert [patience.look(lambda: raise_(away)) for _ in range(3)] == [None] * 3
    assert patience.look(lambda: 7) == 7
    shown = capsys.readouterr().err
    assert shown.count("no answer") == 1 and shown.count("it answers again") == 1


def test_not_for_ever_and_not_after_a_refusal(monkeypatch):
    patience = Patience(Console())
    with pytest.raises(LaunchError, match="may not"):
        patience.look(lambda: raise_(LaunchError("may not", REFUSED)))
    monkeypatch.setattr("lockstep.launch.backend.LIMIT_S", -1.0)
    with pytest.raises(LaunchError, match="no answer"):
        patience.look(lambda: raise_(LaunchError("no answer", UNREACHABLE)))
