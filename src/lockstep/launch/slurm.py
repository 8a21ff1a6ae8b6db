"""The backend ``slurm``: a batch job whose nodes share the file system of the machine that submits it."""

import argparse
import dataclasses
import os
import re
import shlex
import time
from pathlib import Path
from typing import Final

from lockstep.errors import ConfigError
from lockstep.exits import DONE, FAILED, KILLED, NOT_FOUND, REFUSED, TERMINATED, UNREACHABLE, WORKER_LOST, describe_code
from lockstep.files import write_file
from lockstep.launch.backend import Console, LaunchError
from lockstep.launch.environment import JobEnvironment, filter_files, here_document, job_environment, job_variables
from lockstep.launch.failure import failed_by_their_logs
from lockstep.launch.job_loop import PlatformLoop
from lockstep.launch.options import add_job_options, count
from lockstep.launch.record import Attempt, JobRecord, find_earlier, kept_logs, name_from_date, new_record
from lockstep.launch.slurm_script import CODE, SCRIPT, SECRETS, TASK, SlurmJob, batch_script, secrets_file, task_script
from lockstep.launch.tool import Cause, Tool


class FollowedFiles:
    """Shows what is new in ``attempt-N/worker-M.log`` below a directory, each line after ``[M] ``."""

    def __init__(self, directory: Path, console: Console) -> None:
        self._directory = directory
        self._console = console
        self._read: dict[Path, int] = {}

    def read(self, *, last: bool) -> None:
        """Show the whole lines that are new; at ``last``, when no more will be written, one without an end too."""
        for _, task, path in kept_logs(self._directory):
            with open(path, "rb") as file:
                file.seek(self._read.get(path, 0))
                data = file.read()
            whole = len(data) if last else data.rfind(b"\n") + 1
            self._read[path] = self._read.get(path, 0) + whole
            for line in data[:whole].splitlines():
                self._console.line(task, line)


POLL_S: Final = 5.0  # seconds between two questions to Slurm's controller, which serves all users
READ_S: Final = 0.5  # seconds between two looks at the logs
ENDED: Final = {
    "COMPLETED": DONE,
    "NODE_FAIL": WORKER_LOST,
    "BOOT_FAIL": WORKER_LOST,
    "PREEMPTED": WORKER_LOST,
    "OUT_OF_MEMORY": KILLED,
    "TIMEOUT": TERMINATED,
    "CANCELLED": TERMINATED,
    "DEADLINE": TERMINATED,
    "FAILED": FAILED,
}
"""States of a job whose script has noted no code, or none that the file system shows yet.

https://slurm.schedmd.com/squeue.html
"""

CAUSES: Final = tuple(
    Cause(pattern=pattern, summary="{program} refused", advice=advice, code=code)
    for pattern, code, advice in (
        ("Invalid partition", REFUSED, "sinfo lists the partitions: choose one with --partition"),
        ("Invalid account", REFUSED, "sacctmgr show assoc user=$USER lists your accounts: choose one with --account"),
        ("node configuration is not available", REFUSED,
         "sinfo -N -l lists the nodes: ask for fewer --nodes or --tasks_per_node"),
        ("QOS", REFUSED, "Your quota does not allow it (sacctmgr show qos): fewer --nodes or a shorter --time_limit"),
        ("time limit is invalid", REFUSED, "sinfo -o '%P %l' lists the limits: a shorter --time_limit"),
        ("Unable to contact slurm controller|Socket timed out|Connection refused", UNREACHABLE,
         "The controller does not answer: try again later"),
    )
)  # fmt: skip
TOOL: Final = Tool(
    missing=Cause(
        summary="{program} was not found",
        advice="Run this on a login node of the cluster, where Slurm's commands are",
        code=NOT_FOUND,
    ),
    causes=CAUSES,
    unknown=Cause(summary="{program} refused", advice="Run the command by hand to see more"),
    warns=True,
)


