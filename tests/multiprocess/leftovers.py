"""What a body may not leave behind in a process that the next one runs in too."""

import collections
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping

from lockstep.hosts import Hosts

PATIENCE_S = 3.0
"""Seconds in which threads may end and the service may delete what is spent."""

KEPT_THREADS = {
    "lockstep-watchdog": "ends by itself once nothing has been watched for its time-out",
}
"""Threads that may stay, by the beginning of their names, and why."""

Facts = Mapping[str, Mapping[str, object]]
"""For each kind of thing what there is of it, by name."""

GROWS = ("key of the service", "thread", "array")
"""Kinds of which only what is added is left behind."""


def look(hosts: Hosts) -> Facts:
    """Everything in this process that a body could change for the next one. Launches nothing."""
    import jax

    arrays = collections.Counter(f"{array.dtype}{list(array.shape)}" for array in jax.live_arrays())
    handlers = {number.name: signal.getsignal(number) for number in signal.Signals}
    return {
        "key of the service": dict.fromkeys(hosts.client.get_dir("lockstep"), "") if hosts.is_leader else {},
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
        "replaced": _replaced(),
    }


def left(before: Facts, hosts: Hosts) -> list[str]:
    """What is different from ``before`` and stays so, each in a line; empty where nothing is.

    Args:
        before: what was `look`ed at.
        hosts: of this process.
    """
    deadline = time.monotonic() + PATIENCE_S
    while (lines := _differences(before, look(hosts))) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.05)
    return lines


def _differences(before: Facts, after: Facts) -> list[str]:
    lines = []
    for kind, now in after.items():
        then = before[kind]
        for name in sorted(then.keys() | now.keys()):
            if then.get(name) == now.get(name):
                continue
            if kind not in GROWS:
                lines.append(f"{kind} {name}: {then.get(name)!r} became {now.get(name)!r}")
            elif name in now and (kind != "array" or now[name] > then.get(name, 0)):
                count = f", {now[name] - then.get(name, 0)} of them" if kind == "array" else ""
                lines.append(f"{kind} {name}{count}")
    return lines


def _replaced() -> dict[str, str]:
    """Names in lockstep's modules and classes that a test has put something of its own into."""
    found = {}
    modules = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] == "lockstep"]
    for module in modules:
        classes = [v for v in vars(module).values() if isinstance(v, type) and v.__module__ == module.__name__]
        for owner in (module, *classes):
            for name, value in list(vars(owner).items()):
                origin = getattr(value, "__module__", None)
                if isinstance(origin, str) and origin.startswith(("tests.", "unittest.mock")):
                    found[f"{module.__name__}:{getattr(owner, '__qualname__', '')}.{name}"] = origin
    return found
