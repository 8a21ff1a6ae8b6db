"""A last word where JAX aborts this process because another one is gone, and the exit code that is tried again."""

import ctypes
import os
import signal
import threading
from collections.abc import Callable

from lockstep.exits import PEER_FAILED

LIMIT_S = 5.0
"""Seconds that the last word may take."""


def on_abort(last_word: Callable[[], bool]) -> Callable[[], None]:
    """Have a function called when this process is aborted, in whichever thread that is.

    JAX's coordination client calls ``abort`` in a thread of C++, with a page of stacks and without a word of which
    process is missing; a handler of Python's ``signal`` runs in the main thread alone, which waits for a device.

    Args:
        last_word: Returns True where the abort comes of another process; the exit code is then `PEER_FAILED`. False:
            the process ends by SIGABRT, after the handler that it had before.

    Returns:
        A function that takes the handler away.
    """
    libc = ctypes.CDLL(None)
    libc.signal.restype = ctypes.c_void_p
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]

    def handle(_: int) -> None:
        limit = threading.Timer(LIMIT_S, os._exit, (PEER_FAILED,))
        limit.daemon = True
        limit.start()
        if last_word():
            os._exit(PEER_FAILED)
        limit.cancel()
        restore()
        signal.pthread_kill(threading.get_ident(), signal.SIGABRT)  # this thread's, which has it once it returns

    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(handle)
    before = libc.signal(signal.SIGABRT, ctypes.cast(handler, ctypes.c_void_p))

    def restore() -> None:
        libc.signal(signal.SIGABRT, before)

    _kept.append(handler)  # for good: it may be running when it is taken away
    return restore


_kept: list[object] = []
