"""A pod that Google rents out: make it, wait for it, find its machines, delete it."""

import abc
import argparse
import dataclasses
import shlex
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final, Self

from lockstep.exits import REFUSED, UNAVAILABLE, UNREACHABLE
from lockstep.launch.backend import LaunchError, Transport
from lockstep.launch.gcloud import CALL_S, Gcloud
from lockstep.launch.slices import Slice, slice_of
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


class RequestFailedError(ToolError):
    """A request has ended without machines, which costs nothing."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GooglePod(abc.ABC):
    """Slices of one name, rented in one of Google's ways. Every method may raise `LaunchError`."""

    title: ClassVar[str]  # the heading of the options that this way alone has
    noun: ClassVar[str]  # what a slice is called here
    undoing: ClassVar[str]  # what is done with a request that nobody waits for any more
    undone: ClassVar[str]

    gcloud: Gcloud
    name: str  # the name in messages
    slice: Slice | None  # the kind of slice, or None: only an existing one is used, whatever its kind
    count: int = 1
    capacity: str = "on-demand"  # a key of `CAPACITY_FLAGS`
    network: str = ""  # the network's name, or empty for `default`
    service_account: str = ""  # the account of the machines, or empty for the project's default
    internal_ip: bool = False  # whether machines have, and ssh uses, internal addresses only

    @classmethod
    def of(cls, options: argparse.Namespace, name: str, count: int) -> Self:
        """The pod of the options; nothing is asked of Google."""
        kind = slice_of(options.tpu_type)
        shared = {field: getattr(options, field) for field in ("network", "service_account", "internal_ip")}
        own = {**shared, **cls.own_values(options, kind), "capacity": options.capacity_type}
        return cls(gcloud=Gcloud(project=options.project, zone=options.zone), name=name, slice=kind, count=count, **own)

    @staticmethod
    @abc.abstractmethod
    def add_own_options(add: Callable[..., object]) -> None:
        """Add the options that this way alone has."""

    @staticmethod
    @abc.abstractmethod
    def own_values(options: argparse.Namespace, kind: Slice | None) -> dict[str, Any]:
        """The fields that this way alone has; options that do not fit together are refused (ConfigError)."""

    @staticmethod
    def coordinator(machines: Sequence[Machine], transport: Transport) -> Machine:
        """The machine at which several slices find each other: JAX's first of the first slice."""
        return machines[0]

    @property
    @abc.abstractmethod
    def hosts(self) -> int:
        """The number of machines of each slice; 0 where its kind is not known."""

    @abc.abstractmethod
    def create_commands(self) -> list[list[str]]:
        """Return the commands that make it, ready to run."""

    @abc.abstractmethod
    def wait_lines(self) -> list[str]:
        """Return lines for a shell that wait until it can be used, as `ensure` does."""

    @abc.abstractmethod
    def delete_commands(self) -> list[list[str]]:
        """Return the commands that delete all of it, ready to run."""

    @abc.abstractmethod
    def login_commands(self, machines: Sequence[Machine] | None) -> list[list[str]]:
        """Return the commands by which gcloud brings an ssh key to every machine; None: they are not known yet."""

    @abc.abstractmethod
    def ssh_command(self, worker: int, command: str) -> list[str]:
        """Return gcloud's own way to run a command on a worker, numbered over all slices, for people to paste."""

    @abc.abstractmethod
    def made_here(self) -> bool:
        """Whether the launcher made it: what others made is not deleted with a job."""

    @abc.abstractmethod
    def machines(self) -> list[Machine]:
        """Return its machines, slice by slice, in the order of their numbers as far as Google tells it."""

    @abc.abstractmethod
    def lost(self) -> str | None:
        """Return in words what happened to it if it cannot run anything any more, or None."""

    @abc.abstractmethod
    def delete(self, wait: "Wait") -> None:
        """Delete all of it and wait until it is gone; what is already gone is no error."""

    @abc.abstractmethod
    def take_existing(self, wait: "Wait") -> bool:
        """Return whether there is one of this name that can be used; else delete what is left of it.

        Raises:
            LaunchError: It is of another kind, or it is lost and cannot be replaced.
        """

    @abc.abstractmethod
    def watch(self) -> Callable[[], tuple[str, bool]]:
        """Return a function for one wait: it returns the state to show, and whether every machine can be used."""

    @abc.abstractmethod
    def undo(self) -> None:
        """Delete what `create_commands` have made, or asked for."""

    def ensure(self, wait: "Wait") -> None:
        """Use what there is of this name, else ask for it, and wait until it can be used.

        Raises:
            LaunchError: What there is cannot be used, or it does not come in time; then the request is withdrawn.
        """
        asked = not self.take_existing(wait)
        commands = self.create_commands() if asked else []
        doing = f"asking for {self.described()} in {self.gcloud.zone}" if asked else "using what exists"
        wait.say(f"{self.name}: {doing}")
        taken = 0  # the commands that Google has taken
        try:
            for command in commands:
                self.gcloud.run(command)
                taken += 1
            wait.until_usable(self.name, self.watch(), undone=self.undone if asked else "")
        except BaseException as error:
            # What Google has refused or failed costs nothing; of what was interrupted or not answered nobody knows.
            refused = isinstance(error, ToolError) and error.cause.name != "unknown" and error.code != UNREACHABLE
            if asked and (taken or not refused) and not isinstance(error, RequestFailedError):
                self._withdraw(wait)
            raise

    def _withdraw(self, wait: "Wait") -> None:
        """Delete what was asked for and nobody waits for any more: it would cost money once it comes."""
        wait.say(f"{self.name}: {self.undoing}")
        try:
            self.undo()
        except BaseException as error:
            wait.say(by_hand(self.name, error, self.delete_commands()))
            if not isinstance(error, ToolError):
                raise

    @property
    def slice_names(self) -> list[str]:
        """The names of the slices: its own, or ``name-0``, ``name-1``."""
        return [self.name] if self.count == 1 else [f"{self.name}-{i}" for i in range(self.count)]

    def account_options(self) -> list[str]:
        """The options of a command that makes machines, for their network and account."""
        options = {"network": self.network, "service-account": self.service_account}
        return [f"--{name}={value}" for name, value in options.items() if value]

    def machines_in_words(self) -> str:
        return f"{self.hosts * self.count} hosts"

    def described(self) -> str:
        """The number, kind and capacity of its slices, in words."""
        times = f"{self.count} × " if self.count > 1 else ""
        return f"{times}{self.kind().name} ({self.capacity}, {self.machines_in_words()})"

    def kind(self) -> Slice:
        """The kind of slice that is to be made."""
        if self.slice is None:
            raise LaunchError(
                f"there is no usable {self.noun} named {self.name} in zone {self.gcloud.zone}, and nothing says which "
                "kind to make. Give --tpu_type, such as v5p-64, or the name and zone of one that exists.",
                REFUSED,
            )
        return self.slice

    def other_kind(self, existing: str, kind: str) -> LaunchError:
        """The error about a slice that exists and is of another kind than the one that was asked for."""
        return LaunchError(
            f"{existing}, but --tpu_type {kind}. Leave --tpu_type out to use it, or choose another --tpu_name.", REFUSED
        )

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

    def until(self, name: str, look: Callable[[], tuple[str, bool]]) -> bool:
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
                self.say(f"{name}: {state}{after}")
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


def left_alone(name: str, commands: Sequence[Sequence[str]]) -> str:
    """The message about slices that are not deleted with their job."""
    lines = "\n".join(f"  {shlex.join(command)}" for command in commands)
    return f"{name} was not made by this launcher, or is gone, and is left as it is. To delete it:\n{lines}"


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


def ssh_words(machine: Machine, user: str, key: str) -> list[str]:
    """The words of ssh for a machine, see `SshTransport`."""
    options = {
        "IdentitiesOnly": "yes",
        "StrictHostKeyChecking": "accept-new",
        # Where gcloud keeps them, under the name that gcloud uses.
        "UserKnownHostsFile": str(Path("~/.ssh/google_compute_known_hosts").expanduser()),
        "HostKeyAlias": machine.host_key_alias,
        "CheckHostIP": "no",
    }
    words = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    return ["-i", key, *words, "--", f"{user}@{machine.address}"]
