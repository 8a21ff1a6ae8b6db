"""Work that one process does alone must not launch a device program."""

import contextlib
import re
from collections.abc import Callable, Iterator

import jax

from lockstep.credentials import get_logger
from lockstep.errors import LaunchMismatchError, LockstepError

log = get_logger(__name__)

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

    Example:
        >>> with lockstep.leader_only():
        ...     text = tokenizer.decode([1, 2, 3])  # host work: fine
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


def try_leader_only(what: str, work: Callable[[], object], consequence: str) -> bool:
    """Do work of the leader's in which a launch raises; what fails is logged and goes no further.

    Args:
        what: What is done, as the log names it.
        work: The work, which launches nothing.
        consequence: What the failure means for the run, as the log says it.

    Returns:
        Whether it succeeded.
    """
    try:
        with leader_only():
            work()
    except Exception as error:
        stack = None if isinstance(error, LockstepError) else error
        log.error("%s failed on the leader; %s: %s: %s", what, consequence, type(error).__name__, error, exc_info=stack)
        return False
    return True
