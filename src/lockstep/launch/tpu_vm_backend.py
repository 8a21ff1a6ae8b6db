"""The backend ``tpu-vm``: options and checks."""

import argparse

from lockstep.errors import ConfigError
from lockstep.launch.google import GoogleBackend, slice_of
from lockstep.launch.tpu_vm import TpuVm


class TpuVmBackend(GoogleBackend):
    """Slices by the Cloud TPU API: v4, v5e, v5p, v6e."""

    title = "tpu-vm: slices by the Cloud TPU API"

    def add_own_options(self, parser: argparse.ArgumentParser) -> None:
        """Add the image of new nodes."""
        add = parser.add_argument_group(self.title).add_argument
        add("--runtime_version", default="", help="the image of new machines (default: the one for the --tpu_type)")

    def pod(self, options: argparse.Namespace) -> TpuVm:
        """The nodes of the options.

        Raises:
            ConfigError: The kind of slice is not known, or not to this API.
        """
        found = slice_of(options.tpu_type)
        if found is not None and not found.family.runtime_version:
            raise ConfigError(
                f"--tpu_type is {found.name}, which the Cloud TPU API does not have. Use --backend mig, or gke."
            )
        return TpuVm(
            gcloud=self._gcloud(options),
            name=options.tpu_name,
            slice=found,
            count=options.slices,
            capacity=options.capacity_type,
            runtime_version=options.runtime_version,
            network=options.network,
            service_account=options.service_account,
            internal_ip=options.internal_ip,
        )

    def hosts(self, options: argparse.Namespace) -> int:
        """The number of machines of all slices; 0 where their kind is not given."""
        found = slice_of(options.tpu_type)
        return found.hosts * int(options.slices) if found else 0
