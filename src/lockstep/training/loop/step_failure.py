"""What a collective says of a dead peer does not say that: here the user reads what to look for."""

import contextlib
from collections.abc import Iterator

import jax

from lockstep.errors import HostError
from lockstep.hosts import Hosts


@contextlib.contextmanager
def named_failure(hosts: Hosts, step: int) -> Iterator[None]:
    """Around a train step: name the process, and who is missing, where the runtime fails.

    Args:
        hosts: The processes of the job. With one process the runtime's own error is raised.
        step: The number of completed steps.

    Raises:
        HostError: The runtime failed.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if hosts.count == 1:
            raise
        raise HostError(
            f"the train step after {step} steps failed on process {hosts.index} of {hosts.count}."
            f"{hosts.missing()} If the runtime speaks of a connection, a peer or a time-out, another process "
            f"has died: look for the log that ends without an error. The runtime says: {error}"
        ) from error
