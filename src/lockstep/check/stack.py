"""Places in the user's own code, from call stacks."""

import dataclasses
import functools
import linecache
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

DEEPEST = 24
"""Frames that are kept of a stack."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Frame:
    """One line of a call stack.

    Args:
        file: The path of the source file.
        line: The line's number, from 1.
        function: The function that it is in.
        text: The line itself.
        own: Whether it is the user's, not that of an installed package.
    """

    file: str
    line: int
    function: str
    text: str
    own: bool

    @property
    def place(self) -> str:
        """File and line, as editors open them."""
        return f"{self.file}:{self.line}"


Key = tuple[tuple[str, int, str], ...]
"""A stack as (file, line, function), the innermost frame first."""

_LIBRARY = tuple({sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")})
_LOCKSTEP = str(Path(__file__).parents[1]) + "/"
_HIDDEN = ("/site-packages/jax/", "/site-packages/jaxlib/", "/lockstep/check/")
_HIDDEN_ENDS = ("/contextlib.py", "/functools.py", "/threading.py", "/concurrent/futures/thread.py")


def walk(frame: FrameType | None) -> Key:
    """The stack from a frame outwards, without the frames of JAX and of the check.

    Args:
        frame: Where it begins; None: an empty one.
    """
    found: list[tuple[str, int, str]] = []
    while frame is not None and len(found) < DEEPEST:
        code = frame.f_code
        if not is_hidden(code.co_filename):
            found.append((code.co_filename, frame.f_lineno, code.co_qualname))
        frame = frame.f_back
    return tuple(found)


def here() -> Key:
    """The stack of the caller."""
    return walk(sys._getframe(1))


@functools.cache
def is_hidden(file: str) -> bool:
    """Whether a file is JAX's or ours, has no text, or only calls others."""
    if file.startswith("<") or any(part in file for part in _HIDDEN):
        return True
    return file.startswith(_LIBRARY) and file.endswith(_HIDDEN_ENDS)


@functools.cache
def is_own(file: str) -> bool:
    """Whether a file is the user's: not installed, not of Python, not of Lockstep."""
    installed = "/site-packages/" in file or "/dist-packages/" in file
    return not installed and not file.startswith((*_LIBRARY, _LOCKSTEP))


def frames(key: Key) -> tuple[Frame, ...]:
    """A stack with the texts of its lines."""
    return tuple(
        Frame(file=file, line=line, function=function, text=linecache.getline(file, line).strip(), own=is_own(file))
        for file, line, function in key
    )


def own_line(stack: Sequence[Frame]) -> Frame | None:
    """The innermost line that is the user's; where none is, the innermost of all.

    Args:
        stack: The innermost frame first.
    """
    return next((frame for frame in stack if frame.own), stack[0] if stack else None)


def shown(path: str) -> str:
    """A path relative to the working directory where it is in it."""
    try:
        return str(Path(path).relative_to(Path.cwd()))
    except ValueError:
        return path
