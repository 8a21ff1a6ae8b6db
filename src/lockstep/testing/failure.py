"""What a process prints of an error that left the function of a test."""

import sys
import traceback
from typing import Any

SHOWN_CHARACTERS = 300
"""Characters of a local variable that are shown."""
HIDDEN = ("<", "__", "@")
"""Beginnings of the names of variables that are not shown; pytest's and the compiler's own."""


def print_failure(error: BaseException, file: str) -> None:
    """Print the stack of an error, and the local variables where it left the test.

    ``assert x == y`` has no text of its own in a process that pytest does not run in. Arrays are shown by shape and
    type: to read one could mean to wait for a process that failed.

    Args:
        error: The error.
        file: The path of the test's file.
    """
    sys.stdout.flush()
    traceback.print_exception(error)
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == file]
    if frames and (values := frames[-1].f_locals):
        print(f"where {frames[-1].f_code.co_name} had:", file=sys.stderr)
        for name, value in values.items():
            if not name.startswith(HIDDEN):
                print(f"    {name} = {shown(value)}", file=sys.stderr)
    sys.stderr.flush()


def shown(value: Any) -> str:
    """Return a value as text, arrays by shape and type, at most `SHOWN_CHARACTERS` long."""
    import equinox

    try:
        text = " ".join(equinox.tree_pformat(value, width=10**6).split())
    except Exception as error:
        text = f"<a {type(value).__name__} that cannot be shown: {type(error).__name__}>"
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]} ..."
