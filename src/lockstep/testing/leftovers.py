"""Checks that a test leaves nothing behind in a process that the next one runs in too."""

import collections
import contextlib
import functools
import gc
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

PATIENCE_S = 3.0
"""Seconds in which threads may end and the service may delete what is spent."""

KEPT_THREADS = {
    "lockstep-watchdog": "ends by itself once nothing has been watched for its time-out",
}
"""Threads that may stay, by the beginning of their names, and why."""
KEPT_KEYS = {
    "lockstep/heartbeat/": "one per process, first posted up to half a second after its start and then overwritten",
    "lockstep/failed launch": "one for the job, overwritten: a launch that failed on some process",
    "lockstep/saved": "one for the job, once something was saved from which another attempt goes on",
}
"""Keys of the coordination service that may stay, by the beginning of their names, and why."""

Facts = Mapping[str, Mapping[str, object]]
"""For each kind of thing what there is of it, by name."""

GROWS = ("key of the service", "thread", "array")
"""Kinds of which only what is added is left behind."""


@contextlib.contextmanager
def assert_nothing_left(hosts: "Hosts | None" = None) -> Iterator[None]:
    """Fail on a process in which the block leaves anything behind, as it is looked for after each test.

    That is: keys of the coordination service, threads, device arrays, and changes of environment variables, of the
    working directory, of the import path, of settings of JAX, of the mesh in use, of signal handlers, of the job's
    time-outs, and of what mocks have replaced. Each has three seconds to go away.

    Args:
        hosts: The processes of the job; None: those that this process has joined.

    Raises:
        AssertionError: Something is left; the text names all of it.

    Example:
        >>> from lockstep.testing import assert_nothing_left
        >>> with assert_nothing_left(hosts):
        ...     total = float(jax.jit(lambda x: x - 1)(1.0))
    """
    if hosts is None:
        from lockstep.hosts import current

        hosts = current()
    before = look(hosts)
    yield
    lines = left(before, hosts)
    assert not lines, "left behind:\n  " + "\n  ".join(lines)


def look(hosts: "Hosts", tests: str = "") -> Facts:
    """Return everything in this process that a test could change for the next one. Launches nothing.

    Args:
        tests: The package or module of the tests, see `package_of_tests`; empty: mocks alone are found.
    """
    import jax

    arrays = collections.Counter(f"{array.dtype}{list(array.shape)}" for array in jax.live_arrays())
    handlers = {number.name: signal.getsignal(number) for number in signal.Signals}
    keys = hosts.client.get_dir("lockstep") if hosts.is_leader else {}
    return {
        "key of the service": {key: "" for key in keys if not key.startswith(tuple(KEPT_KEYS))},
        "thread": {each.name: "" for each in threading.enumerate() if not each.name.startswith(tuple(KEPT_THREADS))},
        "array": dict(arrays),
        "environment variable": dict(os.environ),
        "working directory": {"": os.getcwd()},
        "import path": {"": str(sys.path)},
        "setting of jax": dict(jax.config.values),
        "mesh in use": {"": jax.sharding.get_mesh()},
        "signal handler": {name: handler for name, handler in handlers.items() if handler is not None},
        "hosts": {
            "timeout_s": hosts.timeout_s,
            "debug": hosts.debug,
            "preemption.signal": hosts.preemption.signal,
        },
        "replaced": _replaced(tests),
    }


def left(before: Facts, hosts: "Hosts", tests: str = "") -> list[str]:
    """Return what is different from ``before`` and stays so, each in a line; empty where nothing is.

    Args:
        before: What `look` returned before.
        tests: As in `look`.
    """
    deadline = time.monotonic() + PATIENCE_S
    while (lines := _differences(before, look(hosts, tests))) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.05)
    return lines


def package_of_tests(module: str) -> str:
    """Return the package in which the tests are, from the name of one of their modules; without a package, the module.

    Args:
        module: The name of the module, such as ``project.tests.unit.test_loss``, whose tests are ``project.tests``.
    """
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
    found = {}
    for name, module in list(sys.modules.items()):
        if _inside(name, tests) or not _is_of_project(name, getattr(module, "__file__", None)):
            continue
        classes = [v for v in vars(module).values() if isinstance(v, type) and v.__module__ == module.__name__]
        for owner in (module, *classes):
            for attribute, value in list(vars(owner).items()):
                origin = getattr(value, "__module__", None)
                if isinstance(origin, str) and (_inside(origin, tests) or _inside(origin, "unittest.mock")):
                    found[f"{name}:{getattr(owner, '__qualname__', '')}.{attribute}"] = origin
    return found


@functools.cache
def _is_of_project(module: str, file: str | None) -> bool:
    """Whether a module is lockstep's or of the project under test: neither Python's own nor installed."""
    if _inside(module, "lockstep"):
        return True
    elsewhere = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
    return file is not None and not file.startswith(elsewhere)
