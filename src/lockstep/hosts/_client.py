"""The coordination service behind one small interface. The only file that a run uses and that touches ``jax._src``."""

import collections
import contextlib
import ipaddress
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import jax
from jax._src import clusters, hardware_utils, xla_bridge
from jax._src.distributed import global_state

from lockstep.errors import HostError

FAIL_BARRIER_S = 10.0  # seconds that the service may take to say that a barrier has failed

DETECT_S = 300  # seconds that finding a cluster's coordinator may take, as in JAX


class ServiceGoneError(HostError):
    """The coordination service no longer answers: the process that runs it has ended."""


class BarrierFailedError(HostError):
    """A process has made this barrier fail for all (`Client.fail_barrier`)."""


class Client(Protocol):
    """A key-value store and barriers that every process of a job shares.

    Keys look like paths. A directory ``a`` is every key that starts with ``a/``.
    """

    task: int  # the number by which the service knows this process; task 0 runs the service
    index: int  # the number of this process, that of `jax.process_index()`; until JAX's devices are there, the task's
    count: int  # the number of processes
    processes: Sequence[int]  # the process of each task, by the task's number

    def renumber(self, processes: Sequence[int]) -> None:
        """Take over the numbers of the processes."""

    def set(self, key: str, value: bytes) -> None:
        """Store a value; a key that exists is overwritten."""

    def get(self, key: str, timeout_s: float) -> bytes:
        """Return the value of a key as soon as it is there; TimeoutError when it is not within ``timeout_s``."""

    def peek(self, key: str) -> bytes | None:
        """Return the value of a key that is there already, else None, without waiting."""

    def get_dir(self, prefix: str) -> dict[str, bytes]:
        """Return every key in the directory ``prefix`` with its value, without waiting."""

    def delete(self, key_or_prefix: str) -> None:
        """Remove the key and the directory of this name, where they exist."""

    def increment(self, key: str) -> int:
        """Return how often any process has called this with the key, this call included."""

    def barrier(self, name: str, timeout_s: float) -> None:
        """Return once every process has called it with this name; TimeoutError on all of them when one does not.

        A name can be used again: the k-th calls of all processes belong together. BarrierFailedError on every process
        where one calls `fail_barrier` in place of this.
        """

    def fail_barrier(self, name: str) -> None:
        """Take part in a barrier so that it fails on every process, also on those that come later; does not wait."""

    def close(self, timeout_s: float) -> None:
        """Have every further call fail with HostError, and wait for the calls that other threads are in."""


class _Numbered:
    """The numbers of a client's process. The service has its own, which on a TPU need not be those of JAX's devices."""

    def __init__(self, task: int, count: int) -> None:
        self.task = self.index = task
        self.count = count
        self.processes: Sequence[int] = range(count)

    def renumber(self, processes: Sequence[int]) -> None:
        self.processes, self.index = processes, processes[self.task]

    def close(self, timeout_s: float) -> None:
        """Do nothing: no call leaves Python."""

    def tasks_explained(self) -> str:
        """Return a sentence for an error that quotes the service: which processes its tasks are, where they differ."""
        pairs = [f"task {task} is process {process}" for task, process in enumerate(self.processes) if task != process]
        return f" (The service counts otherwise: its {', '.join(pairs)}.)" if pairs else ""


