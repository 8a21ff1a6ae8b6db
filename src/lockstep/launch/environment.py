"""The variables of a job's processes, and the script that takes the secret ones out of their output."""

import argparse
import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from lockstep.credentials import SECRET_NAME
from lockstep.errors import ConfigError
from lockstep.redact import SHORTEST

START_S = 1800
"""Seconds in which all processes of a job on other machines must have connected: pods install first, and capacity for a
second slice may come 20 minutes after the first's."""

RESTARTS = "LOCKSTEP_RESTARTS"
"""The variable that tells a process how many attempts there were before: after a second fault it says whether anything
was saved in between (lockstep.hosts.fault)."""


def job_variables(processes: int) -> dict[str, str]:
    """The variables of every process of a job on other machines; ``--env`` may say otherwise.

    Args:
        processes: How many there must be.
    """
    return {"REQUIRE_JAX_PROCESS_COUNT": str(processes), "LOCKSTEP_INITIALIZATION_TIMEOUT_S": str(START_S)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobEnvironment:
    """Variables of every process.

    Args:
        public: From ``--env``; they may be shown.
        secret: From ``--env_file``, and those of ``--env`` whose name says so; they are never shown, logged or kept.
    """

    public: Mapping[str, str]
    secret: Mapping[str, str]

    @property
    def too_short(self) -> list[str]:
        """Names of secrets that are too short to be found in what a process prints."""
        return sorted(name for name, value in self.secret.items() if len(value) < SHORTEST)


def job_environment(options: argparse.Namespace) -> JobEnvironment:
    """Read ``--env`` and ``--env_file``; the first wins where both set a variable.

    Raises:
        ConfigError: The file cannot be read.
    """
    given = dict(options.env)
    secret = {name: value for name, value in given.items() if SECRET_NAME.search(name)}
    public = {name: value for name, value in given.items() if name not in secret}
    filed = read_env_file(options.env_file) if options.env_file else {}
    return JobEnvironment(
        public=public, secret={**{name: value for name, value in filed.items() if name not in public}, **secret}
    )


def read_env_file(path: Path) -> dict[str, str]:
    """Read lines ``NAME=VALUE``; ``export`` before, quotes around a value, empty lines and ``#`` lines are allowed.

    Nothing is expanded: a ``$`` is a ``$``.

    Raises:
        ConfigError: The file is not there, or a line has no name.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--env_file {path} cannot be read ({error}). Write a text file with lines NAME=VALUE."
        ) from None
    found = {}
    for index, line in enumerate(lines, 1):
        text = line.strip().removeprefix("export ").strip()
        if not text or text.startswith("#"):
            continue
        name, equals, value = text.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            # The line itself may be a secret: it is not shown.
            raise ConfigError(f"--env_file {path}, line {index}: it must be NAME=VALUE, without spaces around '='.")
        if len(value) >= 2 and value[0] == value[-1] and value[0] in "'\"":
            value = value[1:-1]
        found[name] = value
    return found


_FORWARDING: Final = """\
"$@" &
child=$!
trap 'kill -TERM "$child" 2> /dev/null' TERM INT
wait "$child"
code=$?
while kill -0 "$child" 2> /dev/null; do # a signal has ended the wait, not yet the command
    wait "$child"
    code=$?
done
# Where the signal has ended both, bash may know the command's own code (or may not: then it says -1 or 127).
wait "$child"
own=$?
if [ "$own" -ge 0 ] && [ "$own" -ne 127 ]; then
    code=$own
fi
"""


def run_command(secret_names: list[str], directory: str, *, forward: bool) -> str:
    """Bash that runs its arguments and leaves their exit code in ``$code``; of signals it dies no sooner than they do.

    Args:
        secret_names: The names of secret variables, whose values are taken out of the output.
        directory: Where `filter_files` are, as Bash between double quotes.
        forward: Whether it passes SIGTERM on, because the platform sends it to the first process of a task alone. A
            process that gets it twice may die of the second while it ends in order.
    """
    names = " ".join(secret_names)
    begin = (
        f'exec 3>&1\nexec > >(exec python3 "{directory}/redact.py" {names} >&3) 2>&1\nfiltering=$!\n' if names else ""
    )
    end = 'exec >&3 2>&3\nwait "$filtering"\n' if names else ""
    run = _FORWARDING if forward else 'trap : TERM INT\n"$@"\ncode=$?\n'
    return begin + run + end


def filter_files() -> dict[str, bytes]:
    """The files that `run_command` needs where there are secrets, their content by name."""
    source = Path(__file__).parents[1] / "redact.py"
    return {source.name: source.read_bytes()}
