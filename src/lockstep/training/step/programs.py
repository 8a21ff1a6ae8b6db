"""The door to the devices of a run: programs that every host compiles, compares and launches.

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
from lockstep.hosts import Hosts, Phase, Watchdog, environment
from lockstep.placement.device import Program, block_bytes, compile_program, free_bytes
from lockstep.printable import bytes_text, get_logger
from lockstep.training.step.train_step import TrainStep

log = get_logger(__name__)

UNKNOWN = 2**62  # the bytes of a step that the compiler refused without saying how many it needs


class Programs:
    """Compiles programs on every host, compares them, and watches each launch; a `Launch` of a program with one use."""

    def __init__(self, hosts: Hosts, mesh: Mesh) -> None:
        self.hosts, self.mesh = hosts, mesh
        self.watchdog = Watchdog(hosts, hosts.timeout_s)

    def compile(self, name: str, function: Callable[..., Any], arguments: Sequence[Any], **options: Any) -> Program:
        """Compile a program on this host alone: its digests are still to be compared, see `compiling_on_all`.

        Args:
            options: Those of `lockstep.placement.device.compile_program`.
        """
        return compile_program(name, function, arguments, mesh=self.mesh, ledger=self.hosts.ledger, **options)

    @contextlib.contextmanager
    def compiling_on_all(self, name: str, **facts: str) -> Iterator[Phase]:
        """Around the compilation of a program, whose digests the block gives to the phase: every host goes on when all
        are ready to launch the same.

        Args:
            facts: What the hosts compare beside the program, their versions and flags.

        Raises:
            PeerError: It does not compile on some host; raised on every host.
            DisagreementError: The hosts compiled different programs, or with different versions or flags.
        """
        with self.hosts.scope(name) as scope, scope.run_on_all(f"compiling {name}") as phase:
            phase.agree(environment() | {"debug": str(scope.debug)} | facts)
            yield phase
        self.hosts.phase("training")

    def compile_on_all(self, name: str, compile: Callable[[], Mapping[str, str]]) -> None:
        """`compiling_on_all` around a function that compiles and returns digests."""
        with self.compiling_on_all(name) as phase:
            phase.agree(compile())

    @contextlib.contextmanager
    def launching(self, name: str, step: int | None = None) -> Iterator[None]:
        """Around a launch and the wait for its result: a watchdog ends the process where it takes too long, and a
        failure of the runtime names the process and who is missing. With one process the runtime's own error is raised.

        Args:
            step: The completed steps of training; None for what does not belong to a step.

        Raises:
            HostError: The runtime failed, on several hosts most likely because one of them has died.
        """
        hosts = self.hosts
        try:
            with self.watchdog.watch(name):
                yield
        except jax.errors.JaxRuntimeError as error:
            if hosts.count == 1:
                raise
            after = "" if step is None else f" after {step} steps"
            raise HostError(
                f"the {name.replace('_', ' ')}{after} failed on process {hosts.index} of {hosts.count}."
                f"{hosts.missing()} If the runtime speaks of a connection, a peer or a time-out, another process "
                f"has died: look for the log that ends without an error. The runtime says: {error}"
            ) from error

    def __call__(self, name: str, function: Callable[..., Any], arguments: Sequence[Any], **options: Any) -> Any:
        """Compile, agree, launch once, and wait for the result; the options are those of `compile`."""
        with self.compiling_on_all(name) as phase:
            program = self.compile(name, function, arguments, **options)
            phase.agree(program.digests)
        with self.launching(name):
            return jax.block_until_ready(program(*arguments))


def memory_for_training(mesh: Mesh, state: PyTree) -> int:
    """The bytes of a device of this process that there are for the train step: what is free now, and its state."""
    return free_bytes(mesh) + sum(block_bytes(leaf) for leaf in jax.tree.leaves(state))


def compile_largest(
    programs: Programs,
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
    hosts = programs.hosts
    memory = hosts.all_min("memory of the train step", memory)
    sizes = [size for size in range(rows // fewest, 0, -1) if rows % size == 0]
    state_bytes, needed, size = 0, 0, rows
    while sizes:
        size = sizes.pop(0)
        step = make(rows // size)
        with programs.compiling_on_all("train_step", **{"rows at a time": str(size)}) as phase:
            compiled_for = arguments(step)
            state_bytes = sum(block_bytes(leaf) for leaf in jax.tree.leaves(compiled_for[0]))
            try:
                phase.agree(step.compile(*compiled_for, ledger=hosts.ledger))
                phase.share(step.needed_bytes())
            except HbmError as error:
                phase.share(error.needed or UNKNOWN)
        needed = max(phase.shared)
        if needed <= memory:
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
