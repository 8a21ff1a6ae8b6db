"""The table of backends."""

from lockstep.launch.backend import Backend
from lockstep.launch.local import Local
from lockstep.launch.mig_backend import MigBackend
from lockstep.launch.ssh import Ssh
from lockstep.launch.tpu_vm_backend import TpuVmBackend
from lockstep.launch.worker_jobs import WorkerJobs

BACKENDS: dict[str, Backend] = {
    "local": Local(),
    "ssh": WorkerJobs(Ssh()),
    "tpu-vm": WorkerJobs(TpuVmBackend()),
    "mig": WorkerJobs(MigBackend()),
}
"""Every backend, by the name that ``--backend`` takes. `WorkerJobs` makes a backend of a `WorkerBackend`."""
