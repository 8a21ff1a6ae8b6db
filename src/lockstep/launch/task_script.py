"""What a process of a job runs where a platform starts it: the command, with secrets taken out of its output."""

import importlib.resources
from typing import Final

from lockstep.launch import agent

FILTER_FILES: Final = ("filter.py", "redact.py")
"""The files that `run_command` needs where there are secrets."""


def run_command(secret_names: list[str], directory: str) -> str:
    """Bash that runs its arguments and leaves their exit code in ``$code``; signals are the command's.

    Args:
        secret_names: The names of secret variables, whose values are taken out of the output.
        directory: Where `FILTER_FILES` are, as Bash between double quotes.
    """
    names = " ".join(secret_names)
    begin = (
        f'exec 3>&1\nexec > >(exec python3 "{directory}/filter.py" {names} >&3) 2>&1\nfiltering=$!\n' if names else ""
    )
    end = 'exec >&3 2>&3\nwait "$filtering"\n' if names else ""
    return f"""\
{begin}"$@" &
child=$!
trap 'kill -TERM "$child" 2> /dev/null' TERM INT
while kill -0 "$child" 2> /dev/null; do # a signal may end the wait before the command ends
    wait "$child"
done
wait "$child"
code=$?
{end}"""


def filter_files() -> dict[str, bytes]:
    """The content of `FILTER_FILES`, by name."""
    directory = importlib.resources.files(agent)
    return {name: (directory / name).read_bytes() for name in FILTER_FILES}
