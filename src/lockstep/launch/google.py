"""The backends ``tpu-vm`` and ``mig``, for Google's TPU machines: options, ssh, and this package on every machine.

Machines are reached by plain ssh, not by ``gcloud … ssh --worker=i``: gcloud runs a command again when its connection
drops, up to ten times, with the rest of an input that has been read already (AttemptRunWithRetries in SDK 528), and
costs seconds and 100 MB for each of hundreds of connections. gcloud makes the key, brings it to the machines and says
which user it belongs to (OS Login has its own names); what it would run is what we run.
"""

import argparse
import getpass
import re
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from lockstep.errors import ConfigError
from lockstep.launch import setup_vm
from lockstep.launch.backend import Console, LaunchError, Transport, Worker, WorkerBackend
from lockstep.launch.elastic_pod import ElasticPod
from lockstep.launch.gcloud import Gcloud
from lockstep.launch.machines import SshTransport
from lockstep.launch.options import add_google_options, add_worker_options, slice_counts
from lockstep.launch.pod import GooglePod, Machine, Wait, left_alone, slices_of, ssh_words
from lockstep.launch.tool import ToolError

COORDINATOR_PORT: Final = "8476"
"""The port of JAX's coordination service. JAX's own since 0.8.1, 8482, is not open in the firewall rule that Google
makes with a slice (8470, 8471, 8474, 8476, 11211: https://github.com/jax-ml/jax/issues/35905)."""
LIVENESS_PORT: Final = "11211"
"""The port of the listener that knows when a process dies: of those that are open, the one that is none of libtpu's.
Where somebody has it, the listener takes another one."""
MEGASCALE_PORT: Final = 8080  # the port of MegaScale's coordinator, on the first host of the first slice


type Pod = GooglePod | ElasticPod


