"""Which programs are being compiled: a live line on a terminal, plain lines elsewhere."""

import contextlib
import threading
import time
from collections.abc import Iterator

from rich.console import Console
from rich.status import Status


class CompileProgress:
    """Shows which programs are being compiled. Several threads may call it.

    Args:
        console: The console to write to; None: standard error.
        quiet: Whether to print nothing.
    """

    def __init__(self, console: Console | None = None, quiet: bool = False) -> None:
        self._console = Console(stderr=True) if console is None else console
        self._quiet = quiet
        self._start = time.monotonic()
        self._lock = threading.Lock()
        self._now: dict[str, float] = {}
        self._status: Status | None = None

    def __call__(self, name: str, what: str) -> None:
        """Show what happens to a program.

        Args:
            name: The program's name.
            what: What happens: ``compiling``, which lasts until the next call for the program, or how it ended.
        """
        with self._lock:
            if what == "compiling":
                self._now[name] = time.monotonic()
            else:
                self._now.pop(name, None)
            if self._quiet:
                return
            if self._status is not None:
                self._status.update(self._line())
                if what == "compiling":
                    return
            self._console.print(
                f"[{time.monotonic() - self._start:5.1f} s] {name}: {what}", highlight=False, markup=False
            )

    @contextlib.contextmanager
    def live(self) -> Iterator["CompileProgress"]:
        """Show a live line inside this context, where the console is a terminal."""
        if self._quiet or not self._console.is_terminal:
            yield self
            return
        with self._console.status("planning") as status:
            self._status = status
            try:
                yield self
            finally:
                self._status = None

    def _line(self) -> str:
        return "compiling " + ", ".join(self._now) if self._now else "planning"
