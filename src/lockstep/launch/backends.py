"""The table of backends."""

from lockstep.launch.backend import Backend
from lockstep.launch.gke import Gke
from lockstep.launch.local import Local
from lockstep.launch.mig_backend import MigBackend
from lockstep.launch.slurm import Slurm
from lockstep.launch.ssh import Ssh
from lockstep.launch.tpu_vm_backend import TpuVmBackend
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