class GoogleBackend(WorkerBackend):
    """A backend of Google's machines.

    Args:
        kind: The way in which they are rented.
    """

    def __init__(self, kind: type[GooglePod]) -> None:
        self._kind = kind
        self._acquired: Pod | None = None

    def pod(self, options: argparse.Namespace) -> Pod:
        """The pod of the options; nothing is asked of Google."""
        name, (least, most) = options.tpu_name, slice_counts(options)
        if least == most:
            return self._kind.of(options, name, most)
        parts = [self._kind.of(options, f"{name}-{i}", 1) for i in range(most)]
        return ElasticPod(parts, least, parts[0].hosts, options.slices_wait_s)

    def hosts(self, options: argparse.Namespace) -> int:
        """The number of machines of all slices, from their kind alone; 0 where the kind is not given."""
        return self._kind.of(options, options.tpu_name, 1).hosts * slice_counts(options)[1]

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        add_google_options(parser)
        self._kind.add_own_options(parser.add_argument_group(self._kind.title).add_argument)
        add_worker_options(parser)

    def default_name(self, options: argparse.Namespace) -> str | None:
        return str(options.tpu_name)

    def dry_run(self, options: argparse.Namespace) -> tuple[list[str], Transport]:
        """The commands that make the pod and bring the key, and the transport by gcloud's ssh."""
        self._check(options)
        pod = self.pod(options)
        count = self.hosts(options) or options.require_process_count or 1
        slices = slice_counts(options)[1]
        per_slice = count // slices or 1
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
        if slices > 1:
            lines.append(
                f"# {machines[0].internal_address} below: the internal address of the first slice's first worker"
            )
        if (folder := self.setup_folder(options)) is not None:
            lines += [
                shlex.join(setup_vm.build_command(setup_vm.ROOT, Path(folder))),
                shlex.join(["cp", str(setup_vm.ROOT / setup_vm.PINS), f"{folder}/constraints.txt"]),
                f"cat > {shlex.quote(folder)}/setup.sh <<'EOF_SETUP'\n{self.setup_script(options)}EOF_SETUP",
            ]
        return lines, PasteTransport(pod, self._workers(options, machines, machines[0]))

    def acquire(self, options: argparse.Namespace, console: Console) -> Transport:
        """Use or make the pod, wait for it, and have gcloud bring its ssh key to the machines."""
        pod = self._acquired = self.pod(options)
        if self._installs(options) and (version := setup_vm.version_of()).changed:
            console.say(f"this checkout has changes that are not committed: they are installed too, as {version.name}")
        wait = Wait(say=console.say, timeout_s=options.wait_s, poll_s=options.poll_s, given_up=self.given_up)
        pod.ensure(wait)
        machines = pod.machines()
        try:
            for command in pod.login_commands(machines):
                self._log_in(command, options, console)
        except LaunchError:
            _say_what_it_costs(pod, options, console)
            raise
        user = self._user(options, machines)
        transport = self._transport(options, machines, user)
        if slices_of(machines) > 1:
            transport.workers = self._workers(options, machines, self._kind.coordinator(machines, transport))
        console.say(f"{options.tpu_name}: {len(machines)} workers, user {user}")
        _say_what_it_costs(pod, options, console)
        return transport

    def _log_in(self, command: Sequence[str], options: argparse.Namespace, console: Console) -> None:
        """Have gcloud log in; again while ssh does not answer: a machine counts as running before its ssh does."""
        begin = time.monotonic()
        while True:
            try:
                self._gcloud(options).run(command)
                return
            except ToolError as error:
                if error.cause.name != "ssh" or self.given_up() or time.monotonic() - begin > options.unreachable_s:
                    raise
                console.once(f"{options.tpu_name}: ssh does not answer yet, trying for {options.unreachable_s:g} s")
                time.sleep(options.poll_s)

    def find(self, options: argparse.Namespace) -> Transport:
        machines = self.pod(options).machines()
        return self._transport(options, machines, self._user(options, machines))

    def setup_script(self, options: argparse.Namespace) -> str | None:
        """The script that installs this checkout, if it is to be installed."""
        if not self._installs(options):
            return None
        version = setup_vm.version_of()
        return setup_vm.script(version, setup_vm.wheel_path(setup_vm.ROOT, version).name, options.extras)

    def setup_files(self, options: argparse.Namespace) -> dict[str, bytes]:
        """The wheel, and versions and hashes of everything else."""
        if not self._installs(options):
            return {}
        path = setup_vm.build_wheel(setup_vm.ROOT, setup_vm.version_of())
        return {path.name: path.read_bytes(), "constraints.txt": (setup_vm.ROOT / setup_vm.PINS).read_bytes()}

    def setup_folder(self, options: argparse.Namespace) -> str | None:
        """The directory in which the commands of `dry_run` put the wheel, the constraints and the script."""
        version = setup_vm.version_of() if self._installs(options) else None
        return str(setup_vm.wheel_path(setup_vm.ROOT, version).parent) if version else None

    def why_lost(self, options: argparse.Namespace) -> str | None:
        """The fate of the pod, in words; None where there is nothing to say, or Google does not answer."""
        try:
            return (self._acquired or self.pod(options)).lost()
        except LaunchError:
            return None

    def release(self, options: argparse.Namespace, console: Console) -> None:
        pod = self.pod(options)
        if pod.made_here():
            pod.delete(Wait(say=console.say, timeout_s=options.wait_s, poll_s=options.poll_s))
            return
        console.say(left_alone(pod.name, pod.delete_commands()))

    def _check(self, options: argparse.Namespace) -> None:
        """Refuse what does not fit together, before anything is done."""
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

    def _transport(self, options: argparse.Namespace, machines: Sequence[Machine], user: str) -> SshTransport:
        key = str(Path(options.ssh_key).expanduser())
        words = [ssh_words(machine, user, key) for machine in machines]
        return SshTransport(self._workers(options, machines, machines[0]), words)

    def _user(self, options: argparse.Namespace, machines: Sequence[Machine]) -> str:
        """The user on the machines: as given, else in the ssh command that gcloud would run, else that of this one."""
        if not machines:
            raise LaunchError(f"{options.tpu_name} has no machines. See what there is: --dry-run prints the commands.")
        if options.ssh_user:
            return str(options.ssh_user)
        command = [*self.pod(options).login_commands(machines)[0], "--dry-run"]
        login = re.search(r"(\S+)@" + re.escape(machines[0].address), self._gcloud(options).run(command))
        return login[1] if login else getpass.getuser()

    def _workers(self, options: argparse.Namespace, machines: Sequence[Machine], coordinator: Machine) -> list[Worker]:
        """The machines as workers; several slices find each other at the coordinator."""
        if self._installs(options):
            path: tuple[str, ...] = (setup_vm.programs(setup_vm.version_of()),)
        else:
            path = (f"{options.venv}/bin",) if options.venv else ()
        port = dict(options.env).get("JAX_COORDINATOR_PORT", COORDINATOR_PORT)
        if not port.isdecimal() or not 0 < int(port) < 65536:
            raise ConfigError(f"--env JAX_COORDINATOR_PORT is {port!r}; it must be a port, 1 to 65535, such as 11211.")
        workers, slices = [], slices_of(machines)
        for machine in machines:
            environment = {"JAX_COORDINATOR_PORT": port, "LOCKSTEP_LIVENESS_PORT": LIVENESS_PORT}
            ports: tuple[int, ...] = (int(port),)
            if len(machines) > 1:
                environment["REQUIRE_MULTIHOST"] = "1"
            if slices > 1:
                environment |= {
                    "MEGASCALE_COORDINATOR_ADDRESS": f"{coordinator.internal_address}:{MEGASCALE_PORT}",
                    "MEGASCALE_PORT": str(MEGASCALE_PORT),
                    "MEGASCALE_NUM_SLICES": str(slices),
                    "MEGASCALE_SLICE_ID": str(machine.slice_id),
                }
                ports = (*ports, MEGASCALE_PORT) if machine == coordinator else ports
            at = coordinator.internal_address
            begin = (port, MEGASCALE_PORT) if slices > 1 else (port,)
            reaches = () if machine == coordinator else tuple(f"{at}:{number}" for number in begin)
            workers.append(Worker(name=machine.name, environment=environment, ports=ports, reaches=reaches, path=path))
        return workers

    def _installs(self, options: argparse.Namespace) -> bool:
        return options.setup == "auto" and not options.venv

    def _gcloud(self, options: argparse.Namespace) -> Gcloud:
        return Gcloud(project=options.project, zone=options.zone)


class PasteTransport:
    """For ``--dry-run``: the same commands by gcloud's own ssh, which needs no address."""

    def __init__(self, pod: Pod, workers: Sequence[Worker]) -> None:
        self._pod = pod
        self.workers = workers

    def argv(self, worker: int, command: str) -> list[str]:
        return self._pod.ssh_command(worker, command)


def _say_what_it_costs(pod: Pod, options: argparse.Namespace, console: Console) -> None:
    if pod.made_here():
        name = options.name or options.tpu_name
        console.say(f"{options.tpu_name} stays when the job ends, and costs money until: lockstep launch delete {name}")
