"""``lockstep launch``: run, status, logs, stop, delete."""

import argparse
import functools
import importlib
import sys
import traceback
from collections.abc import Callable, Sequence

from lockstep.errors import ConfigError, LockstepError
from lockstep.exits import DONE, FAILED, INTERRUPTED
from lockstep.launch.backend import Backend, Backends, LaunchError, WorkerBackend
from lockstep.launch.gke import Gke
from lockstep.launch.google import GoogleBackend
from lockstep.launch.machines import Local, Ssh
from lockstep.launch.mig import Mig
from lockstep.launch.options import PROG, Parser, add_backend_options, given_backend, parse_options, without_debug
from lockstep.launch.record import load_record
from lockstep.launch.slurm import Slurm
from lockstep.launch.tpu_vm import TpuVm
from lockstep.launch.worker_jobs import WorkerJobs
from lockstep.printable import error_line

BACKENDS: dict[str, Callable[[], Backend | WorkerBackend]] = {
    "gke": Gke,
    "local": Local,
    "slurm": Slurm,
    "ssh": Ssh,
    "tpu-vm": functools.partial(GoogleBackend, TpuVm),
    "mig": functools.partial(GoogleBackend, Mig),
}
"""Every backend, by the name that ``--backend`` takes, as what makes one: each job has one of its own."""


def make_backend(name: str, backends: Backends) -> Backend:
    """The backend of one job; a `WorkerBackend` becomes one by `WorkerJobs`."""
    backend = backends[name]()
    return WorkerJobs(backend) if isinstance(backend, WorkerBackend) else backend


def with_named(name: str | None, backends: Backends) -> Backends:
    """Return the backends and, where the name is that of a class, ``module:Class``, that class."""
    if name is None or name in backends or ":" not in name:
        return backends
    module_name, _, class_name = name.partition(":")
    try:
        return {**backends, name: getattr(importlib.import_module(module_name), class_name)}
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"--backend is {name!r}, which cannot be imported ({type(error).__name__}: {error}). Give module:Class, "
            "with the directory of the module on PYTHONPATH."
        ) from error


LATER = {
    "status": "say what each worker of a job does",
    "logs": "print what the workers of a job have printed",
    "stop": "end a job in order",
    "delete": "stop a job and delete what was created for it; its logs stay",
}
"""The sub-commands for a job that was started before."""


def parse(argv: Sequence[str], backends: Backends = BACKENDS) -> argparse.Namespace:
    """Read the options before ``--`` and the command after it, see `parse_options`."""
    return parse_options(argv, with_named(given_backend(argv), backends))


def main(arguments: Sequence[str] | None = None, backends: Backends = BACKENDS) -> int:
    """Run a sub-command; without one, ``run``."""
    words, debug = without_debug(sys.argv[1:] if arguments is None else arguments)
    try:
        if words and words[0] in LATER:
            return _later(words[0], words[1:], backends)
        options = parse(words[1:] if words[:1] == ["run"] else words, backends)
        backend = make_backend(options.backend, with_named(options.backend, backends))
        return backend.dry_run(options) if options.dry_run else backend.run(options)
    except KeyboardInterrupt:
        print("launch: interrupted", file=sys.stderr)
        return INTERRUPTED
    except LockstepError as error:
        if debug:
            traceback.print_exc()
        print(error_line(error), file=sys.stderr)
        return error.code if isinstance(error, LaunchError) else FAILED


def add_all_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of every backend, for shell completion."""
    add_backend_options(parser, BACKENDS)


def _later(command: str, words: Sequence[str], backends: Backends) -> int:
    parser = Parser(prog=f"{PROG} {command}", description=LATER[command])
    parser.add_argument("name", metavar="NAME", help="the job's name, as its start has shown it")
    if command == "logs":
        parser.add_argument("-f", "--follow", action="store_true", help="go on until the job has ended")
    parser.add_argument("--backend", metavar="MODULE:CLASS", help="the job's backend, where it is one of your own")
    options: argparse.Namespace = parser.parse_args(words)
    job = load_record(options.name)
    backends = with_named(options.backend, backends)  # not the record's: a file must not name a module to import
    if job.backend not in backends:
        raise ConfigError(
            f"job {job.name!r} has the backend {job.backend!r}, which is none of {', '.join(sorted(backends))}. If it "
            f"is your own, give it: --backend {job.backend}"
        )
    backend = make_backend(job.backend, backends)
    if job.deleted and command != "logs":
        print(f"launch: {job.name} was deleted; its logs are in {job.directory}", file=sys.stderr)
        return DONE
    if command == "logs":
        return backend.logs(job, follow=options.follow)
    return {"status": backend.status, "stop": backend.stop, "delete": backend.delete}[command](job)
