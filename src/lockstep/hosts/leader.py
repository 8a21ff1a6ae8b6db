"""Work that one process does alone must not launch a device program."""

import contextlib
import re
from collections.abc import Iterator

import jax

from lockstep.errors import LaunchMismatchError

MSG_LAUNCH_ALONE = (
    "{program} was launched inside leader-only work. Process 0 does this work alone, so its devices would be a launch "
    "ahead of all others and the job would hang or die at the next collective (under a global mesh even jnp.zeros(()) "
    "runs on every device). Use NumPy and values already fetched, or compute it on every process before this scope."
)


@contextlib.contextmanager
def leader_only() -> Iterator[None]:
    """Open a scope in which launching a device program raises, whether it was compiled before or not.

    Reading an array that is wholly on this process's devices stays possible. The scope covers the calling thread alone.

    Raises:
        LaunchMismatchError: A program was launched inside; the error of JAX is its cause.
    """
    with jax.no_execution(True):
        try:
            yield
        except Exception as error:  # JAX's RuntimeError, or whatever a library in between made of it
            if "no_execution" not in str(error):
                raise
            found = re.search(r"execute function (\S+),", str(error))
            program = f"the device program {found[1]!r}" if found else "a device program"
            raise LaunchMismatchError(MSG_LAUNCH_ALONE.format(program=program)) from error
