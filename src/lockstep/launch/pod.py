"""A pod that Google rents out: make it, wait for it, find its machines, delete it."""

import abc
import concurrent.futures
import dataclasses
import shlex
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Protocol

from lockstep.exits import REFUSED, UNAVAILABLE
from lockstep.launch.backend import LaunchError, Worker
from lockstep.launch.gcloud import CALL_S, Gcloud
from lockstep.launch.machines import SSH_OPTIONS
from lockstep.launch.slices import Slice
from lockstep.launch.tool import ToolError

LABEL: Final = "lockstep-launch"  # the label of what the launcher made: `delete` leaves alone what has none
STILL_S: Final = 300.0  # seconds after which a state that has not changed is shown again
LOST_POLLS: Final = 6  # failed polls in a row that a wait survives: a laptop may lose its network for a minute


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """One machine of a pod."""

    name: str  # how it is shown, and how Google knows it
    slice_id: int
    address: str  # where ssh reaches it
    internal_address: str  # where the other machines reach it
    host_key_alias: str  # under which name ssh keeps its host key: addresses come back with other machines


def slices_of(machines: Sequence[Machine]) -> int:
    """The number of slices that machines are of."""
    return len({machine.slice_id for machine in machines})


class GivenUpError(LaunchError):
    """Nobody waits any longer for a slice that may still come."""


class Pod(Protocol):
    """Slices of one name. Every method may raise `LaunchError`."""

    @property
    def name(self) -> str:
        """The name in messages."""

    def create_commands(self) -> list[list[str]]:
        """Return the commands that make it, ready to run."""

    def wait_lines(self) -> list[str]:
        """Return lines for a shell that wait until it can be used, as `ensure` does."""

    def delete_commands(self) -> list[list[str]]:
        """Return the commands that delete all of it, ready to run."""

    def login_commands(self, machines: Sequence[Machine] | None) -> list[list[str]]:
        """Return the commands by which gcloud brings an ssh key to every machine; None: they are not known yet."""

    def ssh_command(self, worker: int, command: str) -> list[str]:
        """Return gcloud's own way to run a command on a worker, numbered over all slices, for people to paste."""

    def made_here(self) -> bool:
        """Whether the launcher made it: what others made is not deleted with a job."""

    def ensure(self, wait: "Wait") -> None:
        """Use what there is of this name, else make it, and wait until it can be used."""

    def machines(self) -> list[Machine]:
        """Return its machines, slice by slice, in the order of their numbers as far as Google tells it."""

    def lost(self) -> str | None:
        """Return in words what happened to it if it cannot run anything any more, or None."""

    def delete(self, wait: "Wait") -> None:
        """Delete all of it and wait until it is gone; what is already gone is no error."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GooglePod(abc.ABC):
    """The part of a `Pod` that both of Google's ways to rent slices share."""

    gcloud: Gcloud
    name: str
    slice: Slice | None  # the kind of slice, or None: only an existing one is used, whatever its kind
    count: int = 1
    capacity: str = "on-demand"  # a key of `CAPACITY_FLAGS`
    network: str = ""  # the network's name, or empty for `default`
    service_account: str = ""  # the account of the machines, or empty for the project's default
    internal_ip: bool = False  # whether machines have, and ssh uses, internal addresses only

    @property
    def slice_names(self) -> list[str]:
        """The names of the slices: its own, or ``name-0``, ``name-1``."""
        return [self.name] if self.count == 1 else [f"{self.name}-{i}" for i in range(self.count)]

    def account_options(self) -> list[str]:
        """The options of a command that makes machines, for their network and account."""
        given = {"network": self.network, "service-account": self.service_account}
        return [f"--{name}={value}" for name, value in given.items() if value]

    def described(self, machines: str) -> str:
        """The number, kind and capacity of its slices, in words."""
        assert self.slice is not None
        times = f"{self.count} × " if self.count > 1 else ""
        return f"{times}{self.slice.name} ({self.capacity}, {machines})"

    @abc.abstractmethod
    def delete_commands(self) -> list[list[str]]:
        """Return the commands that delete all of it, see `Pod`."""

    def machine(self, name: str, slice_id: int, internal: str, external: str, host_key_alias: str) -> Machine:
        """One of its machines, at the address by which ssh is to reach it."""
        if not (address := internal if self.internal_ip else external):
            raise LaunchError(
                f"{name} has no {'' if self.internal_ip else 'external '}address. From a machine of the same network, "
                "or with a VPN into it, add --internal_ip.",
                REFUSED,
            )
        return Machine(
            name=name, slice_id=slice_id, address=address, internal_address=internal, host_key_alias=host_key_alias
        )

    def withdraw(self, wait: "Wait", what: str, delete: Callable[[], None]) -> None:
        """Delete what was asked for and nobody waits for any more: it would cost money once it comes."""
        wait.say(f"{self.name}: {what}")
        try:
            delete()
        except BaseException as error:
            wait.say(by_hand(self.name, error, self.delete_commands()))
            if not isinstance(error, ToolError):
                raise

    def run_unless_gone(self, command: list[str], timeout_s: float = CALL_S) -> None:
        """Run a command that deletes something; what is not there is no error."""
        try:
            self.gcloud.run(command, timeout_s)
        except ToolError as error:
            if error.cause.name != "gone":
                raise


