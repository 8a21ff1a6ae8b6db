"""Leaving a job promptly, so that one process that fails does not leave the others waiting for it.

Without this, a process that raises waits in JAX's own exit barrier for peers that wait for it (300 s), and one that
dies is only missed after ``heartbeat_timeout_s``. Measured on 2 processes: see tests/multiprocess/test_hosts.py.
"""

import signal
import sys
import threading
import traceback
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from lockstep.errors import ConfigError, HostError, PromptError
from lockstep.hosts.peers import end_process, say_goodbye
from lockstep.hosts.start import current, shutdown

INTERRUPTED_EXIT_CODE = 130


def run_main(main: Callable[[], object]) -> None:
    """Run a program's main function and leave the job in order, or at once when it fails.

    SIGTERM ends the program in the same way, with code 143, unless a handler of its own is there, as in `Trainer`.
    A ConfigError or PromptError is printed as its text, any other error with its stack; the peers are told, and the
    process ends. In a job of several processes it does so without Python's exit handlers.

    Args:
        main: the program; an int that it returns is the exit code.

    Raises:
        SystemExit: in a job of one process, with the code of the failure; never when ``main`` returns None or 0.
    """
    code, text = 0, ""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        # Python's default ends the process without a word to its peers, who would wait for it.
        signal.signal(signal.SIGTERM, _terminate)
    try:
        result = main()
        code = result if isinstance(result, int) else 0
        text = f"exit code {code}"
        if code == 0:
            shutdown()
    except KeyboardInterrupt:
        code, text = INTERRUPTED_EXIT_CODE, "interrupted"
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        text = f"exit code {code}"
        if isinstance(error.code, str):
            text = error.code
            print(text, file=sys.stderr)
    except (ConfigError, PromptError) as error:
        code, text = 1, str(error)
        print(f"error: {text}", file=sys.stderr)
    except BaseException as error:
        code, text = 1, f"{type(error).__name__}: {error}"
        traceback.print_exc()
    if code != 0:
        leave(code, text)


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def leave(code: int, reason: str) -> NoReturn:
    """End this process with ``code``; in a job of several, tell the peers why and do not wait for them.

    The leader, which runs the coordination service, first gives them ``GRACE_S`` seconds to end on their own.

    Args:
        code: exit code, not 0.
        reason: what the peers print.

    Raises:
        SystemExit: in a job of one process.
    """
    try:
        client = current().client
    except HostError:
        sys.exit(code)
    if client.count == 1:
        sys.exit(code)
    say_goodbye(client, reason)
    end_process(code)
