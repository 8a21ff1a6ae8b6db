"""Other programs that the launcher runs (gcloud, kubectl, Slurm's, git, a builder), and what their errors mean."""

import dataclasses
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from lockstep.exits import REFUSED
from lockstep.launch.backend import LaunchError

LAST_LINES = 12  # number of last lines of a program that an error shows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cause:
    """A reason why a program fails. Names in braces are those of the call: ``{program}``, ``{zone}``."""

    name: str = ""
    pattern: str = ""  # what the program's text then contains
    summary: str
    advice: str  # what to try
    code: int = REFUSED  # the launcher's exit code; `--retries` tries again after some of them

    @property
    def passes(self) -> bool:
        """Whether the same call may succeed later, without a change."""
        return self.code != REFUSED


class ToolError(LaunchError):
    """A program failed: says why, the command, what it printed, and what to try."""

    def __init__(self, cause: Cause, command: str, text: str, names: Mapping[str, str]) -> None:
        self.cause = cause
        self.summary = cause.summary.format(**names)
        printed = [f"  {line}" for line in text.strip().splitlines()[-LAST_LINES:]]
        lines = [f"{self.summary}.", f"  $ {command}", *printed, f"{cause.advice.format(**names)}."]
        super().__init__("\n".join(lines), cause.code)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tool:
    """A program, or several of one kind."""

    missing: Cause  # it is not on PATH
    causes: Sequence[Cause] = ()  # the first whose pattern is found decides
    unknown: Cause
    limit_s: float | None = None  # seconds that a call may take
    own_session: bool = True  # whether the Ctrl-C of a terminal is for the launcher alone
    warns: bool = False  # whether what it prints to standard error is shown where it succeeds

    def run(
        self,
        command: Sequence[str],
        names: Mapping[str, str] = MappingProxyType({}),
        *,
        stdin: str = "",
        limit_s: float | None = None,
    ) -> str:
        """Run a command without a shell; return what it prints.

        Args:
            names: The words in braces of its causes.
            limit_s: Seconds that this call may take, where it is not `limit_s` of the tool.

        Raises:
            ToolError: It is not there, ended with another code than 0, or took too long.
        """
        limit_s = limit_s or self.limit_s
        try:
            done = subprocess.run(
                command,
                input=stdin,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=limit_s,
                start_new_session=self.own_session,
            )
        except FileNotFoundError:
            raise ToolError(self.missing, shlex.join(command), "", {"program": command[0], **names}) from None
        except subprocess.TimeoutExpired:
            raise self.error(command, f"{command[0]} did not answer within {limit_s:g} s", names) from None
        if done.returncode:
            raise self.error(command, done.stderr or done.stdout, names)
        if self.warns:
            sys.stderr.write(done.stderr)
        return done.stdout

    def error(self, command: Sequence[str], text: str, names: Mapping[str, str] = MappingProxyType({})) -> ToolError:
        """The error of a command that printed a text."""
        words = " ".join(text.split())  # gcloud breaks long lines
        cause = next((cause for cause in self.causes if re.search(cause.pattern, words)), self.unknown)
        return ToolError(cause, shlex.join(command), text, {"program": command[0], **names})