class JaxClient(_Numbered):
    """The service that ``jax.distributed.initialize`` started, or a client of another one.

    A thread that is in a call when the interpreter goes down aborts the process: Python ends it where it comes back
    from C++, and C++ takes that for an exception that nothing may throw. So the job closes the client before its end.
    """

    def __init__(self, client: Any = None, task: int = 0, count: int = 1) -> None:
        if client is None:
            client, task, count = global_state.client, global_state.process_id, global_state.num_processes
        if client is None:
            raise HostError("jax.distributed is not initialized; call lockstep.hosts.start() first.")
        super().__init__(task, count)
        self._client = client
        self._calls = threading.Condition()
        self._inside = 0  # calls that threads are in
        self._closed = False

    def set(self, key: str, value: bytes) -> None:
        with self._call(key):
            self._client.key_value_set_bytes(key, value, allow_overwrite=True)

    def get(self, key: str, timeout_s: float) -> bytes:
        with self._call(key):
            return self._client.blocking_key_value_get_bytes(key, _milliseconds(timeout_s))

    def peek(self, key: str) -> bytes | None:
        with self._call(key):
            try:
                return self._client.key_value_try_get_bytes(key)
            except jax.errors.JaxRuntimeError as error:
                if "NOT_FOUND" in str(error):
                    return None
                raise

    def get_dir(self, prefix: str) -> dict[str, bytes]:
        with self._call(prefix):
            return dict(self._client.key_value_dir_get_bytes(prefix.rstrip("/") + "/"))

    def delete(self, key_or_prefix: str) -> None:
        with self._call(key_or_prefix):
            self._client.key_value_delete(key_or_prefix.rstrip("/"))

    def increment(self, key: str) -> int:
        with self._call(key):
            return self._client.key_value_increment(key, 1)

    def barrier(self, name: str, timeout_s: float) -> None:
        self._wait_at_barrier(name, timeout_s, None)

    def fail_barrier(self, name: str) -> None:
        # The service fails a barrier for all where a process says that others than all take part in it.
        with contextlib.suppress(BarrierFailedError):
            self._wait_at_barrier(name, FAIL_BARRIER_S, [(self.task + 1) % self.count])

    def _wait_at_barrier(self, name: str, timeout_s: float, tasks: list[int] | None) -> None:
        with self._call(name):
            try:
                self._client.wait_at_barrier(name, _milliseconds(timeout_s), process_ids=tasks)
            except jax.errors.JaxRuntimeError as error:
                if "INVALID_ARGUMENT" in str(error):
                    raise BarrierFailedError(f"a process made the barrier {name!r} fail") from error
                raise

    def close(self, timeout_s: float) -> None:
        with self._calls:
            self._closed = True
            self._calls.wait_for(lambda: self._inside == 0, timeout_s)

    @contextlib.contextmanager
    def _call(self, key: str) -> Iterator[None]:
        """Count a call, and turn the service's errors into TimeoutError, ServiceGoneError and HostError."""
        with self._calls:
            if self._closed:
                raise HostError(f"the coordination service was asked for {key!r} after this process had left the job.")
            self._inside += 1
        try:
            yield
        except jax.errors.JaxRuntimeError as error:
            raise self._translated(key, f"{error}{self.tasks_explained()}") from None
        finally:
            with self._calls:
                self._inside -= 1
                self._calls.notify_all()

    def _translated(self, key: str, text: str) -> Exception:
        if "DEADLINE_EXCEEDED" in text:
            return TimeoutError(text)
        if "UNAVAILABLE" in text:
            runner = self.processes[0]
            return ServiceGoneError(
                f"the coordination service failed at {key!r}: process {runner}, which runs it, has most likely died. "
                f"Missing: process {runner}. Look for the first error in the logs of all processes. "
                f"The service says: {text}"
            )
        return HostError(
            f"the coordination service failed at {key!r}; most likely another process of the job has died, look for "
            f"the first error in the logs of all of them. The service says: {text}"
        )


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))


class MemoryClient(_Numbered):
    """The same interface between threads of one process: for one-process jobs, and to test host logic quickly.

    Args:
        task: The number of the task that this client stands for.
        store: The values and barriers that all clients share.

    Example:
        >>> from lockstep.hosts import Hosts, MemoryClient
        >>> first, second = (Hosts(client) for client in MemoryClient.hub(2))
        >>> first.is_leader, second.is_leader, second.count
        (True, False, 2)
    """

    def __init__(self, task: int, count: int, store: "_Store"):
        super().__init__(task, count)
        self._store = store
        self._uses: collections.Counter[str] = collections.Counter()

    @classmethod
    def hub(cls, count: int) -> list["MemoryClient"]:
        """Make ``count`` clients that share one store, each for one thread, in the order of their tasks."""
        store = _Store(count)
        return [cls(task, count, store) for task in range(count)]

    def set(self, key: str, value: bytes) -> None:
        with self._store.lock:
            self._store.values[key] = value
            self._store.wake(key)

    def get(self, key: str, timeout_s: float) -> bytes:
        with self._store.lock:
            if not self._store.wait(key, lambda: key in self._store.values, timeout_s):
                raise TimeoutError(f"no key {key!r} within {timeout_s:g} s")
            return self._store.values[key]

    def peek(self, key: str) -> bytes | None:
        with self._store.lock:
            return self._store.values.get(key)

    def get_dir(self, prefix: str) -> dict[str, bytes]:
        start = prefix.rstrip("/") + "/"
        with self._store.lock:
            return {key: value for key, value in self._store.values.items() if key.startswith(start)}

    def delete(self, key_or_prefix: str) -> None:
        name = key_or_prefix.rstrip("/")
        with self._store.lock:
            for key in [key for key in self._store.values if key == name or key.startswith(name + "/")]:
                del self._store.values[key]

    def increment(self, key: str) -> int:
        with self._store.lock:
            number = int(self._store.values.get(key, b"0")) + 1
            self._store.values[key] = b"%d" % number
            return number

    def barrier(self, name: str, timeout_s: float) -> None:
        if self.count == 1:
            return
        store, use = self._store, self._next_use(name)
        with store.lock:
            arrived = store.arrived[use]
            arrived.add(self.task)
            if len(arrived) == self.count:
                store.wake(use)
            elif not store.wait(use, lambda: len(arrived) == self.count or use in store.ended, timeout_s):
                # As in the service: one time-out ends the barrier for all.
                late = sorted({*range(self.count)} - arrived)
                text = f"barrier {name!r}: {len(arrived)} of {self.count} arrived, without tasks {late}."
                store.ended[use] = TimeoutError(text + self.tasks_explained())
                store.wake(use)
            if use in store.ended:
                raise type(store.ended[use])(*store.ended[use].args)

    def fail_barrier(self, name: str) -> None:
        use = self._next_use(name)
        with self._store.lock:
            self._store.ended.setdefault(use, BarrierFailedError(f"barrier {name!r} failed"))
            self._store.wake(use)

    def _next_use(self, name: str) -> str:
        self._uses[name] += 1
        return f"{name}::{self._uses[name]}"


