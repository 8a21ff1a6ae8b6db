"""Groups of processes that are started once and serve many tests.

There is at most one shared group per number of processes and devices. It starts when a test first needs it and ends
with the tests. A function that leaves something behind, raises, dies or takes too long ends its group and fails its own
test alone: the next one starts a new group.
"""

import atexit
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lockstep.testing.group import Group
from lockstep.testing.protocol import Arguments, Placeholder, Reference


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolSettings:
    """Settings of the processes that a pool starts.

    Args:
        environment: What is set in every process, beside the variables of the test run.
        setup: A function of a module that every process calls before it joins its job: what must be set before JAX has
            devices. None: nothing.
        most_processes: How many processes may wait for tests at a time, each with half a gigabyte or so; when more are
            needed, the groups that waited longest end first.

    Example:
        >>> from lockstep.testing import PoolSettings
        >>> PoolSettings(most_processes=4).most_processes
        4
    """

    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    setup: Callable[[], object] | None = None
    most_processes: int = 8


class Pool:
    """The groups of a test run."""

    def __init__(self, settings: PoolSettings | None = None):
        self.settings = settings or PoolSettings()
        self._shared: dict[tuple[int, int], Group] = {}  # the one that was used last comes last

    def shared(self, processes: int, devices: int) -> Group:
        """Return the running group of this size, or start it, for which others that waited longest may end.

        Raises:
            AssertionError: A process of it ended while it waited, or a new one did not start; the text has the logs.
        """
        group = self._shared.pop((processes, devices), None)
        if group is not None and not group.running:
            group.end()
            group = None
        if group is None:
            for size in list(self._shared):
                if sum(count for count, _ in self._shared) + processes > self.settings.most_processes:
                    self._shared.pop(size).end()
            group = self.start(processes, devices)
        self._shared[processes, devices] = group
        return group

    def start(self, processes: int, devices: int, env: Mapping[str, str] | None = None) -> Group:
        """Start a group that is not shared.

        Args:
            env: What is set in every process, beside the environment of the settings.

        Raises:
            AssertionError: It did not start; the text has the logs.
        """
        return Group(processes, devices, {**self.settings.environment, **(env or {})}, self.settings.setup)

    def call(
        self,
        function: Reference,
        arguments: Arguments,
        *,
        processes: int,
        devices: int,
        timeout_s: float,
        env: Mapping[str, str] | None = None,
        own: str = "",
        name: str = "",
    ) -> list[Any]:
        """Call a function in every process of a group; see `run_processes`, and `Group.call` for the rest.

        Args:
            env: What is set in every process, which then serve this function alone.
            own: Why the function needs processes that serve it alone; empty where it does not.
            name: What errors call it; empty: its name.
        """
        if not own and not env:
            return self.shared(processes, devices).call(function, arguments, timeout_s=timeout_s, name=name)
        group = self.start(processes, devices, env)
        results = group.call(function, arguments, timeout_s=timeout_s, name=name, leaves=True)
        group.end()
        return results

    def end(self) -> None:
        """End the shared groups.

        Raises:
            AssertionError: One did not end in order; the text has every process's log.
        """
        groups = list(self._shared.values())
        self._shared.clear()
        for group in groups:
            group.hang_up()
        for group in groups:
            group.end()


POOL = Pool()
"""The pool of this test run."""
atexit.register(POOL.end)  # for a script; pytest's plugin ends it earlier


def configure(settings: PoolSettings) -> None:
    """Set how the processes of this test run are started, from a ``conftest.py``.

    Args:
        settings: The settings, for groups that are started from now on.

    Example:
        >>> from lockstep.testing import PoolSettings, configure
        >>> configure(PoolSettings(environment={"XLA_FLAGS": "--xla_cpu_enable_fast_math=false"}))
    """
    POOL.settings = settings


def run_processes(
    body: Callable[..., Any],
    *,
    processes: int = 2,
    devices: int = 2,
    timeout_s: float = 120.0,
    args: Sequence[Any] = (),
    env: Mapping[str, str] | None = None,
    own: str = "",
) -> list[Any]:
    """Run ``body(hosts, *args)`` in every process of a job and return what each one returned, by process number.

    Args:
        body: A function of a module. It gets the process's `lockstep.hosts.Hosts`, already started, and ``args``.
        devices: The CPU devices of each, as JAX sees them.
        env: What is set in every process, which then serve this body alone.
        own: Why the body needs processes that serve it alone; empty where it does not.

    Returns:
        JSON values: numbers, text, lists and dictionaries; NumPy arrays come as lists, and keys as text.

    Raises:
        AssertionError: It failed in a process or ran out of time, or it left something behind in processes that serve
            others; the text has every process's log.

    Example:
        >>> from lockstep.testing import run_processes
        >>> import inspect
        >>> run_processes(inspect.isclass, processes=2, devices=1)  # a function of yours, which gets the hosts
        [False, False]
    """
    return POOL.call(
        Reference.to(body),
        ((Placeholder.HOSTS, *args), {}),
        processes=processes,
        devices=devices,
        timeout_s=timeout_s,
        env=env,
        own=own,
    )
