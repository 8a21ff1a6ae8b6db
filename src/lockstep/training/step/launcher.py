"""Programs compiled on every host and launched when all are ready, and the largest train step that fits the devices.

For ``per_device_parallelism: auto`` nobody has to guess: the compiler says what a program needs. Every host compiles
the same steps in the same order, and the host with the least memory decides.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh
from jaxtyping import PyTree

from lockstep.errors import ConfigError, HbmError, HostError
from lockstep.hosts import Hosts, Watchdog, environment
from lockstep.placement.device import Program, block_bytes, compile_program, free_bytes
from lockstep.printable import bytes_text, get_logger
from lockstep.training.step.train_step import TrainStep

log = get_logger(__name__)

UNKNOWN = 2**62  # the bytes of a step that the compiler refused without saying how many it needs


def memory_for_training(mesh: Mesh, state: PyTree) -> int:
    """The bytes of a device of this process that there are for the train step: what is free now, and its state."""
    return free_bytes(mesh) + sum(block_bytes(leaf) for leaf in jax.tree.leaves(state))


def compile_largest(
    hosts: Hosts,
    rows: int,
    make: Callable[[int], TrainStep],
    arguments: Callable[[TrainStep], Any],
    memory: int,
    fewest: int = 1,
) -> TrainStep:
    """Compile the train step with fewer rows at a time until it fits; every host makes the same call.

    Args:
        make: A function from the number of microbatches to a train step that is not compiled.
        arguments: A function from a train step to the arguments that it is compiled for.
        fewest: The number of microbatches to begin with.

    Raises:
        PeerError: A step does not compile for another reason than memory.
        DisagreementError: The hosts compiled different steps.
        ConfigError: Not even one row at a time fits; the same on every host.
    """
    memory = hosts.all_min("memory of the train step", memory)
    sizes = [size for size in range(rows // fewest, 0, -1) if rows % size == 0]
    state_bytes, needed, size = 0, 0, rows
    while sizes:
        size = sizes.pop(0)
        step = make(rows // size)
        with hosts.scope("train_step") as scope, scope.run_on_all("compiling train_step") as phase:
            phase.agree(environment() | {"debug": str(scope.debug), "rows at a time": str(size)})
            compiled_for = arguments(step)
            state_bytes = sum(block_bytes(leaf) for leaf in jax.tree.leaves(compiled_for[0]))
            try:
                phase.agree(step.compile(*compiled_for, ledger=hosts.ledger))
                phase.share(step.needed_bytes())
            except HbmError as error:
                phase.share(error.needed or UNKNOWN)
        needed = max(phase.shared)
        if needed <= memory:
            hosts.phase("training")
            if hosts.is_leader:
                log.info(
                    "trainer.per_device_parallelism auto: %d of %d rows at a time, %s of %s per device",
                    size, rows, bytes_text(needed), bytes_text(memory),
                )  # fmt: skip
            return step
        # What a step needs beside the state grows with its rows: sizes that are far too large are not compiled.
        room, over = memory - state_bytes, needed - state_bytes
        likely = [count for count in sizes if needed == UNKNOWN or count * over <= 2 * size * room]
        sizes = likely or sizes[-1:]
    raise ConfigError(
        f"the train step needs {'more' if needed == UNKNOWN else bytes_text(needed)} per device even with {size} of "
        f"{rows} rows at a time, and there are {bytes_text(memory)}. Use a smaller model, shorter rows "
        "(data.max_seq_len), more devices, or trainer.mp: p=bf16."
    )


class Launcher:
    """Compiles programs on every host, compares them, and launches each once; a `Launch` of the step."""

    def __init__(self, hosts: Hosts, mesh: Mesh, watchdog: Watchdog) -> None:
        self._hosts, self._mesh, self._watchdog = hosts, mesh, watchdog

    def compile_on_all(self, name: str, compile: Callable[[], Mapping[str, str]]) -> None:
        """Have every host compile a program, agree on its digests, and wait until all are ready to launch it.

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
