"""How run_main ends a process."""

import errno
import subprocess
import sys

import pytest

from lockstep.errors import CapacityError, ConfigError, HbmError, PeerError, PromptError
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


def peer_error(cause: Exception) -> PeerError:
    error = PeerError("'prepare' failed on process 0: " + str(cause))
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("page_size is 0"),
        PromptError("prompt 3 is empty"),
        CapacityError("a request of 900 tokens never fits"),
        HbmError("the train step needs 99 GiB"),
        peer_error(ConfigError("page_size is 0")),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("debug", [False, True])
def test_what_a_user_can_mend_has_its_stack_only_for_debugging(capsys, error, debug):
    with pytest.raises(SystemExit) as caught:
        run_main(lambda: fail(error), debug=debug)
    assert caught.value.code == 1
    printed = capsys.readouterr().err
    text = error.__cause__ or error
    assert printed.endswith(f"error: {text}\n") and ("in fail" in printed) == debug
    assert ("Traceback" in printed) == debug


@pytest.mark.parametrize("wrapped", [lambda error: error, peer_error], ids=["alone", "on all"])
@pytest.mark.parametrize("debug", [False, True])
def test_a_full_disk_has_no_stack(capsys, wrapped, debug):
    with pytest.raises(SystemExit):
        run_main(lambda: fail(wrapped(OSError(errno.ENOSPC, "No space left", "rows"))), debug=debug)
    printed = capsys.readouterr().err
    assert printed.endswith("No space left: 'rows'. Free space there, or choose another place.\n")
    assert ("Traceback" in printed) == debug and (printed.count("\n") == 1) != debug


@pytest.mark.parametrize("debug", [False, True])
def test_what_nobody_foresaw_always_has_its_stack(capsys, debug):
    with pytest.raises(SystemExit):
        run_main(lambda: fail(peer_error(KeyError("oops"))), debug=debug)
    printed = capsys.readouterr().err
    assert "KeyError: 'oops'" in printed and printed.splitlines()[-1].startswith("error: 'prepare' failed")
    assert ("lockstep.errors.PeerError" in printed) == debug


COLLECTED = """
import gc, os, signal, time
from lockstep.hosts import run_main
sent = []
def callback(phase, info):
    if not sent:
        sent.append(phase)
        os.kill(os.getpid(), signal.{name})
def main():
    gc.callbacks.append(callback)
    gc.collect()
    time.sleep(60)
run_main(main)
"""


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGHUP", 129), ("SIGINT", 130)])
def test_a_signal_in_a_callback_of_the_garbage_collector_is_not_lost(name, code):
    """Python drops the exceptions of such a callback, and JAX has one."""
    done = subprocess.run([sys.executable, "-c", COLLECTED.format(name=name)], capture_output=True, text=True)
    assert done.returncode == code and "Exception ignored" not in done.stderr, done.stderr


def test_a_signal_that_is_ignored_stays_so():
    """SIGHUP under nohup; libtpu has it ignored too, but where a handler is."""
    script = "import os, signal; signal.signal(signal.SIGHUP, signal.SIG_IGN); from lockstep.hosts import run_main; "
    script += "run_main(lambda: (os.kill(os.getpid(), signal.SIGHUP), 3)[1])"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 3
