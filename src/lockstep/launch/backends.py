"""The table of backends, and those that are not in it."""

import importlib
from collections.abc import Mapping

from lockstep.errors import ConfigError
from lockstep.launch.backend import Backend
from lockstep.launch.gke import Gke
from lockstep.launch.local import Local
from lockstep.launch.mig_backend import MigBackend
from lockstep.launch.slurm import Slurm
from lockstep.launch.ssh import Ssh
from lockstep.launch.tpu_vm_backend import TpuVmBackend
from lockstep.launch.worker_backend import WorkerBackend
from lockstep.launch.worker_jobs import WorkerJobs

BACKENDS: dict[str, Backend] = {
    "gke": Gke(),
    "local": Local(),
    "slurm": Slurm(),
    "ssh": WorkerJobs(Ssh()),
    "tpu-vm": WorkerJobs(TpuVmBackend()),
    "mig": WorkerJobs(MigBackend()),
}
"""Every backend, by the name that ``--backend`` takes. `WorkerJobs` makes a backend of a `WorkerBackend`."""


def with_named(name: str | None, backends: Mapping[str, Backend]) -> Mapping[str, Backend]:
    """Return the backends and, where the name is that of a class, ``module:Class``, the backend that it makes.

    Args:
        name: The value of ``--backend``, or what the record of a job has; None where none is given.
        backends: The backends by name.

    Raises:
        ConfigError: There is no such class.
    """
    if name is None or name in backends or ":" not in name:
        return backends
    module_name, _, class_name = name.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"--backend is {name!r}, which cannot be imported ({type(error).__name__}: {error}). Give module:Class, "
            "with the directory of the module on PYTHONPATH."
        ) from error
    backend = found()
    return {**backends, name: WorkerJobs(backend) if isinstance(backend, WorkerBackend) else backend}
