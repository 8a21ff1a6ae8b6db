"""What the backends for Google's TPU machines share: options, ssh, and this package on every machine.

Machines are reached by plain ssh, not by ``gcloud … ssh --worker=i``: gcloud runs a command again when its connection
drops, up to ten times, with the rest of an input that has been read already (AttemptRunWithRetries in SDK 528), and
costs seconds and 100 MB for each of hundreds of connections. gcloud makes the key, brings it to the machines and says
which user it belongs to (OS Login has its own names); what it would run is what we run.
"""

import abc
import argparse
import getpass
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from lockstep.errors import ConfigError
from lockstep.launch import setup_vm
from lockstep.launch.backend import LaunchError
from lockstep.launch.console import Console
from lockstep.launch.gcloud import Gcloud
from lockstep.launch.options import add_tpu_options, add_worker_options
from lockstep.launch.pod import Machine, Pod, Wait
from lockstep.launch.slices import FAMILIES, Slice, slices
from lockstep.launch.ssh import SSH_OPTIONS
from lockstep.launch.worker_backend import WorkerBackend
from lockstep.launch.workers import Transport, Worker

COORDINATOR_PORT: Final = "8476"
"""The port of JAX's coordination service. JAX's own since 0.8.1, 8482, is not open in the firewall rule that Google
makes with a slice (8470, 8471, 8474, 8476, 11211: https://github.com/jax-ml/jax/issues/35905)."""
MEGASCALE_PORT: Final = 8080
"""The port of MegaScale's coordinator, on the first host of the first slice."""


class SshTransport:
    """Machines behind one ssh each.

    Args:
        machines: The machines, by number.
        workers: The same as workers of a job.
        user: The user on them.
        key: The file of the ssh key.
    """

    def __init__(self, machines: Sequence[Machine], workers: Sequence[Worker], user: str, key: str) -> None:
        self.machines = machines
        self.workers = workers
        self.user = user
        self.key = key

    def argv(self, worker: int, command: str) -> list[str]:
        """The ssh command, see `Transport`."""
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
    """For ``--dry-run``: the same commands by gcloud's own ssh, which needs no address.

    Args:
        pod: The pod.
        workers: Its workers.
    """

    def __init__(self, pod: Pod, workers: Sequence[Worker]) -> None:
        self._pod = pod
        self.workers = workers

    def argv(self, worker: int, command: str) -> list[str]:
        """The command by gcloud, see `Transport`."""
        return self._pod.ssh_command(worker, command)


