"""The workers of a job, and how a command is run on one of them."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol


@dataclasses.dataclass(frozen=True, kw_only=True)
class Worker:
    """One machine of a job, which runs one process of it. Its place in the list is its number.

    Args:
        name: How it is called in messages: a host name, or ``NAME/3``.
        environment: Variables with which its process finds the others; public, as they are shown.
        ports: Ports that must be free on it before the job starts.
        path: Directories on it that are searched for programs first; ``~`` is its home directory.
    """

    name: str
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    ports: tuple[int, ...] = ()
    path: tuple[str, ...] = ()


class Transport(Protocol):
    """A way to run a shell command on each worker."""

    @property
    def workers(self) -> Sequence[Worker]:
        """The workers, by number."""

    def argv(self, worker: int, command: str) -> list[str]:
        """The local command that runs ``command`` in a shell on a worker.

        Its standard input, output and error are those of the remote command: no terminal (``ssh -T``), nothing of its
        own on standard output. It may take any time to fail when the worker cannot be reached; it must not try again
        once the remote command has begun. Files are copied over its standard input too.
        """


def jax_environment(coordinator: str, processes: int, index: int) -> dict[str, str]:
    """The variables with which a process joins its job where JAX cannot find out by itself (lockstep.hosts.config).

    Args:
        coordinator: Host and port of process 0.
        processes: How many processes there are.
        index: This process's number.
    """
    return {
        "LOCKSTEP_COORDINATOR_ADDRESS": coordinator,
        "LOCKSTEP_NUM_PROCESSES": str(processes),
        "LOCKSTEP_PROCESS_ID": str(index),
    }
