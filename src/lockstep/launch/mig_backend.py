"""The backend ``mig``: options and checks, and how several slices find each other."""

import argparse
import subprocess
from typing import Final

from lockstep.errors import ConfigError
from lockstep.launch.backend import LaunchError
from lockstep.launch.google import GoogleBackend, SshTransport, slice_of
from lockstep.launch.mig import CAPACITY_FLAGS, Mig
from lockstep.launch.pod import Machine

WORKER_NUMBER: Final = "http://metadata.google.internal/computeMetadata/v1/instance/attributes/agent-worker-number"
"""Where a machine reads its number within its slice, as JAX does (GceTpuCluster)."""


class MigBackend(GoogleBackend):
    """Slices by Compute Engine: v5p, v6e, TPU7x."""

    title = "mig: slices by Compute Engine (managed instance groups)"

    def add_own_options(self, parser: argparse.ArgumentParser) -> None:
        """Add what Compute Engine lets one choose."""
        add = parser.add_argument_group(self.title).add_argument
        add("--machine_type", default="", help="for example ct6e-standard-4t, to make a v6e-8 of two machines "
            "(default: the fewest machines)")  # fmt: skip
        add("--reservation", default="", help="the reservation of --capacity_type reserved")
        add("--boot_disk_gb", type=int, default=200, help="the disk of new machines in GB (default 200)")

    def pod(self, options: argparse.Namespace) -> Mig:
        """The groups of the options.

        Raises:
            ConfigError: The kind of slice is not known, not to Compute Engine, or does not fit the other options.
        """
        found = slice_of(options.tpu_type)
        machine_type = options.machine_type
        if found is not None:
            types = dict(found.family.machine_types)
            if not types:
                raise ConfigError(
                    f"--tpu_type is {found.name}, which Compute Engine does not have. Use --backend tpu-vm, or gke."
                )
            machine_type = machine_type or types[found.chips // found.hosts]
            fitting = [
                name for chips, name in types.items() if found.chips % chips == 0 and (chips >= 4 or found.chips < 4)
            ]
            if machine_type not in fitting:
                raise ConfigError(
                    f"--machine_type is {machine_type}, of which no {found.name} can be made. Leave it out, or choose "
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
        return Mig(
            gcloud=self._gcloud(options),
            name=options.tpu_name,
            slice=found,
            machine_type=machine_type,
            count=options.slices,
            capacity=options.capacity_type,
            reservation=options.reservation,
            boot_disk_gb=options.boot_disk_gb,
            network=options.network,
            service_account=options.service_account,
            internal_ip=options.internal_ip,
        )

    def hosts(self, options: argparse.Namespace) -> int:
        """The number of machines of all slices; 0 where their kind is not given."""
        return self.pod(options).hosts * int(options.slices)

    def coordinator(self, transport: SshTransport) -> Machine:
        """The machine of the first slice that JAX counts as its first; the groups do not tell.

        Raises:
            LaunchError: No machine says that it is the first.
        """
        first = [i for i, machine in enumerate(transport.machines) if machine.slice_id == 0]
        asked = {}
        for i in first:
            command = transport.argv(i, f"curl -sf -H 'Metadata-Flavor: Google' {WORKER_NUMBER}")
            asked[i] = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
        said = {}
        for i, process in asked.items():
            try:
                said[i] = process.communicate(timeout=60)[0].strip()
            except subprocess.TimeoutExpired:
                process.kill()
                said[i] = ""
        for i, number in said.items():
            if number == "0":
                return transport.machines[i]
        raise LaunchError(
            "no machine of the first slice says that it is number 0 (metadata agent-worker-number): "
            + ", ".join(f"{transport.machines[i].name} says {number or 'nothing'}" for i, number in said.items())
            + ". Several slices find each other by its address; look at the machines, or use one slice."
        )
