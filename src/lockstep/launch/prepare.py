"""The preparation of all workers before a job starts: reach them, set them up, copy files, check them."""

import collections
import dataclasses
import functools
import resource
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.exits import FAILED, PREFLIGHT, SETUP_FAILED, UNREACHABLE
from lockstep.files import private
from lockstep.launch.backend import Console, LaunchError, Lines, Transport, Worker
from lockstep.launch.connection import DroppedError, call
from lockstep.launch.sync import Archive

GIB = 1 << 30
DISK_BYTES = 2 * GIB  # that must be free in the home directory of a worker, and in `/tmp`
CLOCK_S = 30.0
"""Seconds between the clocks of a worker and the launcher at most: certificates and signed requests to buckets are
refused minutes apart, and logs cannot be read side by side."""
HUGE_PAGES_FIX = 'sudo sh -c "echo always > /sys/kernel/mm/transparent_hugepage/enabled"'

Facts = Mapping[str, Any]  # of a worker, as agent.main.gather tells them, and `skew_s`: how far ahead its clock is


def problems(workers: Sequence[Worker], facts: Sequence[Facts], program: str) -> list[str]:
    """The problems of workers, one line each; empty: they are fit."""
    lines = []
    for worker, fact in zip(workers, facts, strict=True):
        lines += [f"worker {worker.name}: {text}" for text in _own_problems(fact, program)]
    return lines + _differences(workers, facts)


def advice(workers: Sequence[Worker], facts: Sequence[Facts], environment: Mapping[str, str]) -> list[str]:
    """Faults of workers that a job survives, one line each."""
    lines = []
    slow = [worker.name for worker, fact in zip(workers, facts, strict=True) if fact["small_pages"]]
    if slow:
        lines.append(
            f"transparent huge pages are off on {len(slow)} worker(s), {slow[0]} first: the TPU runtime starts and "
            f"ends slowly. There: {HUGE_PAGES_FIX}"
        )
    cache = environment.get("JAX_COMPILATION_CACHE_DIR", "")
    if cache and "://" not in cache and len(workers) > 1:
        lines.append(
            f"JAX_COMPILATION_CACHE_DIR is {cache}. Unless all workers share it, one that is replaced compiles while "
            "the others wait for it: a gs:// URL has no such skew."
        )
    return lines


def _own_problems(fact: Facts, program: str) -> list[str]:
    lines: list[str] = []
    for holder in fact["holders"]:
        lines.append(
            f"process {holder['pid']} ({holder['command']}) uses {holder['device']}, and a chip serves one process. "
            f"End it there with: sudo kill {holder['pid']}"
        )
    for port in fact["busy_ports"]:
        lines.append(
            f"port {port} is in use, and the job listens on it. End the process that `sudo ss -ltnp 'sport = {port}'` "
            "shows there, or take another one (ssh: --port; TPU VMs: --env JAX_COORDINATOR_PORT=11211)"
        )
    for address in fact["closed"]:
        port = address.rpartition(":")[2]
        lines.append(
            f"it cannot reach {address}, where the job begins: a firewall drops what is sent there. Google's rule for "
            "new networks opens 8470, 8471, 8474, 8476 and 11211 between machines. Take one of these (--env "
            f"JAX_COORDINATOR_PORT=8476), or open it: gcloud compute firewall-rules create lockstep-{port} "
            f"--network=NETWORK --allow=tcp:{port} --source-ranges=10.0.0.0/8"
        )
    for path, free in fact["disk"].items():
        if free < DISK_BYTES:
            lines.append(
                f"{free / GIB:.2f} GiB are free in {path}; at least {DISK_BYTES / GIB:g} GiB are needed for "
                "logs and caches. Delete files there, or take a larger disk"
            )
    if abs(fact["skew_s"]) > CLOCK_S:
        ahead = "ahead of" if fact["skew_s"] > 0 else "behind"
        lines.append(
            f"its clock is {abs(fact['skew_s']):.0f} s {ahead} this machine's; at most {CLOCK_S:g} s are allowed. "
            "Set it there with: sudo systemctl restart systemd-timesyncd (or chrony)"
        )
    if fact["program"] is None:
        lines.append(
            f"no program {program!r} in {fact['path']}. Install it there, or say where it is (with ssh: --venv DIR)"
        )
    return lines


