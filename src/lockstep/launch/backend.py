"""What a backend of the launcher is."""

import argparse
from typing import Protocol

from lockstep.errors import LockstepError
from lockstep.exits import FAILED
from lockstep.launch.record import JobRecord


class LaunchError(LockstepError):
    """A job cannot be started or reached: the text says what was given, the limit and the fix.

    Args:
        text: What the user reads.
        code: The exit code of the launcher, from `lockstep.exits`; it decides whether ``--retries`` tries again.
    """

    def __init__(self, text: str, code: int = FAILED) -> None:
        super().__init__(text)
        self.code = code


class Backend(Protocol):
    """Where the processes of a job run. Every method but `add_options` returns the launcher's exit code."""

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Add this backend's own options, and the shared groups of `options` that have a meaning for it."""

    def run(self, options: argparse.Namespace) -> int:
        """Run ``options.command`` on every process; 0 if every one ended with 0, else the code of the first failure.

        Raises:
            LaunchError: The job could not be started.
        """

    def dry_run(self, options: argparse.Namespace) -> int:
        """Print each command and manifest of `run`, ready to paste, and do nothing. Secrets are not shown."""

    def status(self, job: JobRecord) -> int:
        """Print what each worker does; 0 while the job runs and when it is done, else its exit code."""

    def logs(self, job: JobRecord, *, follow: bool) -> int:
        """Print what the workers have printed; with ``follow`` until they have ended."""

    def stop(self, job: JobRecord) -> int:
        """End the job in order (SIGTERM, grace, SIGKILL); 0 when nothing of it runs any more."""

    def delete(self, job: JobRecord) -> int:
        """Stop the job and delete what was created for it on the workers, and the workers where `run` created them."""
