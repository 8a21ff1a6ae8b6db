"""The script of a process where a platform starts it: the command, with secrets taken out of its output."""

from pathlib import Path
from typing import Final

FILTER_FILES: Final = ("filter.py", "redact.py")
"""The files that `run_command` needs where there are secrets."""

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
        directory: Where `FILTER_FILES` are, as Bash between double quotes.
        forward: Whether it passes SIGTERM on, because the platform sends it to the first process of a task alone. A
            process that gets it twice may die of the second while it ends in order.
    """
    names = " ".join(secret_names)
    begin = (
        f'exec 3>&1\nexec > >(exec python3 "{directory}/filter.py" {names} >&3) 2>&1\nfiltering=$!\n' if names else ""
    )
    end = 'exec >&3 2>&3\nwait "$filtering"\n' if names else ""
    run = _FORWARDING if forward else 'trap : TERM INT\n"$@"\ncode=$?\n'
    return begin + run + end


def filter_files() -> dict[str, bytes]:
    """The content of `FILTER_FILES`, by name."""
    here = Path(__file__).parent
    sources = (here / "output_filter.py", here.parent / "redact.py")
    return {name: source.read_bytes() for name, source in zip(FILTER_FILES, sources, strict=True)}
