"""Checks around a block of a test: what it leaves behind in its process, what it launches, what it compiles."""

import collections
import contextlib
import functools
import gc
import json
import logging
import os
import signal
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lockstep.hosts import Hosts

PATIENCE_S = 10.0  # seconds in which threads may end, and the service may delete what is spent, on a busy machine too

KEPT_THREADS = {"lockstep-watchdog": "ends by itself once nothing has been watched for its time-out"}
"""Threads that may stay, by the beginning of their names, and why."""
KEPT_KEYS = {
    "lockstep/heartbeat/": "one per process, first posted up to half a second after its start and then overwritten",
    "lockstep/failed launch": "one for the job, overwritten: a launch that failed on some process",
    "lockstep/saved": "one for the job, once something was saved from which another attempt goes on",
}
"""Keys of the coordination service that may stay, by the beginning of their names, and why."""

Facts = Mapping[str, Mapping[str, object]]  # for each kind of thing what there is of it, by name

GROWS = ("key of the service", "thread", "array")  # kinds of which only what is added is left behind


@contextlib.contextmanager
def assert_nothing_left(hosts: "Hosts | None" = None) -> Iterator[None]:
    """Fail on a process in which the block leaves anything behind, as it is looked for after each test.

    That is: keys of the coordination service, threads, device arrays, and changes of environment variables, of the
    working directory, of the import path, of settings of JAX, of the mesh in use, of signal handlers, of the job's
    time-outs, and of what mocks have replaced. Each has ten seconds to go away.

    Args:
        hosts: The processes of the job; None: those that this process has joined.

    Raises:
        AssertionError: Something is left; the text names all of it.

    Example:
        >>> from lockstep.testing import assert_nothing_left
        >>> with assert_nothing_left(hosts):
        ...     total = float(jax.jit(lambda x: x - 1)(1.0))
    """
    hosts = _hosts(hosts)
    before = look(hosts)
    yield
    lines = left(before, hosts)
    assert not lines, "left behind:\n  " + "\n  ".join(lines)


def look(hosts: "Hosts", tests: str = "") -> Facts:
    """Return everything in this process that a test could change for the next one. Launches nothing."""
    import jax

    arrays = collections.Counter(f"{array.dtype}{list(array.shape)}" for array in jax.live_arrays())
    handlers = {number.name: signal.getsignal(number) for number in signal.Signals}
    keys = hosts.client.get_dir("lockstep") if hosts.is_leader else {}
    return {
        "key of the service": {key: "" for key in keys if not key.startswith(tuple(KEPT_KEYS))},
        "thread": {
            thread.name: "" for thread in threading.enumerate() if not thread.name.startswith(tuple(KEPT_THREADS))
        },
        "array": dict(arrays),
        "environment variable": dict(os.environ),
        "working directory": {"": os.getcwd()},
        "import path": {"": str(sys.path)},
        "setting of jax": dict(jax.config.values),
        "mesh in use": {"": jax.sharding.get_mesh()},
        "signal handler": {name: handler for name, handler in handlers.items() if handler is not None},
        "hosts": {"timeout_s": hosts.timeout_s, "debug": hosts.debug, "preemption.signal": hosts.preemption.signal},
        "replaced": _replaced(tests),
    }


def left(before: Facts, hosts: "Hosts", tests: str = "") -> list[str]:
    """Return what is different from ``before`` and stays so, each in a line; empty where nothing is."""
    deadline = time.monotonic() + PATIENCE_S
    while (lines := _differences(before, look(hosts, tests))) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.05)
    return lines


def package_of_tests(module: str) -> str:
    """The package in which the tests are, from the name of one of their modules; without a package, the module."""
    parts = module.split(".")
    ends = [number for number, part in enumerate(parts, start=1) if part in ("test", "tests")]
    return ".".join(parts[: ends[0]]) if ends else module


def forget(tests: str) -> None:
    """Empty the caches of test modules (`functools.cache`), which may hold models and compiled programs."""
    for name, module in list(sys.modules.items()):
        if _inside(name, tests):
            for value in list(vars(module).values()):
                if callable(clear := getattr(value, "cache_clear", None)):
                    clear()


def _inside(module: str, package: str) -> bool:
    return bool(package) and f"{module}.".startswith(f"{package}.")


def _differences(before: Facts, after: Facts) -> list[str]:
    lines = []
    for kind, now in after.items():
        then = before[kind]
        for name in sorted(then.keys() | now.keys()):
            if then.get(name) == now.get(name):
                continue
            if kind not in GROWS:
                lines.append(f"{kind} {name}: {then.get(name)!r} became {now.get(name)!r}")
            elif kind != "array":
                lines += [f"{kind} {name}"] * (name in now)
            elif (more := _number(now.get(name)) - _number(then.get(name))) > 0:
                lines.append(f"array {name}, {more} of them")
    return lines


def _number(value: object) -> int:
    return value if isinstance(value, int) else 0


def _replaced(tests: str) -> dict[str, str]:
    """Return the names in the project's modules and classes that a test has put something of its own into."""
    replaced = {}
    for name, module in list(sys.modules.items()):
        if _inside(name, tests) or not _is_of_project(name, getattr(module, "__file__", None)):
            continue
        classes = [v for v in vars(module).values() if isinstance(v, type) and v.__module__ == module.__name__]
        for owner in (module, *classes):
            for attribute, value in list(vars(owner).items()):
                origin = getattr(value, "__module__", None)
                if isinstance(origin, str) and (_inside(origin, tests) or _inside(origin, "unittest.mock")):
                    replaced[f"{name}:{getattr(owner, '__qualname__', '')}.{attribute}"] = origin
    return replaced


@functools.cache
def _is_of_project(module: str, file: str | None) -> bool:
    """Whether a module is lockstep's or of the project under test: neither Python's own nor installed."""
    if _inside(module, "lockstep"):
        return True
    return file is not None and not file.startswith(_installed())


@functools.cache
def _installed() -> tuple[str, ...]:
    """The directories of Python's own modules and of installed ones, which Python makes anew whenever it is asked."""
    return tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"
"""The event of jax.monitoring at each program that is about to be compiled, or read from the compilation cache."""
SHOWN_CHARACTERS = 2000  # characters of JAX's explanations that an error shows


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
        made = [own_launches[index] if index < len(own_launches) else "nothing" for own_launches in everyone]
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
