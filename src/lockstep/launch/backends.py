"""The table of backends."""

from lockstep.launch.backend import Backend
from lockstep.launch.local import Local
from lockstep.launch.ssh import Ssh
from lockstep.launch.worker_jobs import WorkerJobs

BACKENDS: dict[str, Backend] = {
    "local": Local(),
    "ssh": WorkerJobs(Ssh()),
}
"""Every backend, by the name that ``--backend`` takes. `WorkerJobs` makes a backend of a `WorkerBackend`."""
