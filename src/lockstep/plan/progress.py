"""What a plan is at: a live line on a terminal, plain lines elsewhere."""

import contextlib
import threading
import time
from collections.abc import Iterator

from rich.console import Console
from rich.status import Status


class Progress:
    """Tells which programs are being compiled. May be called from several threads.

    Args:
        console: to write to; None: standard error.
        quiet: say nothing.
    """

    def __init__(self, console: Console | None = None, quiet: bool = False) -> None:
        self._console = Console(stderr=True) if console is None else console
        self._quiet = quiet
        self._start = time.monotonic()
        self._lock = threading.Lock()
        self._now: dict[str, float] = {}
        self._status: Status | None = None

    def __call__(self, name: str, what: str) -> None:
        """Say what happens to a program.

        Args:
            name: of the program.
            what: ``compiling`` until something else is said.
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
    def live(self) -> Iterator["Progress"]:
        """Show the live line meanwhile, on a terminal."""
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