class Slurm:
    """Batch jobs: one process per task, found by JAX from Slurm's variables."""

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        add_job_options(parser)
        add = parser.add_argument_group("slurm: a batch job").add_argument
        add("--nodes", type=count, default=1, help="how many nodes (default 1)")
        add("--tasks_per_node", type=count, default=1, help="processes of the job on each node (default 1)")
        add("--partition", help="the partition (default: the cluster's)")
        add("--account", help="the account that is charged (default: the user's)")
        add(
            "--time_limit", metavar="TIME", help="as for sbatch: 2-00:00:00 is two days; SIGTERM comes 2 minutes before"
        )
        add("--sbatch", action="append", default=[], metavar="OPTION", help="another option: --sbatch=--constraint=tpu")

    def run(self, options: argparse.Namespace) -> int:
        """Submit the job and, in the foreground, show its logs until it has ended."""
        record = new_record(options, options.name or name_from_date())
        if (before := find_earlier(record)) is not None and not before.deleted and _state(before):
            raise LaunchError(
                f"job {record.name!r} is in Slurm's queue (job {before.notes['job']}). Give another --name, or end it: "
                f"lockstep launch delete {record.name}.",
                REFUSED,
            )
        environment = job_environment(options, make_key=True)
        job = _job(options, record, environment)
        directory = record.directory
        record.make_directory()
        for name, text in {SCRIPT: batch_script(job), TASK: task_script(list(environment.secret))}.items():
            write_file(directory / name, text)
        for name, data in filter_files().items() if environment.secret else ():
            write_file(directory / name, data)
        console = Console(log=directory / "launcher.log")
        for remark in environment.remarks:
            console.say(remark)
        try:
            if environment.secret:
                write_file(directory / SECRETS, secrets_file(environment.secret), 0o600)
            answer = TOOL.run(_submit(directory))
        except BaseException:
            (directory / SECRETS).unlink(missing_ok=True)
            raise
        record = dataclasses.replace(record, notes={"job": answer.strip().partition(";")[0]})
        record = record.with_attempt(Attempt(number=1, id=record.notes["job"], started=time.time()))
        record.save()
        console.say(
            f"job {record.name} is job {record.notes['job']} of Slurm, {job.tasks} processes; logs are in {directory}"
        )
        if not options.foreground:
            console.say(f"lockstep launch status|logs|stop|delete {record.name}")
            return DONE
        return self._follow(record, console, stop_on_signal=True)

    def dry_run(self, options: argparse.Namespace) -> int:
        """Print the files and the command that `run` writes and runs."""
        record = new_record(options, options.name or name_from_date())
        environment = job_environment(options)
        job, directory = _job(options, record, environment), record.directory
        print(f"mkdir -p {shlex.quote(str(directory))}")
        for name, text in {SCRIPT: batch_script(job), TASK: task_script(list(environment.secret))}.items():
            print(f"cat > {shlex.quote(str(directory / name))} {here_document(text)}")
        if environment.secret:
            names = ", ".join(environment.secret)
            print(
                f"# {directory / SECRETS}, mode 600, sets {names}; {', '.join(filter_files())} takes them out of logs"
            )
        print(shlex.join(_submit(directory)))
        return DONE

    def status(self, job: JobRecord) -> int:
        """Print Slurm's state of the job, and the code of each task that has ended."""
        state = _state(job)
        if not state:
            _forget_secrets(job)
        code = _noted_code(job)
        print(f"{job.name}: {state or ('ended' if code is None else describe_code(code))}")
        for attempt in sorted(job.directory.glob("attempt-*")):
            for task, (ended, _) in sorted(_noted_ends(attempt).items()):
                print(f"  {attempt.name} process {task}: {describe_code(ended)}")
        return DONE if state else _code(job)

    def logs(self, job: JobRecord, *, follow: bool) -> int:
        """Print the logs of all attempts; with ``follow`` until the job has ended."""
        if follow and _state(job):
            return self._follow(job, Console(), stop_on_signal=False)
        FollowedFiles(job.directory, Console()).read(last=True)
        return DONE

    def stop(self, job: JobRecord) -> int:
        """Cancel the job: Slurm sends SIGTERM, and SIGKILL after its KillWait."""
        if _state(job):
            TOOL.run(["scancel", job.notes["job"]])
            while _state(job):
                time.sleep(READ_S)
        _forget_secrets(job)
        return DONE

    def delete(self, job: JobRecord) -> int:
        """Stop the job; its logs stay."""
        self.stop(job)
        dataclasses.replace(job, deleted=True).save()
        return DONE

    def _follow(self, job: JobRecord, console: Console, *, stop_on_signal: bool) -> int:
        """Show logs and states until the job has left Slurm's queue; return its code."""
        code, ended = _Following(job, console, stop_on_signal=stop_on_signal).run(READ_S)
        if not ended:
            return code
        attempts = [*job.directory.glob("attempt-*")]
        job.with_end(code).save()
        if code:
            _show_failure(job, len(attempts), code, console)
        _forget_secrets(job)
        return code


