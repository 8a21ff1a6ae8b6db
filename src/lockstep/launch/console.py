"""The output of the launcher, shown and kept: its own lines and those of the workers, without the values of secrets."""

import os
import sys
import threading
from pathlib import Path

from lockstep.credentials import without_credentials
from lockstep.printable import printable
from lockstep.redact import Redactor

ERROR = b"error: "
"""The beginning of a line in which a process says why it ends (lockstep.hosts.exit)."""


class Console:
    """The terminal, and the file ``launcher.log`` of the job.

    Args:
        redactor: Takes secrets out of everything; None: there are none.
        log: The file to which the launcher's own lines are added; None: none.
    """

    def __init__(self, redactor: Redactor | None = None, log: Path | None = None) -> None:
        self._redactor = redactor or Redactor(())
        self._log = log
        self._lock = threading.Lock()
        self._errors: set[bytes] = set()
        self._shown_once: set[str] = set()
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)

    def say(self, text: str) -> None:
        """Print lines of the launcher's own to standard error, each after ``launch: ``; parts may be of a worker."""
        shown = printable(without_credentials(text))
        self.raw("".join(f"launch: {line}\n" for line in shown.split("\n")))

    def once(self, text: str) -> None:
        """As `say`, but not again what was said before, until it is forgotten."""
        if text not in self._shown_once:
            self._shown_once.add(text)
            self.say(text)

    def forget(self, beginning: str) -> bool:
        """Forget what begins so; return whether it was said."""
        known = {text for text in self._shown_once if text.startswith(beginning)}
        self._shown_once -= known
        return bool(known)

    def raw(self, text: str) -> None:
        """Print a text as it is to standard error."""
        text = self._redactor.text(text)
        with self._lock:
            print(text, end="", file=sys.stderr, flush=True)
            if self._log is not None:
                with open(os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "a") as file:
                    file.write(text)

    def line(self, prefix: str, line: bytes) -> None:
        """Print a line of a worker, which has no end of line, to standard output; an error of all workers once."""
        with self._lock:
            if line.startswith(ERROR):
                if line in self._errors:
                    return
                self._errors.add(line)
            sys.stdout.buffer.write(prefix.encode() + line + b"\n")
            sys.stdout.buffer.flush()