class GoogleBackend(WorkerBackend):
    """A backend whose machines belong to a `Pod`."""

    title: str
    """The heading of its options."""

    @abc.abstractmethod
    def add_own_options(self, parser: argparse.ArgumentParser) -> None:
        """Add what no other backend has."""

    @abc.abstractmethod
    def pod(self, options: argparse.Namespace) -> Pod:
        """The pod of the options; nothing is asked of Google."""

    @abc.abstractmethod
    def hosts(self, options: argparse.Namespace) -> int:
        """The number of machines of all slices, from their kind alone; 0 where the kind is not given."""

    def coordinator(self, transport: SshTransport) -> Machine:
        """The machine at which several slices find each other: JAX's first of the first slice.

        Args:
            transport: The machines, slice by slice.
        """
        return transport.machines[0]

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Add the options of both backends, then its own."""
        add_tpu_options(parser)
        add = parser.add_argument_group("Google Cloud").add_argument
        add("--project", default="", help="the project (default: that of gcloud's configuration)")
        add("--network", default="", help="the network of new machines (default: default)")
        add("--service_account", default="", help="the account of new machines (default: the project's)")
        add(
            "--internal_ip",
            action="store_true",
            help="machines have no external address, and ssh uses the internal one",
        )
        add("--ssh_user", default="", help="the user on the machines (default: the one that gcloud uses)")
        add(
            "--ssh_key", default="~/.ssh/google_compute_engine", help="the ssh key (default: the one that gcloud makes)"
        )
        add("--wait_s", type=float, default=86400.0, help="seconds to wait for the slice, then give up (default a day)")
        add("--poll_s", type=float, default=10.0, help="seconds between two looks at its state (default 10)")
        add("--setup", choices=("auto", "none"), default="auto", help="auto: install this checkout on every machine, "
            "once per version; none: the machines have it")  # fmt: skip
        add("--venv", default="", metavar="DIR", help="an environment on the machines that has the package: nothing is "
            "installed, and its programs are found first")  # fmt: skip
        add("--extras", default=setup_vm.EXTRAS, help=f"optional dependencies to install (default {setup_vm.EXTRAS})")
        self.add_own_options(parser)
        add_worker_options(parser)

    def default_name(self, options: argparse.Namespace) -> str | None:
        """The name of the slice."""
        return str(options.tpu_name)

    def plan(self, options: argparse.Namespace) -> tuple[list[str], Transport]:
        """The commands that make the pod and bring the key, and the transport by gcloud's ssh."""
        self._check(options)
        pod = self.pod(options)
        count = self.hosts(options) or options.require_process_count or 1
        per_slice = count // options.slices or 1
        machines = [
            Machine(
                name=f"{options.tpu_name} worker {i}",
                slice_id=i // per_slice,
                address=f"WORKER_{i}",
                internal_address=f"INTERNAL_ADDRESS_OF_WORKER_{i}",
                host_key_alias="",
            )
            for i in range(count)
        ]
        lines = []
        if self.hosts(options):
            lines += [*map(shlex.join, pod.create_commands()), *pod.wait_lines()]
        lines += map(shlex.join, pod.login_commands(None))
        if options.slices > 1:
            lines.append(
                f"# {machines[0].internal_address} below: the internal address of the first slice's first worker"
            )
        if (folder := self.setup_folder(options)) is not None:
            lines += [
                shlex.join(setup_vm.build_command(setup_vm.ROOT, Path(folder))),
                shlex.join(["cp", str(setup_vm.ROOT / "constraints.txt"), folder]),
                f"cat > {shlex.quote(folder)}/setup.sh <<'EOF_SETUP'\n{self.setup_script(options)}EOF_SETUP",
            ]
        return lines, PasteTransport(pod, self._workers(options, machines, machines[0]))

    def acquire(self, options: argparse.Namespace, console: Console) -> Transport:
        """Use or make the pod, wait for it, and have gcloud bring its ssh key to the machines."""
        pod = self.pod(options)
        if self._installs(options) and (version := setup_vm.version_of()).changed:
            console.say(f"this checkout has changes that are not committed: they are installed too, as {version.name}")
        pod.ensure(Wait(say=console.say, timeout_s=options.wait_s, poll_s=options.poll_s))
        machines = pod.machines()
        gcloud = self._gcloud(options)
        for command in pod.login_commands(machines):
            gcloud.run(command)
        transport = self._transport(options, machines)
        if options.slices > 1:
            workers = self._workers(options, machines, self.coordinator(transport))
            transport = SshTransport(machines, workers, transport.user, transport.key)
        console.say(f"{options.tpu_name}: {len(machines)} workers, user {transport.user}")
        if pod.made_here():
            name = options.name or options.tpu_name
            console.say(
                f"{options.tpu_name} stays when the job ends, and costs money until: lockstep launch delete {name}"
            )
        return transport

    def find(self, options: argparse.Namespace) -> Transport:
        """The machines as they are now."""
        return self._transport(options, self.pod(options).machines())

    def setup_script(self, options: argparse.Namespace) -> str | None:
        """The script that installs this checkout, if it is to be installed."""
        if not self._installs(options):
            return None
        version = setup_vm.version_of()
        return setup_vm.script(version, setup_vm.wheel_path(setup_vm.ROOT, version).name, options.extras)

    def setup_files(self, options: argparse.Namespace) -> dict[str, bytes]:
        """The wheel, and the versions of everything else."""
        if not self._installs(options):
            return {}
        path = setup_vm.build_wheel(setup_vm.ROOT, setup_vm.version_of())
        return {path.name: path.read_bytes(), "constraints.txt": (setup_vm.ROOT / "constraints.txt").read_bytes()}

    def setup_folder(self, options: argparse.Namespace) -> str | None:
        """Where the commands of `plan` put the wheel, the constraints and the script."""
        version = setup_vm.version_of() if self._installs(options) else None
        return str(setup_vm.wheel_path(setup_vm.ROOT, version).parent) if version else None

    def why_lost(self, options: argparse.Namespace) -> str | None:
        """What happened to the pod, if anything did; None too where Google does not answer."""
        try:
            return self.pod(options).lost()
        except LaunchError:
            return None

    def release(self, options: argparse.Namespace, console: Console) -> None:
        """Delete the pod, if the launcher made it."""
        pod = self.pod(options)
        if pod.made_here():
            pod.delete(Wait(say=console.say, timeout_s=options.wait_s, poll_s=options.poll_s))
            return
        console.say(
            f"{options.tpu_name} was not made by this launcher, or is gone, and is left as it is. To delete it:"
        )
        for command in pod.delete_commands():
            console.say(f"  {shlex.join(command)}")

    def _check(self, options: argparse.Namespace) -> None:
        """Refuse what does not fit together, before anything is done.

        Raises:
            ConfigError: A name is missing or cannot be one, or there is no such slice.
        """
        for name, example in (("tpu_name", "my-pod"), ("zone", "us-east5-a")):
            if not getattr(options, name):
                raise ConfigError(
                    f"--{name} is not given; backend {options.backend} needs it. Add it: --{name} {example}"
                )
        if not re.fullmatch(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", options.tpu_name):
            raise ConfigError(
                f"--tpu_name is {options.tpu_name!r}; it must begin with a lower-case letter, have at most 40 "
                "lower-case letters, digits and '-', and not end with '-'."
            )
        if not re.fullmatch(r"[a-z]+-[a-z]+\d+-[a-z]", options.zone):
            raise ConfigError(f"--zone is {options.zone!r}, which is not the name of a zone such as us-east5-a.")

    def _transport(self, options: argparse.Namespace, machines: Sequence[Machine]) -> SshTransport:
        if not machines:
            raise LaunchError(f"{options.tpu_name} has no machines. See what there is: --dry-run prints the commands.")
        user = options.ssh_user or self._user(options, machines)
        key = str(Path(options.ssh_key).expanduser())
        return SshTransport(machines, self._workers(options, machines, machines[0]), user, key)

    def _user(self, options: argparse.Namespace, machines: Sequence[Machine]) -> str:
        """The user in the ssh command that gcloud would run; without one there, that of this machine."""
        command = [*self.pod(options).login_commands(machines)[0], "--dry-run"]
        found = re.search(r"(\S+)@" + re.escape(machines[0].address), self._gcloud(options).run(command))
        return found[1] if found else getpass.getuser()

    def _workers(self, options: argparse.Namespace, machines: Sequence[Machine], coordinator: Machine) -> list[Worker]:
        """The machines as workers; several slices find each other at the coordinator."""
        if self._installs(options):
            path: tuple[str, ...] = (setup_vm.programs(setup_vm.version_of()),)
        else:
            path = (f"{options.venv}/bin",) if options.venv else ()
        port = dict(options.env).get("JAX_COORDINATOR_PORT", COORDINATOR_PORT)
        if not port.isdecimal() or not 0 < int(port) < 65536:
            raise ConfigError(f"--env JAX_COORDINATOR_PORT is {port!r}; it must be a port, 1 to 65535, such as 8474.")
        workers = []
        for machine in machines:
            environment = {"JAX_COORDINATOR_PORT": port}
            ports: tuple[int, ...] = (int(port),)
            if len(machines) > 1:
                environment["REQUIRE_MULTIHOST"] = "1"
            if options.slices > 1:
                environment |= {
                    "MEGASCALE_COORDINATOR_ADDRESS": f"{coordinator.internal_address}:{MEGASCALE_PORT}",
                    "MEGASCALE_PORT": str(MEGASCALE_PORT),
                    "MEGASCALE_NUM_SLICES": str(options.slices),
                    "MEGASCALE_SLICE_ID": str(machine.slice_id),
                }
                ports = (*ports, MEGASCALE_PORT) if machine == coordinator else ports
            workers.append(Worker(name=machine.name, environment=environment, ports=ports, path=path))
        return workers

    def _installs(self, options: argparse.Namespace) -> bool:
        return options.setup == "auto" and not options.venv

    def _gcloud(self, options: argparse.Namespace) -> Gcloud:
        return Gcloud(project=options.project, zone=options.zone)


def slice_of(name: str | None) -> Slice | None:
    """Return the slice of a ``--tpu_type``; None where none is given.

    Args:
        name: The name, such as ``v5p-64``.

    Raises:
        ConfigError: There is no slice of this name.
    """
    if not name:
        return None
    if name not in slices():
        prefix = name.rpartition("-")[0]
        family = [each for each in slices() if each.rpartition("-")[0] == prefix]
        known = ", ".join(family) or f"names begin with {', '.join(each.prefix for each in FAMILIES)}, as in v5p-64"
        raise ConfigError(f"--tpu_type is {name!r}, which is not the name of a slice. Known: {known}.")
    return slices()[name]
