"""The processes of a job, as one of them calls them."""

import collections
import contextlib
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping

import jax

from lockstep.errors import HostError, HostTimeoutError, PeerError
from lockstep.hosts._client import Client
from lockstep.hosts.channel import Channel
from lockstep.hosts.exchange import (
    agree,
    all_min,
    broadcast,
    broadcast_from_leader,
    gather,
    reasons_to_stop,
)
from lockstep.hosts.fault import note_saved
from lockstep.hosts.heartbeat import wait_for_missing
from lockstep.hosts.phase import Ledger, Phase
from lockstep.printable import error_text

ROOT = "lockstep/job"
LAUNCHES = "lockstep/launch"


class Hosts:
    """The processes of a job, seen from one of them. Nothing here launches a device program.

    Every process makes the same calls in the same order, from one thread. Each call but ``phase`` waits for other
    processes, at most ``timeout_s`` seconds. Keys are deleted by the leader as soon as a later barrier proves that
    every process has read them, so a scope that ends with a barrier leaves none.

    Args:
        client: The coordination service, or its in-memory twin.

    Example:
        >>> with hosts.run_on_all("read the prompts") as read:
        ...     prompts = ["What is 12 plus 7?"]
        ...     read.agree({"prompts": str(prompts)})
        ...     read.share(len(prompts))
        >>> read.shared
        [1]
        >>> hosts.all_min("free bytes", 1024)
        1024
    """

    def __init__(self, client: Client, timeout_s: float = 300.0):
        self._channel = Channel(client)
        self._prefix = ROOT
        self._uses: collections.Counter[str] = collections.Counter()
        self._counts_names = True
        self.timeout_s = timeout_s
        self.ledger = Ledger()
        """Every launch of the library's programs in this process."""
        self.preemption = Preemption(client)
        """Whether the job is asked to end."""

    @property
    def debug(self) -> bool:
        """Whether the processes compare what they launch before every launch of the library's programs."""
        return self.ledger.before_launch is not None

    @debug.setter
    def debug(self, on: bool) -> None:
        self.ledger.before_launch = self._compare_launch if on else None

    @property
    def index(self) -> int:
        """The number of this process: ``jax.process_index()``, whatever number the coordination service gave it."""
        return self.client.index

    @property
    def count(self) -> int:
        """The number of processes."""
        return self.client.count

    @property
    def is_leader(self) -> bool:
        """Whether this is process 0, which alone writes logs, tables and files."""
        return self.index == 0

    @property
    def client(self) -> Client:
        """The coordination service underneath."""
        return self._channel.client

    @contextlib.contextmanager
    def scope(self, name: str, timeout_s: float | None = None) -> Iterator["Hosts"]:
        """Give the names used inside a prefix of their own: ``name#k/``, k counting the uses of ``name`` so far.

        Inside, each name can be used once. An error that leaves the scope becomes this process's phase, so that
        peers that wait for it in vain can say so.

        Args:
            name: The name of the scope, the same on every process; with a step number in it, a process that skipped one
                is found at once.
            timeout_s: The seconds that a wait inside may last; None keeps the present number.

        Raises:
            HostError: A name was used twice inside.
        """
        inner = object.__new__(Hosts)
        inner.__dict__.update(self.__dict__)
        inner._prefix = self._key(name, count=True)
        inner._uses = collections.Counter()
        inner._counts_names = False
        inner.timeout_s = self.timeout_s if timeout_s is None else timeout_s
        try:
            yield inner
        except BaseException as error:
            with contextlib.suppress(HostError, TimeoutError):
                self.phase(f"{self.last_phase} (left by {error_text(error, 400)})"[:500])
            raise

    def note_saved(self) -> None:
        """Say that this run has saved something from which another attempt goes on, such as a checkpoint.

        A launcher starts a job again after a fault of the hardware once; again only where this was called since.
        """
        note_saved(self.client)

    def start_heartbeat(self) -> Callable[[], None]:
        """Start a thread that shows the others that this process lives; return a function that ends it."""
        return self._channel.heartbeat.start_heartbeat()

    def missing(self) -> str:
        """Wait up to two seconds for a process that gives no sign of life; says which, empty where all do."""
        return wait_for_missing(self.client)

    @property
    def last_phase(self) -> str:
        """The phase that this process posted last."""
        return self._channel.heartbeat.phase

    def phase(self, name: str) -> None:
        """Say what this process does from now on; others read it when they wait for it in vain."""
        self._channel.heartbeat.enter(name)

    @contextlib.contextmanager
    def run_on_all(self, name: str, doing: str | None = None) -> Iterator[Phase]:
        """Run the block on every process; when it fails on one, it fails on all, before any process goes on.

        One exchange, which is a barrier too, carries each process's outcome, the value that it shares
        (`Phase.share`) and what all must agree on (`Phase.agree`). The block launches nothing and waits for no other
        process.

        Args:
            name: The name of the phase, the same on every process.
            doing: What this process is doing, as errors of other processes say it; None for the name.

        Yields:
            The phase. When the block has ended, ``phase.shared`` has the values of all processes.

        Raises:
            PeerError: The block failed on at least one process. The text is the same on every process, also in a job
                of one; the process's own error is its cause.
            DisagreementError: The processes do not agree; the same text on every process.
            HostTimeoutError: Not all came in time; names the missing ones and their last phase.
        """
        with self._phase(name, None, doing) as phase:
            yield phase

    @contextlib.contextmanager
    def launch_on_all(self, name: str, ledger: Ledger | None = None) -> Iterator[Phase]:
        """`run_on_all` for a block that launches device programs, which every process must launch in the same order.

        The launches are compared in the same exchange. A launch from a second thread could come before one of the
        block's on this process and after it on another, so it raises while the block runs.

        Args:
            name: The name of the phase, the same on every process.
            ledger: The ledger that the launches are recorded in; None for that of the job.

        Yields:
            The phase. When the block has ended, ``phase.shared`` has the values of all processes.

        Raises:
            LaunchMismatchError: The processes launched different programs. The same text on every process names the
                first launch that differs, and who made which.
            PeerError, DisagreementError, HostTimeoutError: As in `run_on_all`.
        """
        with self._phase(name, self.ledger if ledger is None else ledger) as phase, jax.thread_guard(True):
            yield phase

    @contextlib.contextmanager
    def _phase(self, name: str, ledger: Ledger | None, doing: str | None = None) -> Iterator[Phase]:
        self.phase(name if doing is None else doing)
        phase = Phase(name)
        error: Exception | None = None
        try:
            yield phase
        except Exception as caught:
            # An error that lives on, as a cause or in a cycle, would keep what functions had: arrays on devices.
            traceback.clear_frames(caught.__traceback__)
            if isinstance(caught, PeerError) and caught.processes == self.count:
                raise  # every process has it already
            error = caught
        try:
            phase.end(self._channel, self._key(name), error, ledger, self.timeout_s, strict=self.debug)
        except HostTimeoutError as late:
            if error is None:
                raise
            raise HostTimeoutError(f"{late} This process had failed before: {error_text(error)}") from error

    def barrier(self, name: str) -> None:
        """Return once every process has called it with this name.

        Raises:
            HostTimeoutError: Not all came in time; names the missing ones and their last phase.
        """
        self._channel.barrier(self._key(name), self.timeout_s)

    def broadcast(self, name: str, value: bytes | None) -> bytes:
        """Return on every process the leader's bytes, of any length; the others pass None. The leader does not wait.

        Raises:
            HostError: The leader passed None, or another process a value.
            HostTimeoutError: The leader posted nothing in time.
        """
        return broadcast(self._channel, self._key(name), value, self.timeout_s)

    def gather(self, name: str, value: bytes) -> list[bytes] | None:
        """Return on the leader every process's bytes by process number, of any length; None elsewhere.

        Raises:
            HostTimeoutError: Not all came in time; names the missing ones and their last phase.
        """
        return gather(self._channel, self._key(name), value, self.timeout_s)

    def agree(self, name: str, values: Mapping[str, str]) -> None:
        """Return when every process passed the same values: for each thing to agree on, its name and its digest.

        Raises:
            DisagreementError: The values differ; the same text on every process says what differs and who has what.
            HostTimeoutError: Not all came in time; names the missing ones and their last phase.
        """
        agree(self._channel, self._key(name), values, self.timeout_s, strict=self.debug)

    def all_min(self, name: str, value: int) -> int:
        """Return on every process the smallest value that any of them passed.

        Raises:
            HostTimeoutError: Not all came in time; names the missing ones and their last phase.
        """
        return all_min(self._channel, self._key(name), value, self.timeout_s)

    def reasons_to_stop(self, name: str, error: Exception | None, reason: str | None = None) -> set[str]:
        """Return when every process is here, and why any of them wants all to stop: nothing while they can go on.

        It is made to be called often, with the same name: it costs one barrier, and nothing in a job of one process.

        Args:
            name: The name of the place, the same on every process.
            error: What went wrong on this process, or None.
            reason: Why this process wants all to stop, or None.

        Raises:
            PeerError: At least one process has an error; the same text on every process, its own error is the cause.
            HostTimeoutError: Not all came in time; names the missing ones and their last phase.
        """
        key = f"{self._prefix}/{name}"
        self._uses[key] += 1
        return reasons_to_stop(self._channel, key, self._uses[key], error, reason, self.timeout_s)

    def broadcast_from_leader(self, name: str, work: Callable[[], bytes], more_s: float = 0.0) -> bytes:
        """Do ``work`` on the leader alone and return on every process what it returned, of any length.

        Args:
            more_s: The seconds beyond ``timeout_s`` that the work may take.

        Raises:
            PeerError: The work failed; the same text on every process, and on the leader its error is the cause.
            HostTimeoutError: The leader posted nothing in time.
        """
        return broadcast_from_leader(self._channel, self._key(name), work, self.timeout_s + more_s)

    def _compare_launch(self) -> None:
        # The number of the launch is in the key, so that a process which makes another one waits elsewhere.
        phase = Phase("a launch in debug mode")
        phase.end(self._channel, f"{LAUNCHES}/{self.ledger.count - 1}", None, self.ledger, self.timeout_s)

    def _key(self, name: str, count: bool = False) -> str:
        self._uses[name] += 1
        uses = self._uses[name]
        if count or self._counts_names:
            return f"{self._prefix}/{name}#{uses}"
        if uses > 1:
            raise HostError(
                f"{name!r} is used twice inside the scope {self._prefix!r}; each name can be used once there. Choose "
                "another name, or open a scope for each repetition."
            )
        return f"{self._prefix}/{name}"


