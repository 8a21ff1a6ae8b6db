"""The backend that a `WorkerBackend` becomes: one connection per worker, detached commands, records and logs."""

import argparse

from lockstep.launch.record import JobRecord
from lockstep.launch.worker_backend import WorkerBackend


class WorkerJobs:
    """Runs jobs on the workers of a backend.

    Args:
        backend: How to get the workers, reach them and give them back.
    """

    def __init__(self, backend: WorkerBackend) -> None:
        self._backend = backend

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Add those of the backend."""
        self._backend.add_options(parser)

    def run(self, options: argparse.Namespace) -> int:
        raise NotImplementedError

    def dry_run(self, options: argparse.Namespace) -> int:
        raise NotImplementedError

    def status(self, job: JobRecord) -> int:
        raise NotImplementedError

    def logs(self, job: JobRecord, *, follow: bool) -> int:
        raise NotImplementedError

    def stop(self, job: JobRecord) -> int:
        raise NotImplementedError

    def delete(self, job: JobRecord) -> int:
        raise NotImplementedError