@dataclasses.dataclass(kw_only=True)
class Wait:
    """A wait that shows each state as it comes."""

    say: Callable[[str], object]
    timeout_s: float
    poll_s: float
    given_up: Callable[[], bool] = lambda: False  # whether it is to end before its time

    def until(self, what: str, look: Callable[[], tuple[str, bool]]) -> bool:
        """Look until it is done, or out of time (False); a state is shown when it changes, and from time to time."""
        begin = shown_at = time.monotonic()
        shown, failures = "", 0
        while True:
            try:
                state, done = look()
                failures = 0
            except ToolError as error:
                failures += 1
                if not error.cause.passes or failures >= LOST_POLLS:
                    raise
                state, done = f"no answer from Google ({error.summary}), asking again", False
            now = time.monotonic()
            if state != shown or now - shown_at > STILL_S:
                after = f" after {duration(now - begin)}" if now - begin >= 1 else ""
                self.say(f"{what}: {state}{after}")
                shown, shown_at = state, now
            if done:
                return True
            if now - begin > self.timeout_s or self.given_up():
                return False
            time.sleep(self.poll_s)

    def until_usable(self, name: str, look: Callable[[], tuple[str, bool]], *, undone: str) -> None:
        if not self.until(name, look):
            if self.given_up():
                raise GivenUpError(f"{name} has not come{undone}", UNAVAILABLE)
            raise LaunchError(
                f"{name} could not be used within {self.timeout_s:.0f} s{undone}. Wait longer with --wait_s, or try "
                "another --zone or --capacity_type.",
                UNAVAILABLE,
            )