def _differences(workers: Sequence[Worker], facts: Sequence[Facts]) -> list[str]:
    """The packages and programs that have another version on some workers than on most."""
    lines = []
    for name in ("python", "lockstep", "jax", "libtpu"):
        versions = [fact["versions"].get(name) for fact in facts]
        usual = collections.Counter(versions).most_common(1)[0][0]
        for worker, version in zip(workers, versions, strict=True):
            if version != usual:
                lines.append(
                    f"worker {worker.name}: {name} is {version or 'not there'}, but {usual or 'not there'} on most "
                    "workers; all must have the same. Install the same everywhere"
                )
    return lines


AT_ONCE = 64  # workers that are talked to at the same time
FILES_PER_WORKER = 8  # pipes and files that a connection and a log need
PAUSE_S = (0.5, 5.0)  # seconds between two tries to reach a worker, at first and at most
FREE_S = 20.0  # seconds for which a job that is started again waits for what its last attempt has used
SHOWN = 8  # workers that are named when the same goes wrong on many


def on_all[T](transport: Transport, work: Callable[[int], T]) -> list[T]:
    """Do something for each worker, by its number, side by side; the results by worker."""
    count, gate = len(transport.workers), threading.Semaphore(AT_ONCE)
    allow_open_files(FILES_PER_WORKER * count + 256)
    results: dict[int, T] = {}
    errors: dict[int, Exception] = {}

    def one(index: int) -> None:
        with gate:
            try:
                results[index] = work(index)
            except Exception as error:
                errors[index] = error

    # Threads that do not keep the launcher from ending when Ctrl-C comes.
    threads = [threading.Thread(target=one, args=(index,), daemon=True) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    failed = [errors[index] for index in sorted(errors)]
    for error in failed:
        if not isinstance(error, LaunchError):
            raise error
    if failed:
        code = failed[0].code if isinstance(failed[0], LaunchError) else FAILED
        raise LaunchError(in_short([str(error) for error in failed]), code)
    return [results[index] for index in range(count)]


def allow_open_files(number: int) -> None:
    """Let this process have so many files open, as far as the system allows: 1,024 is a usual limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < number:
        most = number if hard == resource.RLIM_INFINITY else min(number, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def in_short(texts: Sequence[str]) -> str:
    """The first of some texts, and how many there are beside."""
    more = f"\n... and {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
    return "\n".join(texts[:SHOWN]) + more


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preparation:
    """The job that workers are prepared for."""

    roots: Sequence[str]
    setup: str | None
    setup_files: Mapping[str, bytes]
    setup_logs: Sequence[Path]
    archive: Archive | None
    program: str  # what the job runs; it must be there
    cwds: Sequence[str]
    environment: Mapping[str, str]  # variables of the job, without secrets
    unreachable_s: float
    preflight: bool  # whether the workers are looked at
    sudo: bool  # whether processes of other users are looked at as root, where that needs no password
    replaces: bool  # whether an attempt of this job that still runs is ended; else it is an error


def prepare(transport: Transport, job: Preparation, console: Console) -> list[float | None]:
    """Prepare every worker.

    Returns:
        The seconds by which each worker's clock is ahead of this one's; None where nobody looked.

    Raises:
        LaunchError: A worker cannot be reached, set up or used; all such workers are named.
    """
    count = len(transport.workers)
    console.say(f"reaching {count} worker(s)")
    how = "kill" if job.replaces else ""
    cleared = on_all(transport, lambda index: _ask(transport, index, job, {"op": "clear", "how": how}, console=console))
    running = [
        f"worker {worker.name}: {' '.join(answer['running'])} of this job still runs there"
        for worker, answer in zip(transport.workers, cleared, strict=True)
        if answer["running"]
    ]
    if running:
        raise LaunchError(
            in_short(running) + "\nIts launcher may be elsewhere, or it was left alone: see lockstep launch status, "
            "end it with lockstep launch stop, or give this job another --name.",
            PREFLIGHT,
        )
    if job.setup is not None:
        console.say(f"setting up {count} worker(s)")
        on_all(transport, lambda index: _set_up(transport, index, job, console))
    if job.archive is not None:
        archive = job.archive
        console.say(f"copying {archive.count} file(s), {archive.size / 1e6:.1f} MB")
        on_all(transport, lambda index: _put(transport, index, job, archive))
    if not job.preflight:
        return [None] * count
    # What an attempt has used may take a moment to be free again.
    deadline = time.monotonic() + (FREE_S if job.replaces else 0.0)
    while True:
        facts = on_all(transport, lambda index: _facts(transport, index, job))
        lines = problems(transport.workers, facts, job.program)
        in_use = any(fact["holders"] or fact["busy_ports"] for fact in facts)
        if not in_use or time.monotonic() > deadline:
            break
        console.once("waiting for chips and ports to be free again")
        time.sleep(PAUSE_S[0])
    if lines:
        raise LaunchError("\n".join(lines) + "\nNothing was started. (--no-preflight starts all the same.)", PREFLIGHT)
    for text in advice(transport.workers, facts, job.environment):
        console.say(text)
    return [fact["skew_s"] for fact in facts]


def _ask(
    transport: Transport,
    index: int,
    job: Preparation,
    request: Mapping[str, Any],
    payload: tuple[bytes | Path, ...] = (),
    on_output: Callable[[bytes], object] | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """`call`, tried again while the worker cannot be reached, for ``unreachable_s``."""
    full = {"root": job.roots[index], "timeout_s": 20.0, **request}
    begin, pause, name = time.monotonic(), PAUSE_S[0], transport.workers[index].name
    while True:
        try:
            return call(transport, index, full, payload, on_output)
        except DroppedError as error:
            left = job.unreachable_s - (time.monotonic() - begin)
            if left < 0:
                raise LaunchError(
                    f"worker {name} cannot be reached: {error}. Tried for {job.unreachable_s:g} s (--unreachable_s). "
                    "Is it up, and does the command that --dry-run shows work in your shell?",
                    UNREACHABLE,
                ) from None
            if console is not None:
                console.once(f"worker {name} cannot be reached, trying for {job.unreachable_s:g} s: {error}")
            time.sleep(min(pause, left + 0.01))
            pause = min(2 * pause, PAUSE_S[1])


def _set_up(transport: Transport, index: int, job: Preparation, console: Console) -> None:
    files = list(job.setup_files.items())
    request = {"op": "setup", "script": job.setup, "files": [[name, len(data)] for name, data in files]}
    log = job.setup_logs[index]
    with open(log, "wb", opener=private) as file:
        lines = Lines(functools.partial(console.line, index))

        def show(data: bytes) -> None:
            file.write(data)
            lines.feed(data)

        answer = _ask(transport, index, job, request, tuple(data for _, data in files), show)
    if answer["code"] != 0:
        last = "\n".join("  " + line for line in log.read_text(errors="replace").splitlines()[-20:])
        raise LaunchError(
            f"worker {transport.workers[index].name}: its setup ended with code {answer['code']}; all it printed is in "
            f"{log}. Its last lines:\n{last}",
            SETUP_FAILED,
        )


def _put(transport: Transport, index: int, job: Preparation, archive: Archive) -> None:
    if not _ask(transport, index, job, {"op": "has", "digest": archive.digest})["has"]:
        _ask(transport, index, job, {"op": "put", "digest": archive.digest}, (archive.path,))


def _facts(transport: Transport, index: int, job: Preparation) -> Facts:
    worker = transport.workers[index]
    request = {
        "op": "facts",
        "ports": worker.ports,
        "reaches": worker.reaches,
        "sudo": job.sudo,
        "program": job.program,
        "cwd": job.cwds[index],
        "path": worker.path,
        "env": {**worker.environment, **job.environment},
        "secrets": {},
    }
    begin = time.time()
    answer = _ask(transport, index, job, request)
    # The worker looked at its clock between the two; starting Python there is most of the way.
    skew = max(answer["time"] - time.time(), 0.0) + min(answer["time"] - begin, 0.0)
    return {**answer, "skew_s": skew}