@contextlib.contextmanager
def ready_on_all(hosts: Hosts, name: str) -> Iterator[None]:
    """Run a block on every process before launches of all; when it fails on one, it fails on all, and none launches.

    It is made for a loop of launches: the name may be used again, and it costs one barrier, nothing in a job of one
    process. `Hosts.run_on_all` also has processes share and agree.

    Raises:
        PeerError: The block failed on at least one process; the same text on every process, its own error is the cause.
        HostTimeoutError: Not all came in time; names the missing ones and their last phase.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    hosts.reasons_to_stop(name, error)


JAX_NOTICE = "RECEIVED_PREEMPTION_NOTICE"
"""The key under which JAX's preemption service, where it runs, shows all processes that one of them got a SIGTERM."""
ASKED = "lockstep/asked to end"  # key that is there while a process is that ends in order
LOOK_S = 1.0  # seconds between two looks at that key: `Preemption.requested` is called before each launch


class Preemption:
    """Whether this process is asked to end; where that matters to the others, an exchange tells them."""

    def __init__(self, client: Client):
        self._client = client
        self._next_look = 0.0
        self.signal: int | None = None  # the signal that asked this process to end, or None
        self.in_order = False  # whether a loop notes signals, and ends on them in order
        self._noted = 0.0

    @property
    def age_s(self) -> float:
        """The seconds since the signal; 0 where there was none."""
        return 0.0 if self.signal is None else time.monotonic() - self._noted

    def note(self, number: int) -> None:
        """Remember a signal; does nothing else, so a signal handler may call it."""
        if self.signal is None:
            self._noted = time.monotonic()
            self.signal = number

    def requested(self) -> bool:
        """Return whether this process is asked to end. The leader reads JAX's notice, and notes it as a SIGTERM."""
        now = time.monotonic()
        if self.signal is None and self._client.index == 0 and now >= self._next_look:
            self._next_look = now + LOOK_S
            if self._client.peek(JAX_NOTICE) is not None:
                self.note(signal.SIGTERM)
        return self.signal is not None

    def tell(self) -> None:
        """Tell processes that wait for their rows that this one is asked to end; any thread may call it."""
        if self._client.count > 1:
            self._client.set(ASKED, b"")

    def is_told(self) -> bool:
        """Whether a process has called `tell`."""
        return self._client.count > 1 and self._client.peek(ASKED) is not None

    def clear(self) -> None:
        """Forget a noted signal, once what it ended has ended."""
        if self.signal is not None and self._client.count > 1:
            self._client.delete(ASKED)
        self.signal = None
