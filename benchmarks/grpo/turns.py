"""Contestants that take turns: each makes one step when it is asked for, while the others wait."""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

MARK = "turn "
TURN_S = 400.0
"""Seconds that a step may take, and the start of a process."""


class Turns:
    """The side of a contestant: says how a step went, and waits until the next one may begin."""

    def __init__(self, steps: int) -> None:
        self._left, self._began = steps, 0.0

    def ready(self, **facts: Any) -> None:
        """Say what is known before the first step, and wait for it."""
        self._say(facts)
        self._wait()

    def taken(self) -> float:
        """Seconds since this step began."""
        return time.perf_counter() - self._began

    def done(self, **figures: Any) -> None:
        """Report a step, and wait for the next one where there is one."""
        self._say(figures)
        self._left -= 1
        if self._left:
            self._wait()

    def _say(self, figures: Mapping[str, Any]) -> None:
        print(MARK + json.dumps(figures), flush=True)

    def _wait(self) -> None:
        if not sys.stdin.readline():
            os._exit(0)  # nobody asks any more, and libraries have threads that would not end
        self._began = time.perf_counter()


class ContestantError(Exception):
    """A contestant has ended, or takes too long."""


class Process(contextlib.AbstractContextManager["Process"]):
    """The side of the benchmark: a contestant in a process of its own.

    Args:
        name: The name of the contestant.
        command: The command that starts it.
        environment: What it has beside that of this process.
        log: a file for its standard error.
    """

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.name, self._log = name, log
        with log.open("w", encoding="utf-8") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, **environment},
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()

    def ready(self) -> dict[str, Any]:
        """What it says before its first step."""
        return self._heard()

    def step(self) -> dict[str, Any]:
        """Have it make a step; its figures."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, as is found next
            self._process.stdin.write("go\n")
            self._process.stdin.flush()
        return self._heard()

    def _heard(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        late = threading.Timer(TURN_S, self._process.kill)
        late.start()
        try:
            for line in self._process.stdout:
                if line.startswith(MARK):
                    found: dict[str, Any] = json.loads(line.removeprefix(MARK))
                    return found
        finally:
            late.cancel()
        raise ContestantError(
            f"{self.name} ended with {self._process.wait()} (after {TURN_S:g} s it is ended):\n"
            f"{self._log.read_text()[-3000:]}"
        )
