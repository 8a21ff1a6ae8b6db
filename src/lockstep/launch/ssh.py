"""The backend ``ssh``: any list of hosts that can be reached by ssh."""

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

from lockstep.errors import ConfigError
from lockstep.launch.backend import Console, Worker, WorkerBackend, jax_environment
from lockstep.launch.options import add_worker_options

SSH_OPTIONS = ("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15", "-o", "ServerAliveInterval=15")
"""No terminal, no question, and a connection that notices that its other end is gone."""


class SshTransport:
    """Hosts behind one ssh each."""

    def __init__(self, workers: Sequence[Worker], options: Sequence[str]) -> None:
        self.workers = workers
        self._options = options

    def argv(self, worker: int, command: str) -> list[str]:
        return ["ssh", *SSH_OPTIONS, *self._options, "--", self.workers[worker].name, command]


class Ssh(WorkerBackend):
    """Hosts that exist; nothing is created or deleted, one process runs on each."""

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        add_worker_options(parser)
        add = parser.add_argument_group("ssh: hosts that exist").add_argument
        add("--hosts", required=True, metavar="A,B,C|FILE", help="hosts (user@host), or a file with one per line")
        add("--ssh_option", action="append", default=[], metavar="WORD", help="a word for ssh: --ssh_option=-p2222")
        add("--coordinator", metavar="HOST", help="address of the first host for the others (default: its name)")
        add("--port", type=int, default=8476, help="port of the coordination service on the first host (default 8476)")
        add("--venv", metavar="DIR", help="a virtual environment on the hosts whose programs are found first")

    def dry_run(self, options: argparse.Namespace) -> tuple[list[str], SshTransport]:
        """Nothing is created."""
        return [], self.find(options)

    def acquire(self, options: argparse.Namespace, console: Console) -> SshTransport:
        """Nothing is created: the preflight finds out which hosts can be reached."""
        return self.find(options)

    def find(self, options: argparse.Namespace) -> SshTransport:
        hosts = read_hosts(options.hosts)
        address = f"{options.coordinator or hosts[0].rpartition('@')[2]}:{options.port}"
        path = (f"{options.venv}/bin",) if options.venv else ()
        workers = [
            Worker(
                name=host,
                environment=jax_environment(address, len(hosts), index),
                ports=(options.port,) if index == 0 else (),
                path=path,
            )
            for index, host in enumerate(hosts)
        ]
        return SshTransport(workers, [word for each in options.ssh_option for word in shlex.split(each)])

    def release(self, options: argparse.Namespace, console: Console) -> None:
        """Nothing was created."""


def read_hosts(given: str) -> list[str]:
    """The hosts of ``--hosts``: separated by commas, or the lines of a file."""
    if "/" in given or Path(given).is_file():
        try:
            words = Path(given).read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise ConfigError(
                f"--hosts {given} cannot be read ({error}). Name hosts, or a file with one per line."
            ) from None
    else:
        words = given.split(",")
    hosts = [word.strip() for word in words if word.strip() and not word.strip().startswith("#")]
    twice = sorted({host for host in hosts if hosts.count(host) > 1})
    if not hosts or twice:
        wrong = f"has {', '.join(twice)} twice" if twice else "names no host"
        raise ConfigError(f"--hosts {given} {wrong}. Each host runs one process: name each once.")
    dashed = [host for host in hosts if host.startswith("-")]
    if dashed:
        raise ConfigError(f"--hosts {given}: {dashed[0]!r} is no host. Give options of ssh as --ssh_option=...")
    return hosts