class ElasticPod:
    """Slices of which some may be missing: each is asked for, lost and made again by itself.

    Args:
        least: The slices without which nothing starts.
        more_s: Seconds to wait for the other slices once the least can be used.
    """

    def __init__(self, parts: Sequence[Pod], least: int, hosts: int, more_s: float) -> None:
        self._parts, self._least, self._hosts, self._more_s = parts, least, hosts, more_s
        self._used: list[Pod] | None = None

    @property
    def name(self) -> str:
        return ", ".join(part.name for part in self._parts)

    def create_commands(self) -> list[list[str]]:
        return [command for part in self._parts for command in part.create_commands()]

    def wait_lines(self) -> list[str]:
        return [line for part in self._parts for line in part.wait_lines()]

    def delete_commands(self) -> list[list[str]]:
        return [command for part in self._parts for command in part.delete_commands()]

    def login_commands(self, machines: Sequence[Machine] | None) -> list[list[str]]:
        """The commands that bring the key to the slices in use, see `Pod`."""
        if machines is None:
            return [command for part in self._parts for command in part.login_commands(None)]
        found = []
        for index, part in enumerate(self._in_use()):
            found += part.login_commands([machine for machine in machines if machine.slice_id == index])
        return found

    def ssh_command(self, worker: int, command: str) -> list[str]:
        return self._parts[worker // self._hosts].ssh_command(worker % self._hosts, command)

    def made_here(self) -> bool:
        """Whether the launcher made any of the slices."""
        return any(part.made_here() for part in self._parts)

    def ensure(self, wait: Wait) -> None:
        """Ask for every slice that is not there, and wait for the least of them, then for the others for a while.

        What has not come by then is withdrawn; the next start asks for it again.
        """
        enough = threading.Event()
        each = dataclasses.replace(wait, given_up=lambda: enough.is_set() or wait.given_up())
        with concurrent.futures.ThreadPoolExecutor(len(self._parts)) as pool:
            try:
                asked = [pool.submit(part.ensure, each) for part in self._parts]
                self._await(asked, wait)
            finally:
                enough.set()  # Ctrl-C too: each withdraws its request
        errors = [one.exception() for one in asked]
        for error in errors:
            if error is not None and not isinstance(error, LaunchError):
                raise error
        self._used = [part for part, error in zip(self._parts, errors, strict=True) if error is None]
        count, most = len(self._used), len(self._parts)
        if count < self._least:
            found = [error for error in errors if error is not None]
            raise next((error for error in found if not isinstance(error, GivenUpError)), found[0])
        if count < most:
            why = "; ".join(str(error).partition("\n")[0] for error in errors if error is not None)
            wait.say(f"going on with {count} of {most} slices, the next start asks for {most} again: {why}")

    def _await(self, asked: Sequence[concurrent.futures.Future[None]], wait: Wait) -> None:
        """Wait until all slices have come or failed, too many have failed, or enough have come and time is up."""
        begin: float | None = None
        while not all(one.done() for one in asked):
            errors = [one.exception() for one in asked if one.done()]
            usable = errors.count(None)
            if len(asked) - (len(errors) - usable) < self._least:
                return
            if usable >= self._least:
                begin = begin or time.monotonic()
                if time.monotonic() - begin >= self._more_s:
                    return
            time.sleep(min(0.2, wait.poll_s))

    def machines(self) -> list[Machine]:
        """The machines of the slices in use, which are numbered without a gap."""
        return [
            dataclasses.replace(machine, slice_id=index)
            for index, part in enumerate(self._in_use())
            for machine in part.machines()
        ]

    def lost(self) -> str | None:
        """The first slice in use that is lost, in words."""
        return next((text for part in self._in_use() if (text := part.lost()) is not None), None)

    def delete(self, wait: Wait) -> None:
        """Delete every slice that the launcher made, and name each that could not be deleted.

        Raises:
            LaunchError: Names all that failed, after the others were deleted.
        """
        errors = []
        for part in self._parts:
            try:
                if part.made_here():
                    part.delete(wait)
                else:
                    wait.say(left_alone(part))
            except LaunchError as error:
                errors.append(error)
        if errors:
            raise LaunchError("\n".join(map(str, errors)), errors[0].code)

    def _in_use(self) -> list[Pod]:
        """The slices of the last `ensure`; in another process those that are there."""
        return [part for part in self._parts if part.lost() is None] if self._used is None else self._used


def left_alone(pod: Pod) -> str:
    """The message about slices that are not deleted with their job."""
    lines = "\n".join(f"  {shlex.join(command)}" for command in pod.delete_commands())
    return f"{pod.name} was not made by this launcher, or is gone, and is left as it is. To delete it:\n{lines}"


def by_hand(name: str, error: BaseException, commands: Sequence[Sequence[str]]) -> str:
    """The message about a slice that could not be deleted: it may cost money."""
    lines = "\n".join(f"  {shlex.join(command)}" for command in commands)
    why = str(error) or "interrupted"
    return f"{name} could not be deleted, and may cost money: {why}\nDelete it by hand:\n{lines}"


def duration(seconds: float) -> str:
    """Seconds for reading, such as ``2 h 5 min``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


class SshTransport:
    """Machines behind one ssh each."""

    def __init__(self, machines: Sequence[Machine], workers: Sequence[Worker], user: str, key: str) -> None:
        self.machines = machines
        self.workers = workers
        self.user = user
        self.key = key

    def argv(self, worker: int, command: str) -> list[str]:
        machine = self.machines[worker]
        options = {
            "IdentitiesOnly": "yes",
            "StrictHostKeyChecking": "accept-new",
            # Where gcloud keeps them, under the name that gcloud uses.
            "UserKnownHostsFile": str(Path("~/.ssh/google_compute_known_hosts").expanduser()),
            "HostKeyAlias": machine.host_key_alias,
            "CheckHostIP": "no",
        }
        words = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
        return ["ssh", *SSH_OPTIONS, "-i", self.key, *words, "--", f"{self.user}@{machine.address}", command]


class PasteTransport:
    """For ``--dry-run``: the same commands by gcloud's own ssh, which needs no address."""

    def __init__(self, pod: Pod, workers: Sequence[Worker]) -> None:
        self._pod = pod
        self.workers = workers

    def argv(self, worker: int, command: str) -> list[str]:
        return self._pod.ssh_command(worker, command)
