"""The backend that a `WorkerBackend` becomes: one connection per worker, detached commands, records and logs."""

import argparse
import dataclasses
import secrets
import tempfile
import time
from pathlib import Path

from lockstep.errors import ConfigError
from lockstep.exits import DONE, INTERRUPTED, TERMINATED, is_retried
from lockstep.launch.attempt import AttemptSpec, RunningAttempt
from lockstep.launch.backend import Console, LaunchError, Transport, WorkerBackend, root_on_worker
from lockstep.launch.end_request import EndRequest
from lockstep.launch.environment import RESTARTS, JobEnvironment, job_environment, job_variables, show_commands
from lockstep.launch.job_loop import Outcome, interrupt, signals_to
from lockstep.launch.prepare import Preparation, prepare
from lockstep.launch.record import Attempt, JobRecord, find_earlier, find_record, name_from_date, new_record
from lockstep.launch.started_job import StartedJob
from lockstep.launch.sync import Archive, check_configuration, make_archive
from lockstep.redact import Redactor

RETRY_PAUSE_S = 2.0  # seconds before a job is started again


class WorkerJobs:
    """Runs jobs on the workers of a backend."""

    def __init__(self, backend: WorkerBackend) -> None:
        self._backend = backend

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        self._backend.add_options(parser)

    def run(self, options: argparse.Namespace) -> int:
        """Get the workers, prepare them, run the command, and try again where that can help."""
        environment = job_environment(options, make_key=True)
        check_configuration(options.command, options.sync, options.workdir)
        if options.retries and not options.foreground:
            raise ConfigError(
                f"--retries {options.retries} with --no-foreground: the launcher must stay to start a job again. Leave "
                "one of them out, and keep the launcher in a terminal multiplexer (tmux) where it must outlive yours."
            )
        _, planned = self._backend.dry_run(options)
        check_process_count(options, planned)
        name = options.name or self._backend.default_name(options) or name_from_date()
        record = _continued(new_record(options, name))
        console = Console(Redactor(environment.secret.values()), record.directory / "launcher.log")
        console.say(f"job {name}: logs and state in {record.directory}")
        for remark in environment.remarks:
            console.say(remark)
        with tempfile.TemporaryDirectory() as folder:
            archive = None
            if options.sync:
                archive = make_archive(options.sync, options.env_file, Path(folder) / "files.tar.gz")
                if warning := archive.warning():
                    console.say(warning)
            with signals_to(interrupt):
                return self._try(_Run(options, environment, archive, console), record)

    def _try(self, run: "_Run", record: JobRecord) -> int:
        """Start attempts until one is done, cannot be helped by another, or was the last."""
        request, begun = EndRequest(record), 0
        self._backend.given_up = lambda: bool(request.command())
        for tries in range(run.options.retries + 1):
            number = max((attempt.number for attempt in record.attempts), default=0) + 1
            attempt = Attempt(number=number, id=f"attempt-{number}-{secrets.token_hex(4)}", started=time.time())
            record = record.with_attempt(attempt)
            record.save()
            failure = None
            try:
                running = self._prepare(run, record, attempt, replaces=tries > 0, restarts=begun)
                if request.command():
                    raise LaunchError("somebody has ended it meanwhile")
                begun += 1
                attempt = dataclasses.replace(attempt, launched=True)
                _keep(record.with_attempt(attempt), request)
                outcome = running.run()
            except LaunchError as error:
                failure = error
                outcome = Outcome(code=error.code, cause=str(error), retry=is_retried(error.code))
            except KeyboardInterrupt:
                run.console.say("interrupted before the command was started")
                outcome = Outcome(code=INTERRUPTED, cause="interrupted before the command was started")
            if outcome.detached:
                run.console.say(f"it runs; now: lockstep launch status|logs -f|stop|delete {record.name}")
                return DONE
            if (command := request.command()) and (failure is not None or outcome.retry):
                failure, outcome = None, Outcome(code=TERMINATED, cause=f"ended by lockstep launch {command}")
            cause = Redactor(run.environment.secret.values()).text(outcome.cause)
            ended = dataclasses.replace(attempt, ended=time.time(), code=outcome.code, cause=cause)
            record = record.with_attempt(ended)
            _keep(record, request)
            if not outcome.retry or tries == run.options.retries:
                break
            run.console.say(f"{cause}\ntrying again in {RETRY_PAUSE_S:g} s, {tries + 1} of {run.options.retries}")
            time.sleep(RETRY_PAUSE_S)
            if request.command():
                failure, outcome = None, Outcome(code=TERMINATED)
                break
        if command := request.command():
            run.console.say(f"job {record.name} was ended by lockstep launch {command}, and is not started again")
        if failure is not None:
            raise failure
        return outcome.code

    def _prepare(
        self, run: "_Run", record: JobRecord, attempt: Attempt, replaces: bool, restarts: int
    ) -> RunningAttempt:
        """Get the workers ready for the command; nothing is started yet."""
        options, environment, console = run.options, run.environment, run.console
        transport = self._backend.acquire(options, console)
        check_process_count(options, transport)
        count = len(transport.workers)
        roots = [root_on_worker(record.name, index) for index in range(count)]
        public = {**job_variables(count), RESTARTS: str(restarts), **environment.public}
        setup_logs = [record.log(attempt.number, index).with_name(f"setup-{index}.log") for index in range(count)]
        setup = self._backend.setup_script(options)
        cwds = [options.workdir or (f"{root}/files" if options.sync else "~") for root in roots]
        preparation = Preparation(
            roots=roots,
            setup=setup,
            setup_files=self._backend.setup_files(options) if setup is not None else {},
            setup_logs=setup_logs,
            archive=run.archive,
            program=options.command[0],
            cwds=cwds,
            environment=public,
            unreachable_s=options.unreachable_s,
            preflight=options.preflight,
            sudo=options.preflight_sudo,
            replaces=replaces,
        )
        skews = prepare(transport, preparation, console)
        starts = [
            {
                "argv": options.command,
                "cwd": cwd,
                "path": worker.path,
                "env": {**worker.environment, **public},
                "secrets": dict(environment.secret),
                "lease_s": options.lease_s if options.foreground else None,
                "grace_s": options.grace_s,
            }
            for worker, cwd in zip(transport.workers, cwds, strict=True)
        ]
        spec = AttemptSpec(
            id=attempt.id,
            roots=roots,
            starts=starts,
            logs=[record.log(attempt.number, index) for index in range(count)],
            skews_s=skews,
            foreground=options.foreground,
            grace_s=options.grace_s,
            lease_s=options.lease_s,
            unreachable_s=options.unreachable_s,
        )
        console.say(f"starting on {count} worker(s), attempt {attempt.number}")
        return RunningAttempt(transport, spec, console, lambda: self._backend.why_lost(options), self._backend.given_up)

    def dry_run(self, options: argparse.Namespace) -> int:
        """Print the commands that create the workers, and what they amount to on each of them."""
        environment = job_environment(options)
        check_configuration(options.command, options.sync, options.workdir)
        created, transport = self._backend.dry_run(options)
        check_process_count(options, transport)
        name = options.name or self._backend.default_name(options) or name_from_date()
        setup, folder = self._backend.setup_script(options), self._backend.setup_folder(options)
        show_commands(options, environment, name, created, transport, setup, folder)
        return DONE

    def status(self, job: JobRecord) -> int:
        return StartedJob(self._backend, job).status()

    def logs(self, job: JobRecord, *, follow: bool) -> int:
        return StartedJob(self._backend, job).logs(follow=follow)

    def stop(self, job: JobRecord) -> int:
        return StartedJob(self._backend, job).stop()

    def delete(self, job: JobRecord) -> int:
        return StartedJob(self._backend, job).delete()


@dataclasses.dataclass(frozen=True)
class _Run:
    """The state that all attempts of one ``launch run`` share."""

    options: argparse.Namespace
    environment: JobEnvironment
    archive: Archive | None
    console: Console


def _continued(record: JobRecord) -> JobRecord:
    """The record with the attempts of an earlier job of this name, whose logs stay."""
    before = find_earlier(record)
    if before is None:
        return record
    return dataclasses.replace(record, attempts=before.attempts, notes=before.notes)


def _keep(record: JobRecord, request: EndRequest) -> None:
    """Write a record, which the process that deletes the job may have marked."""
    kept = find_record(record.name) if request.command() == "delete" else None
    dataclasses.replace(record, deleted=kept is not None and kept.deleted).save()


def check_process_count(options: argparse.Namespace, transport: Transport) -> None:
    """Refuse a number of workers that ``--require-process-count`` does not allow, before anything is started."""
    count, required = len(transport.workers), options.require_process_count
    if required is not None and required != count:
        raise ConfigError(
            f"--require-process-count is {required}, but there are {count} workers, each with one process. Leave it "
            "out to require what is there."
        )
