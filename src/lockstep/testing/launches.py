"""Checks of what the processes of a job launch, around a block that each of them runs."""

import contextlib
import json
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lockstep.hosts import Hosts

LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"
"""The event of jax.monitoring at each program that is about to be compiled, or read from the compilation cache."""
SHOWN_CHARACTERS = 2000
"""Characters of JAX's explanations that an error shows."""


@contextlib.contextmanager
def assert_same_launches(hosts: "Hosts | None" = None) -> Iterator[list[str]]:
    """Fail on every process if one of them launches anything inside that another does not.

    Seen are programs that are jitted, compiled ahead of time, and eager operations, of every library. CPU devices do
    not mind a launch that one process makes alone; on a pod the job hangs or dies.

    Args:
        hosts: The processes of the job; None: those that this process has joined.

    Yields:
        The names of the launches of this process so far.

    Raises:
        AssertionError: Names the first launch that differs, and what each process launched there.

    Example:
        >>> from lockstep.testing import assert_same_launches
        >>> with assert_same_launches(hosts):
        ...     total = jax.jit(lambda x: 3 * x)(1.0)
    """
    from lockstep.check import record_launches

    hosts = _hosts(hosts)
    with record_launches() as launches:
        yield launches
    with hosts.scope("assert_same_launches") as scope:
        rows = scope.gather("launches", json.dumps(launches).encode())
        everyone = json.loads(scope.broadcast("all", b"[" + b",".join(rows) + b"]" if rows is not None else None))
        scope.barrier("end")
    for index in range(max(map(len, everyone))):
        made = [one[index] if index < len(one) else "nothing" for one in everyone]
        texts = [f"process {process}: {name}" for process, name in enumerate(made)]
        assert len(set(made)) == 1, f"launch {index} differs: {'; '.join(texts)}"


@contextlib.contextmanager
def assert_no_retrace() -> Iterator[None]:
    """Fail if anything is traced and compiled inside: run it around the steps after the first.

    A step that is compiled again costs minutes on a pod, and processes that compile at different steps wait for each
    other. Eager operations count too, at their first use with a shape.

    Raises:
        AssertionError: Names the programs, with what JAX says of the argument that changed.

    Example:
        >>> from lockstep.testing import assert_no_retrace
        >>> step = jax.jit(lambda x: x + 1)
        >>> total = step(1.0)
        >>> with assert_no_retrace():
        ...     total = step(2.0)
    """
    import jax

    programs: list[str] = []

    def see(event: str, duration_secs: float, **fields: str | int) -> None:
        if event == LOWERED:
            programs.append(str(fields.get("fun_name", "a program")))

    jax.monitoring.register_event_duration_secs_listener(see)
    try:
        with _explanations() as explanations:
            yield
    finally:
        jax.monitoring.unregister_event_duration_listener(see)
    told = "\n".join(explanations)[:SHOWN_CHARACTERS]
    assert not programs, (
        f"compiled inside: {', '.join(programs)}. Call each program once before with the same shapes, types and "
        "shardings, and hand it what changes from step to step as an array." + (f" JAX says:\n{told}" if told else "")
    )


@contextlib.contextmanager
def _explanations() -> Iterator[list[str]]:
    """Yield what JAX says inside about its tracing cache, instead of printing it."""
    import jax

    from lockstep.check import cache_miss_logger

    texts: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logger = cache_miss_logger()
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        with jax.explain_cache_misses(True):
            yield texts
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate


def _hosts(hosts: "Hosts | None") -> "Hosts":
    if hosts is None:
        from lockstep.hosts import current

        hosts = current()
    return hosts
