"""The backends of machines that exist: ``local``, CPU processes on this one, and ``ssh``, any list of hosts."""

import argparse
import os
import shlex
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from lockstep.config_fields import option_path
from lockstep.errors import ConfigError, check_output
from lockstep.exits import DONE, NOT_FOUND
from lockstep.files import private
from lockstep.job_key import JOB_KEY
from lockstep.launch.backend import Console, Worker, WorkerBackend, jax_environment
from lockstep.launch.environment import RESTARTS, JobEnvironment, job_environment
from lockstep.launch.job_loop import Outcome
from lockstep.launch.options import RETRIES_HELP, add_worker_options, count, number
from lockstep.launch.processes import LocalJob, ProcessSpec
from lockstep.launch.record import JobRecord
from lockstep.redact import SECRET_NAME


class Local:
    """CPU processes on this machine, which find each other at a free port of it."""

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Add how many processes there are, and what becomes of their output."""
        add = parser.add_argument_group("local: CPU processes on this machine").add_argument
        add("--processes", type=count, default=2, help="how many processes (default 2)")
        add("--devices_per_process", type=count, default=2, help="CPU devices of each process (default 2)")
        add(
            "--prefix",
            choices=("auto", "always", "never"),
            default="auto",
            help="put '[i] ' before each line. auto: yes, but at a terminal (and without --log_dir) process 0 writes "
            "to it directly, so that its live output works; always: on for all; never: off for all",
        )
        add("--log_dir", type=option_path, help="also write the output of process i to <log_dir>/process-<i>.log")
        add("--retries", type=number, default=0, help=RETRIES_HELP)
        add("--grace_s", type=float, default=10.0, help="seconds between SIGTERM and SIGKILL (default 10)")

    def run(self, options: argparse.Namespace) -> int:
        """Run the command as ``options.processes`` CPU processes, see `Backend.run`; 127 where it is not found."""
        try:
            command = resolve(options.command)
        except FileNotFoundError as error:
            print(f"launch: {error}", file=sys.stderr)
            return NOT_FOUND
        variables = job_environment(options, make_key=True)
        if options.log_dir:
            check_output("a log in --log_dir,", options.log_dir / "process-0.log")
        for restarts in range(options.retries + 1):
            outcome = self._attempt(options, command, variables, restarts)
            if not outcome.retry or restarts == options.retries:
                break
            print(f"launch: trying again, {restarts + 1} of {options.retries}", file=sys.stderr, flush=True)
        return outcome.code

    def _attempt(
        self, options: argparse.Namespace, command: Sequence[str], variables: JobEnvironment, restarts: int
    ) -> Outcome:
        """Run the command once."""
        coordinator = f"127.0.0.1:{free_port()}"
        # What a process writes to the terminal itself cannot be looked through for secrets.
        hides = bool(variables.secret.keys() - {JOB_KEY})
        own_terminal = options.prefix == "auto" and sys.stdout.isatty() and not options.log_dir and not hides
        exported = [value for name, value in os.environ.items() if SECRET_NAME.search(name)]
        specs = []
        for index in range(options.processes):
            environment = {
                RESTARTS: str(restarts),
                **local_environment(os.environ, options, coordinator, index),
                **variables.secret,
            }
            log = None
            if options.log_dir:
                path = options.log_dir / f"process-{index}.log"
                log = open(path, "ab" if restarts else "wb", opener=private)
            inherits = own_terminal and index == 0
            specs.append(ProcessSpec(command=command, environment=environment, log=log, inherits=inherits))
        console = Console(prefixed=options.prefix != "never")
        return LocalJob(specs, console, options.grace_s, [*variables.secret.values(), *exported]).run()

    def dry_run(self, options: argparse.Namespace) -> int:
        """Print the command of each process, with the variables that differ from those of the launcher."""
        variables = job_environment(options)
        coordinator = "127.0.0.1:8476"
        print("# each in the background of one shell; the launcher takes any free port for 8476")
        if options.env_file:
            print(f"set -a; . {shlex.quote(str(options.env_file))}; set +a")
        for index in range(options.processes):
            public = argparse.Namespace(**{**vars(options), "env": list(variables.public.items())})
            environment = local_environment(os.environ, public, coordinator, index)
            changed = [f"{name}={value}" for name, value in environment.items() if os.environ.get(name) != value]
            hidden = [f"{name}=<redacted>" for name in variables.secret if name in dict(options.env)]
            print(shlex.join(["env", *changed, *hidden, *options.command]), "&")
        print("wait")
        return DONE

    def logs(self, job: JobRecord, *, follow: bool = False) -> int:
        """Refused, as is what else needs a record: a local job has none."""
        raise ConfigError(f"job {job.name!r} is local: it lives and ends with its launcher, and there is no record.")

    status = stop = delete = logs


def local_environment(
    base: Mapping[str, str], options: argparse.Namespace, coordinator: str, index: int
) -> dict[str, str]:
    """Return the environment of process ``index``: CPU devices, gloo, no search for TPUs, and its place in the job.

    ``NPROC``, the number of threads that XLA computes with (in ``xla/pjrt/utils.cc``), is this process's share of the
    cores: with all of them in each process, a step of the demo takes a quarter longer.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    flags = [flag for flag in base.get("XLA_FLAGS", "").split() if "xla_force_host_platform_device_count" not in flag]
    flags.append(f"--xla_force_host_platform_device_count={options.devices_per_process}")
    proxied = any(name.lower().endswith("_proxy") for name in base)
    no_proxy = ",".join(filter(None, (base.get("no_proxy") or base.get("NO_PROXY"), "127.0.0.1,localhost")))
    return {
        "NPROC": str(max(1, cores // options.processes)),
        **base,
        **(dict.fromkeys(("no_proxy", "NO_PROXY"), no_proxy) if proxied else {}),
        "PATH": os.pathsep.join(filter(None, (str(Path(sys.executable).parent), base.get("PATH")))),
        "PYTHONUNBUFFERED": "1",
        "JAX_PLATFORMS": "cpu",
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "TPU_SKIP_MDS_QUERY": "1",
        "XLA_FLAGS": " ".join(flags),
        "LOCKSTEP_COORDINATOR_ADDRESS": coordinator,
        "LOCKSTEP_NUM_PROCESSES": str(options.processes),
        "LOCKSTEP_PROCESS_ID": str(index),
        **dict(options.env),
    }


def resolve(command: Sequence[str]) -> list[str]:
    """Return the command with the path of its program: beside the running interpreter (its venv), else on PATH."""
    program, *arguments = command
    if program in ("python", "python3"):
        return [sys.executable, *arguments]
    if os.sep in program:
        path = program if os.access(program, os.X_OK) else None
    else:
        path = shutil.which(program, path=str(Path(sys.executable).parent)) or shutil.which(program)
    if path is None:
        raise FileNotFoundError(
            f"no program {program!r} beside {sys.executable} or on PATH. Run this script with the Python of the "
            "environment that has it, for example .venv/bin/python infra/launch.py (make setup builds it)."
        )
    return [path, *arguments]


def free_port() -> int:
    """Return a TCP port that nobody listens on at this moment."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


SSH_OPTIONS = ("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15", "-o", "ServerAliveInterval=15")
"""No terminal, no question, and a connection that notices that its other end is gone."""


class SshTransport:
    """Workers behind one ssh each.

    Args:
        words: The words of ssh for each worker: options, ``--`` and the host.
    """

    def __init__(self, workers: Sequence[Worker], words: Sequence[Sequence[str]]) -> None:
        self.workers = workers
        self._words = words

    def argv(self, worker: int, command: str) -> list[str]:
        return ["ssh", *SSH_OPTIONS, *self._words[worker], command]


class Ssh(WorkerBackend):
    """Hosts that exist; nothing is created or deleted, one process runs on each."""

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        add_worker_options(parser)
        add = parser.add_argument_group("ssh: hosts that exist").add_argument
        add("--hosts", type=host_list, required=True, metavar="A,B,C|FILE", help="hosts (user@host), or a file with "
            "one per line")  # fmt: skip
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
        hosts = options.hosts.split(",")
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
        own = [word for option in options.ssh_option for word in shlex.split(option)]
        return SshTransport(workers, [[*own, "--", host] for host in hosts])

    def release(self, options: argparse.Namespace, console: Console) -> None:
        """Nothing was created."""


def host_list(text: str) -> str:
    """Read ``--hosts`` or the file that it names, as a type of argparse.

    It returns the hosts, separated by commas: the job's record keeps them, for the file is another one elsewhere, and
    may change.
    """
    lines = [text]
    if "/" in text or Path(text).is_file():
        try:
            lines = Path(text).expanduser().read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise argparse.ArgumentTypeError(
                f"{text} cannot be read ({error}). Name hosts, or a file with one per line."
            ) from None
    words = [word.strip() for line in lines if not line.strip().startswith("#") for word in line.split(",")]
    hosts = [word for word in words if word]
    twice = sorted({host for host in hosts if hosts.count(host) > 1})
    if not hosts or twice:
        wrong = f"has {', '.join(twice)} twice" if twice else "names no host"
        raise argparse.ArgumentTypeError(f"{text} {wrong}. Each host runs one process: name each once.")
    dashed = [host for host in hosts if host.startswith("-")]
    if dashed:
        raise argparse.ArgumentTypeError(f"{text}: {dashed[0]!r} is no host. Give options of ssh as --ssh_option=...")
    return ",".join(hosts)
