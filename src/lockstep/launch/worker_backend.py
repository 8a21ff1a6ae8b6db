"""A backend that gives a list of reachable workers, and gets everything else from here."""

import abc
import argparse

from lockstep.launch.console import Console
from lockstep.launch.workers import Transport


class WorkerBackend(abc.ABC):
    """A backend whose workers can be reached one by one: it says how to get them, reach them and give them back.

    All methods take the options as parsed; for ``status``, ``logs``, ``stop`` and ``delete`` they come from the job's
    record, so that they must be plain JSON values. Options that do not fit together are refused (ConfigError) before
    anything is done, by `plan` too; what the platform refuses is a `LaunchError`.
    """

    @abc.abstractmethod
    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Add this backend's own options, after ``options.add_worker_options(parser)``."""

    def default_name(self, options: argparse.Namespace) -> str | None:
        """The job's name where ``--name`` gives none; None: one with the date."""
        return None

    @abc.abstractmethod
    def plan(self, options: argparse.Namespace) -> tuple[list[str], Transport]:
        """For ``--dry-run``: the shell commands of `acquire`, ready to paste, and the transport as it will be."""

    @abc.abstractmethod
    def acquire(self, options: argparse.Namespace, console: Console) -> Transport:
        """Create the workers or find them, wait until they can be reached, and show the states as they come.

        It is called again before each retry: what was lost is replaced, what is there is used as it is.
        """

    @abc.abstractmethod
    def find(self, options: argparse.Namespace) -> Transport:
        """The workers of a job that exists: nothing is created, nothing is waited for."""

    def setup_script(self, options: argparse.Namespace) -> str | None:
        """A POSIX shell script that is run on every worker before the job; a second run must find nothing to do."""
        return None

    def setup_files(self, options: argparse.Namespace) -> dict[str, bytes]:
        """Files that `setup_script` needs (a wheel), by name; they are put into the directory that it runs in."""
        return {}

    def setup_folder(self, options: argparse.Namespace) -> str | None:
        """For ``--dry-run``: a local directory that the commands of `plan` fill with `setup_files` and ``setup.sh``."""
        return None

    def why_lost(self, options: argparse.Namespace) -> str | None:
        """Why the platform took workers away ("node my-pod is PREEMPTED"), None where it did not.

        It is asked every few seconds while a worker cannot be reached, and before a retry.
        """
        return None

    @abc.abstractmethod
    def release(self, options: argparse.Namespace, console: Console) -> None:
        """Delete the workers that `acquire` created, if it did; ``lockstep launch delete`` calls it."""


def root_on_worker(name: str, index: int) -> str:
    """The directory of a job on a worker; with the worker's number, as several may share a home directory.

    Args:
        name: The job's name.
        index: The worker's number.
    """
    return f"~/.lockstep/work/{name}/worker-{index}"