class _Store:
    """Values and barriers behind one lock. A thread is woken only by the key or barrier that it waits for."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.lock = threading.Lock()
        self.values: dict[str, bytes] = {}
        self.arrived: collections.defaultdict[str, set[int]] = collections.defaultdict(set)
        self.ended: dict[str, Exception] = {}
        self._changed: dict[str, threading.Condition] = {}

    def wait(self, name: str, until: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until ``until()`` is true, checked at each `wake` of the same name; return whether it was in time.

        The caller has the lock.
        """
        if until():
            return True
        return self._changed.setdefault(name, threading.Condition(self.lock)).wait_for(until, timeout_s)

    def wake(self, name: str) -> None:
        """Wake the threads that wait for ``name``. The caller has the lock."""
        if (changed := self._changed.get(name)) is not None:
            changed.notify_all()


def service_is_running() -> bool:
    """Return whether ``jax.distributed`` was initialized in this process, by us or by the user."""
    return global_state.client is not None


def service_address() -> str | None:
    """Return host:port of the service, None where it is not running."""
    return global_state.coordinator_address if service_is_running() else None


def bind_address(address: str) -> str | None:
    """Return where the process that runs the service listens for a coordinator address: there alone.

    Args:
        address: host:port, as all processes have it.

    Returns:
        An address of this machine with the port; None, for every interface, where ``JAX_COORDINATOR_BIND_ADDRESS`` says
        another one or the host's name does not lead to one interface of this machine (behind NAT, with several
        addresses, or where ``/etc/hosts`` has the name as a loopback address).
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if "JAX_COORDINATOR_BIND_ADDRESS" in os.environ:
        return None
    if is_loopback(host):
        return f"[::1]:{port}" if ":" in host else f"127.0.0.1:{port}" if host == "localhost" else address
    try:
        addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        ((family, ip),) = {(entry[0], str(entry[4][0])) for entry in addresses}
        if is_loopback(ip):
            return None
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((ip, 0))
    except (OSError, ValueError):
        return None
    return f"[{ip}]:{port}" if family == socket.AF_INET6 else f"{ip}:{port}"


def cluster_address() -> str | None:
    """Return the coordinator address that JAX finds of this cluster where this process is to run the service."""
    with contextlib.suppress(Exception):  # JAX's own call meets it again, and says it
        address, _, index, _ = clusters.ClusterEnv.auto_detect_unset_distributed_params(
            None, None, None, None, None, DETECT_S
        )
        return address if index == 0 else None
    return None


def is_loopback(host: str) -> bool:
    """Return whether a host, by name or address, can be reached from its own machine alone."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def on_one_machine() -> bool:
    """Return whether all processes of the job run on this machine: there is one, or the service has a loopback address.

    The result is the same on every process, for a process on another machine cannot reach a loopback address.
    """
    address = service_address()
    if address is None or global_state.num_processes == 1:
        return True
    return is_loopback(address.rpartition(":")[0].strip("[]"))


def backend_is_running() -> bool:
    """Return whether JAX has made its devices, after which ``jax.distributed`` can no longer be initialized."""
    return xla_bridge.backends_are_initialized()


def tpu_chips() -> int:
    """Return how many TPU chips are attached to this machine, whether JAX uses them or not."""
    chips, _ = hardware_utils.num_available_tpu_chips_and_device_id()
    return int(chips)
