"""Programs compiled on every host and launched when all are ready; a failed launch names the hosts."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from lockstep.errors import HostError
from lockstep.hosts import Hosts, Watchdog, environment
from lockstep.placement.device import Program, compile_program


class Launcher:
    """Compiles programs on every host, compares them, and launches each once; a `Launch` of the step.

    Args:
        mesh: The mesh that is set while a program is traced.
        watchdog: What ends the process when a launch does not return.
    """

    def __init__(self, hosts: Hosts, mesh: Mesh, watchdog: Watchdog) -> None:
        self._hosts, self._mesh, self._watchdog = hosts, mesh, watchdog

    def compile_on_all(self, name: str, compile: Callable[[], Mapping[str, str]]) -> None:
        """Have every host compile a program, agree on its digests, and wait until all are ready to launch it.

        Args:
            compile: A function that compiles it and returns its digests.

        Raises:
            PeerError: It does not compile on some host; raised on every host.
            DisagreementError: The hosts compiled different programs, or with different versions or flags.
        """
        with self._hosts.scope(name) as scope, scope.run_on_all(f"compiling {name}") as phase:
            phase.agree(environment() | {"debug": str(scope.debug)})
            phase.agree(compile())
        self._hosts.phase("training")

    def __call__(self, name: str, function: Callable[..., Any], arguments: Sequence[Any], **options: Any) -> Any:
        """Compile, agree, launch once, and wait for the result.

        Args:
            options: Those of `lockstep.placement.device.compile_program`.

        Raises:
            PeerError, DisagreementError: As for `compile_on_all`.
        """
        programs: list[Program] = []

        def compile() -> Mapping[str, str]:
            ledger = self._hosts.ledger
            programs.append(compile_program(name, function, arguments, mesh=self._mesh, ledger=ledger, **options))
            return programs[0].digests

        self.compile_on_all(name, compile)
        with self._watchdog.watch(name):
            return jax.block_until_ready(programs[0](*arguments))


@contextlib.contextmanager
def named_failure(hosts: Hosts, step: int) -> Iterator[None]:
    """Around a train step: name the process, and who is missing, where the runtime fails.

    Args:
        hosts: The processes of the job. With one process the runtime's own error is raised.

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
