"""Faults of hardware, runtime and network, told from mistakes by their text, and whether another attempt can help."""

import contextlib
import os
import re
import sys
from typing import Any

from lockstep.errors import HostError, PeerError
from lockstep.exits import FAILED, FAULT, FAULT_AGAIN
from lockstep.hosts._client import Client

RESTARTS = "LOCKSTEP_RESTARTS"  # the variable in which a launcher says how many attempts there were before this one
SAVED = "lockstep/saved"  # key that is there once this attempt has saved something from which the next one goes on

_STATUS = re.compile(
    r"\b(CANCELLED|UNKNOWN|INVALID_ARGUMENT|DEADLINE_EXCEEDED|NOT_FOUND|ALREADY_EXISTS|PERMISSION_DENIED|ABORTED|"
    r"UNAUTHENTICATED|RESOURCE_EXHAUSTED|FAILED_PRECONDITION|OUT_OF_RANGE|UNIMPLEMENTED|INTERNAL|UNAVAILABLE|DATA_LOSS):"
)
"""The status of the runtime, of the coordination service or of a storage library; the first one in a text counts."""
_FAULTS = {"CANCELLED", "DEADLINE_EXCEEDED", "ABORTED", "FAILED_PRECONDITION", "UNAVAILABLE", "DATA_LOSS"}
_FAULTS_BUT_OF_THE_COMPILER = {"INTERNAL", "UNKNOWN"}
_COMPILER = re.compile(r"compil|lowering|Mosaic failed|HLO verif|xla/(service|hlo)|unsupported", re.IGNORECASE)
_MISTAKE = re.compile(r"(Config|Prompt|Capacity|Compiler|Hbm|Vmem|Disagreement|Divergence|LaunchMismatch)Error")
_RUNTIME = re.compile(r"(Jax|Xla)?RuntimeError|HostError")
_HARDWARE = re.compile(
    r"\bECC\b|\bICI\b|uncorrectable|halted (unexpectedly|prematurely)|hardware|machine check|slice health|\bXid\b",
    re.IGNORECASE,
)
_NETWORK = re.compile(
    r"HostTimeoutError|ServiceGoneError|(FS)?TimeoutError|\w*Connection\w*Error|BrokenPipeError|\w*ProxyError|"
    r"((Connect|Read)Timeout|Client(Connector|OS|Payload)|Server(Disconnected|Timeout)|ChunkedEncoding|Transport)\w*"
)
"""Errors of Python, of ours, and of what reads buckets: aiohttp, requests, botocore, google.auth, fsspec."""
_HTTP_STATUS = {408, 429, 500, 502, 503, 504}  # replies that another request may not get
_ERRNO = re.compile(r"\[Errno (5|19|100|101|103|104|110|112|113|116|121)\]")
"""Linux: input/output, no device, network down, connection lost, host down, stale handle, remote I/O."""


def is_fault(text: str) -> bool:
    """Whether an error is one of hardware, runtime or network, which another attempt may not meet.

    Args:
        text: Its type, a colon and its message. Running out of memory is a mistake, and what the compiler says is one.
    """
    name, _, message = text.partition(": ")
    name = name.rpartition(".")[2]
    if _NETWORK.fullmatch(name) or (name == "OSError" and _ERRNO.match(message)):
        return True
    if _MISTAKE.fullmatch(name) or "already in use" in message:  # the chips, by another process
        return False
    found = _STATUS.search(message)
    status = found[1] if found else ""
    if status in _FAULTS:
        return True
    if status in _FAULTS_BUT_OF_THE_COMPILER:
        return not _COMPILER.search(message)
    return status in ("", "RESOURCE_EXHAUSTED") and bool(_RUNTIME.fullmatch(name) and _HARDWARE.search(message))


def is_passing(error: BaseException) -> bool:
    """Whether an error is a fault (`is_fault`) by its text, or by the status of the HTTP reply that it comes from."""
    status: Any = getattr(getattr(error, "response", None), "status_code", None)  # requests, httpx
    status = next((getattr(error, name) for name in ("status", "code") if hasattr(error, name)), status)
    return is_fault(f"{type(error).__name__}: {error}") or (isinstance(status, int) and status in _HTTP_STATUS)


def failure_code(error: BaseException) -> int:
    """The exit code of a process that an error ends: `FAULT`, or `FAILED` for what another attempt would meet again."""
    each: BaseException | None = error
    while each is not None:
        if isinstance(each, PeerError):
            return FAULT if each.fault else FAILED
        if is_passing(each):
            return FAULT
        each = None if _MISTAKE.fullmatch(type(each).__name__) else each.__cause__
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
    print(
        f"lockstep: attempt {restarts + 1} has ended by a fault too, and no checkpoint was saved since the one "
        f"before: exit code {FAULT_AGAIN}, so it is not tried again. Look at the first error; save more often, or "
        "start the job anew on other machines.",
        file=sys.stderr,
        flush=True,
    )
    return FAULT_AGAIN
