"""What a process holds to talk to the other processes of its job."""

import collections
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from lockstep.errors import HostError
from lockstep.hosts._client import Client
from lockstep.hosts.channel import Channel
from lockstep.hosts.exchange import agree, broadcast, broadcast_from_leader, gather, least, settle
from lockstep.hosts.heartbeat import wait_for_missing
from lockstep.hosts.ledger import Ledger, agree_launches, compare_launches
from lockstep.hosts.preemption import Preemption

ROOT = "lockstep/job"
LAUNCHES = "lockstep/launch"


class Hosts:
    """The processes of a job, seen from one of them. Nothing here launches a device program.

    Every process makes the same calls in the same order, from one thread. Each call but ``phase`` waits for other
    processes, at most ``timeout_s`` seconds. Keys are deleted by the leader as soon as a later barrier proves that
    every process has read them, so a scope that ends with a barrier leaves none.

    Args:
        client: the coordination service, or its in-memory twin.
        timeout_s: seconds that any wait may last.
    """

    def __init__(self, client: Client, timeout_s: float = 300.0):
        self._channel = Channel(client)
        self._prefix = ROOT
        self._uses: collections.Counter[str] = collections.Counter()
        self._counts_names = True
        self.timeout_s = timeout_s
        self.index = client.index
        self.count = client.count
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
        peers that wait for it in vain are told about it.

        Args:
            name: the same on every process; with a step number in it, a process that skipped one is found at once.
            timeout_s: for the waits inside; None keeps the present one.

        Raises:
            HostError: a name was used twice inside.
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
                self.phase(f"{self.last_phase} (left by {type(error).__name__}: {error})"[:500])
            raise

    def start_heartbeat(self) -> Callable[[], None]:
        """Start a thread that shows the others that this process lives; return a function that ends it."""
        return self._channel.heartbeat.start_heartbeat()

    def missing(self) -> str:
        """Wait up to two seconds for a process that gives no sign of life; says which, empty where all do."""
        return wait_for_missing(self.client)

    @property
    def last_phase(self) -> str:
        """What this process last said it was doing."""
        return self._channel.heartbeat.phase

    def phase(self, name: str) -> None:
        """Say what this process does from now on; others read it when they wait for it in vain."""
        self._channel.heartbeat.enter(name)

    def barrier(self, name: str) -> None:
        """Return once every process has called it with this name.

        Raises:
            HostTimeoutError: not all came in time; names the missing ones and their last phase.
        """
        self._channel.barrier(self._key(name), self.timeout_s)

    def broadcast(self, name: str, value: bytes | None) -> bytes:
        """Return on every process the leader's bytes, of any length; the others pass None. The leader does not wait.

        Raises:
            HostError: the leader passed None, or another process a value.
            HostTimeoutError: the leader posted nothing in time.
        """
        return broadcast(self._channel, self._key(name), value, self.timeout_s)

    def gather(self, name: str, value: bytes) -> list[bytes] | None:
        """Return on the leader every process's bytes by process number, of any length; None elsewhere.

        Raises:
            HostTimeoutError: not all came in time; names the missing ones and their last phase.
        """
        return gather(self._channel, self._key(name), value, self.timeout_s)

    def agree(self, name: str, values: Mapping[str, str]) -> None:
        """Return when every process passed the same values: for each thing to agree on, its name and its digest.

        Raises:
            DisagreementError: on every process, with the same text: what differs, and who holds what.
            HostTimeoutError: not all came in time; names the missing ones and their last phase.
        """
        agree(self._channel, self._key(name), values, self.timeout_s)

    def least(self, name: str, value: int) -> int:
        """Return on every process the smallest value that any of them passed.

        Raises:
            HostTimeoutError: not all came in time; names the missing ones and their last phase.
        """
        return least(self._channel, self._key(name), value, self.timeout_s)

    def agree_launches(self, name: str, ledger: Ledger | None = None) -> None:
        """Return when every process has launched the same programs in the same order.

        Args:
            name: of this agreement.
            ledger: to compare; None: that of the job.

        Raises:
            LaunchMismatchError: on every process alike: the first launch that differs, and who made which.
            HostTimeoutError: not all came in time; names the missing ones and their last phase.
        """
        agree_launches(self._channel, self._key(name), self.ledger if ledger is None else ledger, self.timeout_s)

    def compare_launches(self, name: str, states: Sequence[str], ledger: Ledger | None = None) -> None:
        """`agree_launches` where all states (`Ledger.state`) are known already; waits only where they differ.

        Args:
            name: of this agreement.
            states: by process number.
            ledger: whose state this process gave; None: that of the job.

        Raises:
            LaunchMismatchError: on every process alike: the first launch that differs, and who made which.
        """
        own = self.ledger if ledger is None else ledger
        compare_launches(self._channel, self._key(name), states, own, self.timeout_s)

    def settle(self, name: str, error: BaseException | None, value: object = None) -> list[Any]:
        """Return what every process has to tell (short JSON, by process number) when no process has an error.

        Raises:
            PeerError: at least one process passed an error. The text is the same everywhere; an own error is its cause.
            HostTimeoutError: not all came in time; names the missing ones and their last phase.
        """
        return settle(self._channel, self._key(name), error, self.timeout_s, value)

    def broadcast_from_leader(self, name: str, work: Callable[[], bytes]) -> bytes:
        """Do ``work`` on the leader alone and return on every process what it returned, of any length.

        Raises:
            PeerError: it failed; the same text everywhere, and on the leader the error is its cause.
            HostTimeoutError: the leader posted nothing in time.
        """
        return broadcast_from_leader(self._channel, self._key(name), work, self.timeout_s)

    def _compare_launch(self) -> None:
        # The number of the launch is in the key, so that a process which makes another one waits elsewhere.
        agree_launches(self._channel, f"{LAUNCHES}/{self.ledger.count - 1}", self.ledger, self.timeout_s)

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
