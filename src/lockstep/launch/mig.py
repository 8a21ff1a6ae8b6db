"""Slices by Compute Engine: a workload policy (the shape), an instance template and one managed group for each slice.

Steps and flags: https://docs.cloud.google.com/compute/docs/tpus/create-tpu-mig-multi-host-slice. A group in bulk mode
waits until all machines of the slice can be had, and makes them together.
"""

import argparse
import collections
import dataclasses
import shlex
import subprocess
from collections.abc import Callable, Sequence
from typing import Any, Final

from lockstep.errors import ConfigError
from lockstep.exits import REFUSED
from lockstep.launch.backend import LaunchError, Transport
from lockstep.launch.pod import LABEL, GooglePod, Machine, Wait
from lockstep.launch.slices import IMAGE_PROJECT, Slice

CAPACITY_FLAGS: Final = {
    "on-demand": [],
    # With STOP a preempted machine can still be seen, which tells a preemption from a deletion.
    "spot": ["--provisioning-model=SPOT", "--instance-termination-action=STOP"],
    "reserved": ["--provisioning-model=RESERVATION_BOUND", "--reservation-affinity=specific"],
}
"""Options of ``instance-templates create`` for each ``--capacity_type``."""

DELETE_S: Final = 1800.0  # seconds that deleting a group may take: gcloud waits for it
WORKER_NUMBER: Final = "http://metadata.google.internal/computeMetadata/v1/instance/attributes/agent-worker-number"
"""The URL at which a machine reads its number within its slice, as JAX does (GceTpuCluster)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mig(GooglePod):
    """Slices of one name, each a managed instance group; policy and template have the pod's name."""

    title = "mig: slices by Compute Engine (managed instance groups)"
    noun = "group"
    undoing = "deleting what was made of it"
    undone = ", and is deleted again"

    machine_type: str = ""  # Compute Engine's type of its machines; empty without a kind of slice
    reservation: str = ""
    boot_disk_gb: int = 200

    @staticmethod
    def add_own_options(add: Callable[..., object]) -> None:
        add("--machine_type", default="", help="for example ct6e-standard-4t, to make a v6e-8 of two machines "
            "(default: the fewest machines)")  # fmt: skip
        add("--reservation", default="", help="the reservation of --capacity_type reserved")
        add("--boot_disk_gb", type=int, default=200, help="the disk of new machines in GB (default 200)")

    @staticmethod
    def own_values(options: argparse.Namespace, kind: Slice | None) -> dict[str, Any]:
        machine_type = options.machine_type
        if kind is not None:
            types = dict(kind.family.machine_types)
            if not types:
                raise ConfigError(
                    f"--tpu_type is {kind.name}, which Compute Engine does not have. Use --backend tpu-vm, or gke."
                )
            machine_type = machine_type or types[kind.chips // kind.hosts]
            fitting = [
                name for chips, name in types.items() if kind.chips % chips == 0 and (chips >= 4 or kind.chips < 4)
            ]
            if machine_type not in fitting:
                raise ConfigError(
                    f"--machine_type is {machine_type}, of which no {kind.name} can be made. Leave it out, or choose "
                    f"from {', '.join(fitting)}."
                )
        if options.capacity_type not in CAPACITY_FLAGS:
            raise ConfigError(
                f"--capacity_type is {options.capacity_type}, which Compute Engine does not have. Use spot, or "
                "--backend tpu-vm."
            )
        if (options.capacity_type == "reserved") != bool(options.reservation):
            raise ConfigError(
                "--capacity_type reserved and --reservation NAME belong together: give both (gcloud compute "
                "reservations list shows yours), or none."
            )
        own = {"reservation": options.reservation, "boot_disk_gb": options.boot_disk_gb}
        return {"machine_type": machine_type, **own}

    @staticmethod
    def coordinator(machines: Sequence[Machine], transport: Transport) -> Machine:
        """The machine of the first slice that JAX counts as its first; the groups do not tell."""
        first = [i for i, machine in enumerate(machines) if machine.slice_id == 0]
        asked = {}
        for i in first:
            command = transport.argv(i, f"curl -sf -H 'Metadata-Flavor: Google' {WORKER_NUMBER}")
            asked[i] = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
        numbers = {}
        for i, process in asked.items():
            try:
                numbers[i] = process.communicate(timeout=60)[0].strip()
            except subprocess.TimeoutExpired:
                process.kill()
                numbers[i] = ""
        for i, number in numbers.items():
            if number == "0":
                return machines[i]
        raise LaunchError(
            "no machine of the first slice says that it is number 0 (metadata agent-worker-number): "
            + ", ".join(f"{machines[i].name} says {number or 'nothing'}" for i, number in numbers.items())
            + ". Several slices find each other by its address; look at the machines, or use one slice."
        )

    @property
    def hosts(self) -> int:
        if self.slice is None:
            return 0
        chips = {name: chips for chips, name in self.slice.family.machine_types}
        return self.slice.chips // chips[self.machine_type]

    def create_commands(self) -> list[list[str]]:
        kind = self.kind()
        several = self.hosts > 1  # a machine of its own needs no shape, and groups of one have no bulk mode
        policy = [
            *("compute", "resource-policies", "create", "workload-policy", self.name, "--type=HIGH_THROUGHPUT"),
            f"--accelerator-topology={kind.topology}",
            f"--description={LABEL}",
        ]
        template = [
            *("compute", "instance-templates", "create", self.name, f"--machine-type={self.machine_type}"),
            f"--image-family={kind.family.image_family}",
            f"--image-project={IMAGE_PROJECT}",
            f"--boot-disk-size={self.boot_disk_gb}GB",
            "--maintenance-policy=TERMINATE",
            "--scopes=cloud-platform",
            f"--labels={LABEL}=yes",
            *CAPACITY_FLAGS[self.capacity],
            *([f"--reservation={self.reservation}"] if self.reservation else []),
            *self.account_options(),
            *(["--no-address"] if self.internal_ip else []),
        ]
        commands = [self.gcloud.command(*policy, place="region")] if several else []
        commands.append(self.gcloud.command(*template, place=""))
        for group in self.slice_names:
            words = [
                *("compute", "instance-groups", "managed", "create", group, f"--size={self.hosts}"),
                f"--template={self.name}",
                f"--description={LABEL}",
                # The launcher replaces a slice as a whole; one new machine in an old slice is of no use.
                "--default-action-on-vm-failure=do-nothing",
            ]
            if several:
                project = self.gcloud.project or self.gcloud.configured_project()
                url = f"projects/{project}/regions/{self.gcloud.region}/resourcePolicies/{self.name}"
                words += ["--target-size-policy-mode=bulk", f"--workload-policy={url}"]
            commands.append(self.gcloud.command(*words))
        return commands

    def wait_lines(self) -> list[str]:
        words = ("compute", "instance-groups", "managed", "wait-until")
        return [shlex.join(self.gcloud.command(*words, group, "--stable")) for group in self.slice_names]

    def delete_commands(self) -> list[list[str]]:
        return [*map(self._delete_group, self.slice_names), *self._delete_part_commands()]

    def login_commands(self, machines: Sequence[Machine] | None) -> list[list[str]]:
        if machines is None:  # a key belongs to the project, so one machine is enough
            return []
        internal = ["--internal-ip"] if self.internal_ip else []
        return [self.gcloud.command("compute", "ssh", machines[0].name, "--command=true", *internal)]

    def ssh_command(self, worker: int, command: str) -> list[str]:
        per_slice = self.hosts or worker + 1
        group, index = self.slice_names[worker // per_slice], worker % per_slice
        words = ["compute", "instance-groups", "managed", "list-instances", group, "--sort-by=instance"]
        name = shlex.join([*self.gcloud.command(*words), "--format=value(instance.basename())"])
        internal = ["--internal-ip"] if self.internal_ip else []
        ssh = shlex.join(self.gcloud.command("compute", "ssh", "NAME", f"--command={command}", *internal))
        return ["sh", "-c", ssh.replace("NAME", f'"$({name} | sed -n {index + 1}p)"', 1)]

    def made_here(self) -> bool:
        return any(group.get("description") == LABEL for group in self._groups().values() if group)

    def take_existing(self, wait: Wait) -> bool:
        groups = self._groups()
        if any(groups.values()):
            self._check_kind(groups)
            if (lost := self.lost(or_starting=True)) is None:
                return True
            self.kind()  # before anything is deleted
            self._check_ours(groups, lost)
            wait.say(f"{lost}: deleting what is left of {self.name}, to make a new one")
            self.delete(wait)
        self._delete_parts()  # of an earlier start that did not come to an end
        return False

    def watch(self) -> Callable[[], tuple[str, bool]]:
        return self._look

    def undo(self) -> None:
        for name, group in self._groups().items():
            if group is not None and group.get("description") == LABEL:
                self.run_unless_gone(self._delete_group(name), DELETE_S)
        self._delete_parts()

    def machines_in_words(self) -> str:
        return f"{self.hosts * self.count} × {self.machine_type}"

    def machines(self) -> list[Machine]:
        machines = []
        for slice_id, group in enumerate(self.slice_names):
            names = sorted(_name_of(instance) for instance in self._instances(group))
            if not names:
                continue
            query = f"name=({' '.join(names)})"
            listed = self.gcloud.read(
                "compute", "instances", "list", f"--zones={self.gcloud.zone}", f"--filter={query}", place=""
            )
            described = {instance["name"]: instance for instance in listed or []}
            for name in names:
                interface = (described.get(name, {}).get("networkInterfaces") or [{}])[0]
                external = (interface.get("accessConfigs") or [{}])[0].get("natIP", "")
                key = f"compute.{described.get(name, {}).get('id', name)}"
                machines.append(self.machine(name, slice_id, interface.get("networkIP", ""), external, key))
        return machines

    def lost(self, or_starting: bool = False) -> str | None:
        """Return which machine does not run and never will again, or None."""
        for group, described in self._groups().items():
            if described is None:
                return f"group {group} is gone"
            instances = self._instances(group)
            for instance in instances:
                status = str(instance.get("instanceStatus", ""))
                if status in {"STOPPING", "STOPPED", "TERMINATED", "SUSPENDING", "SUSPENDED"}:
                    return f"{_name_of(instance)} is {status}"
            target = int(described.get("targetSize", 0))
            if len(instances) < target and not or_starting:
                return f"group {group} has {len(instances)} of {target} machines"
        return None

    def delete(self, wait: Wait) -> None:
        self.undo()
        wait.say(f"{self.name}: deleted")

    def _look(self) -> tuple[str, bool]:
        """Return the states of the machines to show, and whether all of them run."""
        states: collections.Counter[str] = collections.Counter()
        total, trouble = 0, ""
        for group, described in self._groups().items():
            if described is None:
                states["group not there yet"] += 1
                total += 1
                continue
            instances, target = self._instances(group), int(described.get("targetSize", 0))
            total += target
            for instance in instances:
                busy = instance.get("currentAction", "NONE") != "NONE"
                status = str(instance.get("instanceStatus") or instance.get("currentAction", "PENDING"))
                states["starting" if busy and status == "RUNNING" else status] += 1
            if target > len(instances):
                states["PENDING"] += target - len(instances)
            trouble = trouble or self._trouble(group, instances)
        shown = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
        return shown + (f" ({trouble})" if trouble else ""), states["RUNNING"] == total > 0

    def _trouble(self, group: str, instances: list[dict[str, Any]]) -> str:
        """The reason in words why machines do not come; a `ToolError` where waiting does not help."""
        errors = [
            error
            for instance in instances
            for error in instance.get("lastAttempt", {}).get("errors", {}).get("errors", [])
        ]
        if any(instance.get("instanceStatus") != "RUNNING" for instance in instances) or not instances:
            listed = self.gcloud.read("compute", "instance-groups", "managed", "list-errors", group)
            errors += [listed_error.get("error", {}) for listed_error in listed or []]
        for error in errors:
            text = f"{error.get('code', '')}: {error.get('message', '')}"
            words = ("compute", "instance-groups", "managed", "list-errors", group)
            refusal = self.gcloud.error(self.gcloud.command(*words), text)
            if not refusal.cause.passes and refusal.cause.name != "unknown":
                raise refusal
            return refusal.summary
        return ""

    def _check_kind(self, groups: dict[str, dict[str, Any] | None]) -> None:
        """Refuse groups of another size or machine type than the ones that were asked for."""
        if self.slice is None:
            return
        sizes = {name: int(group.get("targetSize", 0)) for name, group in groups.items() if group}
        template = self.gcloud.read("compute", "instance-templates", "describe", self.name, place="") or {}
        machine_type = template.get("properties", {}).get("machineType", self.machine_type)
        for name, size in sizes.items():
            if (size, machine_type) != (self.hosts, self.machine_type):
                raise self.other_kind(
                    f"group {name} exists and has {size} × {machine_type}",
                    f"{self.slice.name} is {self.hosts} × {self.machine_type}",
                )

    def _check_ours(self, groups: dict[str, dict[str, Any] | None], lost: str) -> None:
        """Refuse to delete groups that somebody else made: stopped machines have disks."""
        for name, group in groups.items():
            if group is not None and group.get("description") != LABEL:
                raise LaunchError(
                    f"{lost}, and group {name} was not made by this launcher, so it is left as it is. Delete it, or "
                    "choose another --tpu_name.",
                    REFUSED,
                )

    def _delete_parts(self) -> None:
        """Delete the template and the policy, if the launcher made them; they cost nothing."""
        template, policy = self._delete_part_commands()
        described = self.gcloud.read("compute", "instance-templates", "describe", self.name, place="") or {}
        if LABEL in described.get("properties", {}).get("labels", {}):
            self.run_unless_gone(template, DELETE_S)
        described = self.gcloud.read("compute", "resource-policies", "describe", self.name, place="region") or {}
        if described.get("description") == LABEL:
            self.run_unless_gone(policy, DELETE_S)

    def _delete_part_commands(self) -> list[list[str]]:
        return [
            self.gcloud.command("compute", "instance-templates", "delete", self.name, place=""),
            self.gcloud.command("compute", "resource-policies", "delete", self.name, place="region"),
        ]

    def _delete_group(self, group: str) -> list[str]:
        return self.gcloud.command("compute", "instance-groups", "managed", "delete", group)

    def _groups(self) -> dict[str, dict[str, Any] | None]:
        words = ("compute", "instance-groups", "managed", "describe")
        return {group: self.gcloud.read(*words, group) for group in self.slice_names}

    def _instances(self, group: str) -> list[dict[str, Any]]:
        return self.gcloud.read("compute", "instance-groups", "managed", "list-instances", group) or []


def _name_of(instance: dict[str, Any]) -> str:
    return str(instance.get("instance", "")).rpartition("/")[2]
