"""Chat templates, rendered in a process of their own, which has limits of time and memory."""

import atexit
import contextlib
import json
import os
import pickle
import select
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from lockstep.errors import PromptError
from lockstep.limits import LINE_BYTES, TEMPLATE_BYTES

TEMPLATE_S: Final = 10.0  # seconds that a chat template may take
_START_S: Final = 120.0  # seconds that the process may take to start, on a machine that is busy
_WORKER: Final = Path(__file__).with_name("template_worker.py")
_START: Final = "import runpy, sys; sys.path[:] = sys.argv[2:]; runpy.run_path(sys.argv[1], run_name='__main__')"
_KEPT: Final = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "PYTHONHOME", "LANG", "LC_ALL", "TZ")
"""Variables of the environment that the process has: a template must not find secrets."""


class TemplateProcess:
    """A process that renders templates for one thread at a time. It begins with the first template and is begun anew
    where one has ended it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def render(self, source: str, variables: Mapping[str, Any], date: str = "") -> str:
        """The text of a template.

        Args:
            variables: What its names stand for: numbers, texts, lists and the like.
            date: The date of ``strftime_now``, such as ``2026-11-28``; empty for today.

        Raises:
            PromptError: The template has raised an error, or needs more time or memory than it may have.
        """
        request = pickle.dumps(
            {
                **{"source": source, "variables": dict(variables), "date": date},
                **{"characters": LINE_BYTES, "memory": TEMPLATE_BYTES, "seconds": TEMPLATE_S},
            }
        )
        with self._lock:
            try:
                process = self._started()
                reply = self._exchanged(process, request)
            except BaseException:  # whatever is half sent or half read must not be the next template's
                self._close()
                raise
        if "text" not in reply:
            raise PromptError(str(reply.get("error")))
        return str(reply["text"])

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        process, self._process = self._process, None
        if process is not None and self._owner == os.getpid():
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
            process.kill()
            process.wait()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._owner != os.getpid():  # a copy of this process has its own
            self._owner = os.getpid()
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _START, str(_WORKER), *filter(None, sys.path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={name: os.environ[name] for name in _KEPT if name in os.environ},
            )
            _read(self._process, time.monotonic() + _START_S)
        return self._process

    def _exchanged(self, process: subprocess.Popen[bytes], request: bytes) -> dict[str, Any]:
        assert process.stdin is not None
        end = time.monotonic() + TEMPLATE_S
        try:
            process.stdin.write(struct.pack("<Q", len(request)) + request)
            process.stdin.flush()
            return _read(process, end)
        except (BrokenPipeError, EOFError):
            raise PromptError(
                f"its process ended ({process.wait()}), as where {TEMPLATE_BYTES:,} bytes of memory are not enough. "
                "Use a tokenizer with another one."
            ) from None


def _read(process: subprocess.Popen[bytes], end: float) -> dict[str, Any]:
    (size,) = struct.unpack("<Q", _bytes(process, 8, end))
    if size > 12 * LINE_BYTES:  # a character has at most 12 in JSON
        raise PromptError("its process has sent something else than a text. Use a tokenizer with another one.")
    reply: dict[str, Any] = json.loads(_bytes(process, size, end))
    return reply


def _bytes(process: subprocess.Popen[bytes], size: int, end: float) -> bytes:
    assert process.stdout is not None
    parts, waiting = bytearray(), select.poll()
    waiting.register(process.stdout, select.POLLIN)
    while len(parts) < size:
        if not waiting.poll(max(0.0, end - time.monotonic()) * 1000):
            raise PromptError(f"it has not ended after {TEMPLATE_S:g} s. Use a tokenizer with another one.")
        part = os.read(process.stdout.fileno(), min(size - len(parts), 1 << 20))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)


PROCESS: Final = TemplateProcess()
"""The one of this process."""
atexit.register(PROCESS.close)
