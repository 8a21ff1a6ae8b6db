"""How run_main ends a process."""

import sys

import pytest

from lockstep.errors import ConfigError
from lockstep.hosts import run_main


def fail(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize(
    ("main", "code", "shown", "stack"),
    [
        (lambda: None, 0, "", False),
        (lambda: 3, 3, "", False),
        (lambda: fail(ConfigError("page_size is 0")), 1, "error: page_size is 0\n", False),
        (lambda: fail(OSError("disk")), 1, "OSError: disk\n", True),
        (lambda: sys.exit(4), 4, "", False),
        (lambda: sys.exit("what to do"), 1, "what to do\n", False),
        (lambda: sys.exit(), 0, "", False),
        (lambda: fail(KeyboardInterrupt()), 130, "", False),
    ],
)
def test_run_main(capsys, main, code, shown, stack):
    if code == 0:
        run_main(main)
    else:
        with pytest.raises(SystemExit) as caught:
            run_main(main)
        assert caught.value.code == code
    printed = capsys.readouterr().err
    assert printed.endswith(shown) and ("Traceback" in printed) == stack