class _Following(PlatformLoop):
    """A job of Slurm that is followed with its logs."""

    def __init__(self, job: JobRecord, console: Console, *, stop_on_signal: bool) -> None:
        super().__init__(console, "the job", stop_on_signal=stop_on_signal)
        self._job, self._logs = job, FollowedFiles(job.directory, console)
        self._state, self._shown = "PENDING", ""

    def end(self, *, kill: bool) -> None:
        try:
            TOOL.run(["scancel", *(["--signal=KILL", "--full"] if kill else []), self._job.notes["job"]])
        except LaunchError as error:
            if error.code == UNREACHABLE:
                raise
            self.console.say(str(error))  # the job has just ended by itself

    def look(self) -> int | None:
        if time.monotonic() > self.due:
            self.tell()
            state = self.patience.look(lambda: _state(self._job))
            self.due = time.monotonic() + POLL_S
            self._state = self._state if state is None else state
            if self._state and self._state != self._shown:
                self.console.say(f"{self._job.name}: {self._state}")
                self._shown = self._state
        self._logs.read(last=not self._state)
        if self._state:
            return None
        return 128 + self.stopped_by if self.stopped_by else _code(self._job)


def _code(job: JobRecord) -> int:
    """The code of a job that has left the queue: as its script noted, else as Slurm's accounting says."""
    if (code := _noted_code(job)) is not None:
        return code
    try:
        words = TOOL.run(["sacct", "-j", job.notes["job"], "-X", "-n", "-P", "-o", "State"]).split()
    except LaunchError:
        words = []
    return ENDED.get(words[0], WORKER_LOST) if words else WORKER_LOST


def _job(options: argparse.Namespace, record: JobRecord, environment: JobEnvironment) -> SlurmJob:
    if options.sync:
        raise ConfigError("--sync is given, but the nodes of a Slurm job share this file system. Leave it out.")
    tasks = options.nodes * options.tasks_per_node
    words = [f"--{name}={value}" for name in ("partition", "account") if (value := getattr(options, name))]
    return SlurmJob(
        name=record.name,
        directory=record.directory.resolve(),
        command=options.command,
        nodes=options.nodes,
        tasks_per_node=options.tasks_per_node,
        environment={**job_variables(options.require_process_count or tasks), **environment.public},
        has_secrets=bool(environment.secret),
        retries=options.retries,
        time_limit=options.time_limit,
        options=[*words, *options.sbatch],
    )


def _forget_secrets(job: JobRecord) -> None:
    """Remove the file of secrets of a job that has left the queue: one that never ran, or was killed, has not."""
    (job.directory / SECRETS).unlink(missing_ok=True)


def _submit(directory: Path) -> list[str]:
    return ["sbatch", "--parsable", f"--chdir={os.getcwd()}", str(directory.resolve() / SCRIPT)]


def _state(job: JobRecord) -> str:
    """Slurm's state of a job and its reason, as in ``PENDING (Resources)``; "" once it has left the queue."""
    try:
        text = TOOL.run(["squeue", "--noheader", f"--jobs={job.notes['job']}", "--format=%T (%r)"])
    except LaunchError as error:
        if "Invalid job id" in str(error):  # how Slurm says that a job has ended a while ago
            return ""
        raise
    return text.strip().replace(" (None)", "")


def _noted_code(job: JobRecord) -> int | None:
    """The code that the script of the last attempt has noted; None: it has not."""
    attempts = sorted(job.directory.glob("attempt-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    file = attempts[-1] / CODE if attempts else None
    return _exit_code(file.read_text(errors="replace")) if file is not None and file.exists() else None


def _exit_code(text: str) -> int:
    """A noted exit code; what is none, which a task of somebody else's may write there, is a failure."""
    text = text.strip()
    return int(text) if re.fullmatch("[0-9]{1,3}", text) and int(text) < 256 else FAILED


def _noted_ends(attempt: Path) -> dict[int, tuple[int, float]]:
    """The exit code of each task that has noted it, and when it ended; a task may be killed while it writes."""
    words = {path: path.read_text(errors="replace").split() for path in attempt.glob(f"{CODE}-*")}
    return {
        int(path.name.rpartition("-")[2]): (_exit_code(noted[0]), float(noted[1]))
        for path, noted in words.items()
        if len(noted) == 2 and re.fullmatch(r"[0-9]{1,12}(\.[0-9]+)?", noted[1])
    }


def _show_failure(job: JobRecord, attempt: int, code: int, console: Console) -> None:
    """Say what ended the job, and show the end of the log of the process that failed first."""
    console.say(f"failed: {describe_code(code)}")
    themselves = failed_by_their_logs(kept_logs(job.directory, attempt))
    noted = _noted_ends(job.directory / f"attempt-{attempt}")
    if ended := [(task not in themselves, at, task) for task, (own, at) in noted.items() if own == code]:
        console.say(f"process {min(ended)[2]} failed first; its log is {job.log(attempt, min(ended)[2])}")
    own_log = job.directory / f"slurm-{job.notes['job']}.log"
    for line in own_log.read_text(errors="replace").splitlines()[-5:] if own_log.exists() else ():
        console.say(f"slurm: {line}")
