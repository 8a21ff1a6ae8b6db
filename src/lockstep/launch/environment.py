"""The variables of a job's processes, the script that hides secret ones in their output, and what a dry run shows."""

import argparse
import dataclasses
import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from lockstep.errors import ConfigError
from lockstep.job_key import JOB_KEY, make_job_key
from lockstep.launch.backend import Transport, root_on_worker
from lockstep.launch.sync import files_of, is_credential
from lockstep.redact import SECRET_NAME, SHORTEST

START_S = 1800
"""Seconds in which all processes of a job on other machines must have connected: pods install first, and capacity for a
second slice may come 20 minutes after the first's."""

RESTARTS = "LOCKSTEP_RESTARTS"
"""The variable that tells a process how many attempts there were before: after a second fault it says whether anything
was saved in between (lockstep.hosts.fault)."""


def job_variables(processes: int) -> dict[str, str]:
    """The variables of every process of a job on other machines; ``--env`` may say otherwise."""
    return {"REQUIRE_JAX_PROCESS_COUNT": str(processes), "LOCKSTEP_INITIALIZATION_TIMEOUT_S": str(START_S)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobEnvironment:
    """Variables of every process."""

    public: Mapping[str, str]  # from `--env`; they may be shown
    secret: Mapping[str, str]  # from `--env_file`, or of `--env` by their names; never shown, logged or kept

    @property
    def remarks(self) -> list[str]:
        """Lines about them for the start of the job."""
        short = sorted(name for name, value in self.secret.items() if len(value) < SHORTEST)
        shown = f"{', '.join(short)}: too short to be taken out of output, so what prints it shows it"
        clear = f"no key for the job (no openssl here, or {JOB_KEY} is empty): it talks in clear text, on jax 0.12 too"
        return [shown] * bool(short) + [clear] * (JOB_KEY not in self.secret)


def job_environment(options: argparse.Namespace, *, make_key: bool = False) -> JobEnvironment:
    """Read ``--env`` and ``--env_file``; the first wins where both set a variable.

    Args:
        make_key: Whether the job gets a `JOB_KEY` of its own, where neither sets one; an empty one is none.
    """
    variables = dict(options.env)
    secret = {name: value for name, value in variables.items() if SECRET_NAME.search(name)}
    public = {name: value for name, value in variables.items() if name not in secret}
    filed = read_env_file(options.env_file) if options.env_file else {}
    secret = {**{name: value for name, value in filed.items() if name not in public}, **secret}
    key = secret.pop(JOB_KEY, None)
    if key is None and make_key:
        key = make_job_key()
    if key:
        secret[JOB_KEY] = key
    return JobEnvironment(public=public, secret=secret)


def read_env_file(path: Path) -> dict[str, str]:
    """Read lines ``NAME=VALUE``; ``export`` before, quotes around a value, empty lines and ``#`` lines are allowed.

    Nothing is expanded: a ``$`` is a ``$``.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--env_file {path} cannot be read ({error}). Write a text file with lines NAME=VALUE."
        ) from None
    variables = {}
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
        variables[name] = value
    return variables


DRAIN_S: Final = 5  # seconds in which output may still come after the command has ended
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
        directory: Where `filter_files` are, as Bash between double quotes.
        forward: Whether it passes SIGTERM on, because the platform sends it to the first process of a task alone. A
            process that gets it twice may die of the second while it ends in order.
    """
    names = " ".join(secret_names)
    begin = (
        f'exec 3>&1\nexec > >(exec python3 "{directory}/redact.py" {names} >&3) 2>&1\nfiltering=$!\n' if names else ""
    )
    # A process that the command has left may hold the filter's input open for ever.
    limit = f'{{ sleep {DRAIN_S}; kill -KILL "$filtering"; }} > /dev/null 2>&1 &\nlimiting=$!\n'
    end = f'exec >&3 2>&3\n{limit}wait "$filtering"\nkill "$limiting" 2> /dev/null\n' if names else ""
    run = _FORWARDING if forward else 'trap : TERM INT\n"$@"\ncode=$?\n'
    return begin + run + end


def filter_files() -> dict[str, bytes]:
    """The files that `run_command` needs where there are secrets, their content by name."""
    source = Path(__file__).parents[1] / "redact.py"
    return {source.name: source.read_bytes()}


def show_commands(
    options: argparse.Namespace,
    environment: JobEnvironment,
    name: str,
    created: list[str],
    transport: Transport,
    setup: str | None,
    setup_folder: str | None = None,
) -> None:
    """Print the commands that create workers, then those for each worker.

    Args:
        setup_folder: The directory that ``created`` fills with the script and the files that it needs; None: there
            are none.
    """
    count = len(transport.workers)
    left_out = [name for path in options.sync for name in files_of(path) if is_credential(name)]
    for command in created:
        print(command)
    for index, worker in enumerate(transport.workers):
        root = root_on_worker(name, index)
        print(f"\n# worker {index} of {count}, {worker.name}")

        def show(command: str, source: str = "", index: int = index) -> None:
            print(shlex.join(transport.argv(index, command)) + (f" {source}" if source else " < /dev/null"))

        if setup_folder is not None:
            there = f"mkdir -p {root}/setup && tar -xf - -C {root}/setup && cd {root}/setup && sh setup.sh"
            print(f"tar -cf - -C {shlex.quote(setup_folder)} . | {shlex.join(transport.argv(index, there))}")
        elif setup is not None:
            show(f"mkdir -p {root} && cd {root} && cat > setup.sh && sh setup.sh", f"<<'EOF_SETUP'\n{setup}\nEOF_SETUP")
        if options.sync:
            files = shlex.join(os.path.relpath(path) for path in options.sync)
            without = shlex.join(f"--exclude={name}" for name in (".git", *left_out))
            packed = f"tar {without} -czf - {files} | "
            print(packed + shlex.join(transport.argv(index, f"mkdir -p {root}/files && tar -xzf - -C {root}/files")))
        secret = sorted(environment.secret)
        if options.env_file:
            path = shlex.quote(str(options.env_file))
            show(f"umask 077; mkdir -p {root} && cat > {root}/secrets.env", f"< {path}")
        words = [
            f"{key}={value}"
            for key, value in {**worker.environment, **job_variables(count), **environment.public}.items()
        ]
        words += [f"{key}=<redacted>" for key in secret if key in dict(options.env)]
        cwd = _for_shell(options.workdir) if options.workdir else (f"{root}/files" if options.sync else "~")
        steps = [f"cd {cwd}"]
        if options.env_file:
            steps.append(f"set -a && . {root}/secrets.env && set +a")
        for directory in reversed(worker.path):
            steps.append(f'PATH={_for_shell(directory)}:"$PATH"')
        steps.append(shlex.join(["exec", "env", "PYTHONUNBUFFERED=1", *words, *options.command]))
        show(" && ".join(steps))
    print("\n# Each worker's last command is for a terminal of its own. The launcher starts it detached from the")
    print("# connection, follows its output, ends all when one fails, and keeps secrets in memory, in no file.")


def here_document(text: str) -> str:
    """A text that ends in a newline as a command's standard input in a shell, which expands nothing in it."""
    end = "END_OF_FILE"
    while end in text:
        end += "_"
    return f"<< '{end}'\n{text}{end}"


def _for_shell(path: str) -> str:
    """A path on a worker as one word of its shell; a ``~`` at its beginning is the home directory."""
    home, slash, rest = path.partition("/")
    if re.fullmatch(r"~[A-Za-z0-9._-]*", home):
        return home + slash + (shlex.quote(rest) if rest else "")
    return shlex.quote(path)
