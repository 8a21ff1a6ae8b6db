import argparse

import pytest

from lockstep.errors import ConfigError
from lockstep.main.reader_arguments import Arguments, seconds


def test_arguments_are_not_guessed():
    parser = Arguments("tail", "text")
    parser.add_argument("--interval")
    with pytest.raises(ConfigError, match=r"unrecognized arguments: --int 3\. See lockstep tail --help\."):
        parser.parse_args(["--int", "3"])


@pytest.mark.parametrize("text", ["0", "x", "nan", "-1", "1e9"])
def test_seconds_have_a_range(text):
    assert seconds("0.1") == 0.1
    with pytest.raises(argparse.ArgumentTypeError, match="is not a number of seconds from 0.1 to 86400"):
        seconds(text)
