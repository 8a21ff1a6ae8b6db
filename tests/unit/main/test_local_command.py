import pytest

from lockstep.errors import ConfigError, LockstepError
from lockstep.main.local_command import Arguments, run_locally


def failing(error):
    def command():
        raise error

    return command


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (LockstepError("rows:3: not JSON"), 1, "error: rows:3: not JSON\n"),
        (ConfigError("no"), 1, "error: no\n"),
        (PermissionError(13, "Permission denied", "x"), 1, "error: [Errno 13] Permission denied: 'x'\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_errors_are_a_line(error, code, text, capsys):
    assert run_locally(failing(error)) == code
    assert capsys.readouterr().err == text


def test_our_own_mistakes_keep_their_stack():
    with pytest.raises(KeyError):
        run_locally(failing(KeyError("x")))


def test_arguments_are_not_guessed():
    parser = Arguments("tail", "text")
    parser.add_argument("--interval")
    with pytest.raises(ConfigError, match=r"unrecognized arguments: --int 3\. See lockstep tail --help\."):
        parser.parse_args(["--int", "3"])
