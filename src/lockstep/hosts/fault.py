"""Whether another attempt can help a job that an error has ended: after a fault of hardware, runtime or network."""

import contextlib
import os

from lockstep.errors import HostError, PeerError, is_mistake, is_passing
from lockstep.exits import FAILED, FAULT, FAULT_AGAIN
from lockstep.hosts._client import Client
from lockstep.printable import print_to_stderr

RESTARTS = "LOCKSTEP_RESTARTS"  # the variable in which a launcher says how many attempts there were before this one
SAVED = "lockstep/saved"  # key that is there once this attempt has saved something from which the next one goes on


def failure_code(error: BaseException) -> int:
    """The exit code of a process that an error ends: `FAULT`, or `FAILED` for what another attempt would meet again."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, PeerError):
            return FAULT if cause.fault else FAILED
        if is_passing(cause):
            return FAULT
        cause = None if is_mistake(type(cause).__name__) else cause.__cause__
    return FAILED


def note_saved(client: Client) -> None:
    """Note for all processes that this attempt has saved something from which another goes on."""
    with contextlib.suppress(HostError, TimeoutError):  # what was saved is there all the same
        client.set(SAVED, b"")


def earlier_attempts() -> int:
    """The number of attempts that this job's launcher made before this one."""
    restarts = os.environ.get(RESTARTS, "0")
    return int(restarts) if restarts.isdecimal() else 0


def limit_attempts(client: Client, code: int) -> int:
    """The exit code of a process that a fault ends: `FAULT_AGAIN` where nothing was saved since the attempt before."""
    restarts = earlier_attempts()
    if restarts == 0:
        return code
    try:
        if client.peek(SAVED) is not None:
            return code
    except (HostError, TimeoutError):
        return code  # nobody knows: the launcher's own limit counts
    print_to_stderr(
        f"lockstep: attempt {restarts + 1} has ended by a fault too, and no checkpoint was saved since the one "
        f"before: exit code {FAULT_AGAIN}, so it is not tried again. Look at the first error; save more often, or "
        "start the job anew on other machines."
    )
    return FAULT_AGAIN
