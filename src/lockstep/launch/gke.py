"""The backend ``gke``: a JobSet on a cluster of Google Kubernetes Engine whose node pools have TPU slices."""

import argparse
import contextlib
import dataclasses
import json
import os
import re
import secrets
import shlex
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from lockstep.errors import ConfigError
from lockstep.exits import DONE, INTERRUPTED, SETUP_FAILED, WORKER_LOST, describe_code
from lockstep.launch.backend import Console, LaunchError, Patience
from lockstep.launch.environment import JobEnvironment, filter_files, here_document, job_environment, job_variables
from lockstep.launch.gke_manifest import (
    FILES,
    MAX_PARTS,
    PART_BYTES,
    SYNCED,
    GkeJob,
    config_maps,
    job_set,
    pack,
    secret,
)
from lockstep.launch.job_loop import PlatformLoop
from lockstep.launch.kubectl import Cluster, PodLogs
from lockstep.launch.options import add_job_options, add_slices_option, count, slice_counts
from lockstep.launch.pods import PodState, not_started, verdict
from lockstep.launch.record import Attempt, JobRecord, find_earlier, name_from_date, new_record
from lockstep.launch.setup_vm import EXTRAS, PINS, ROOT, build_wheel, version_of, wheel_path
from lockstep.launch.slices import slice_of
from lockstep.launch.sync import make_archive

IMAGE = "python:3.12@sha256:dd4fe98ab39f91e936f8e7e7a65a3ce59ecfb11e32f9a125b3132779920ba7f7"
"""The default image: an index of every platform, as public repositories have pulled python:3.12 since 2026-08-13."""


def add_gke_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the backend."""
    add_job_options(parser)
    add = parser.add_argument_group("gke: a JobSet on a cluster").add_argument
    add("--tpu_type", metavar="TYPE", help="chip and size of a slice, for example v5p-64 or v6e-8; required")
    add_slices_option(add)
    add("--capacity_type", choices=("on-demand", "spot", "reserved"), default="on-demand",
        help="which nodes may be used (default on-demand)")  # fmt: skip
    add("--reservation", default="", metavar="NAME", help="with --capacity_type reserved: the reservation")
    add("--context", default="", help="the context of kubectl's configuration (default: the current one)")
    add("--namespace", default="", help="the namespace (default: the context's)")
    add("--image", default=IMAGE,
        help="the container image, with Bash, tar and Python (default: python:3.12 as it was in August 2026, by its "
        "digest)")  # fmt: skip
    add("--privileged", action="store_true", help="privileged containers, as GKE before 1.28 wants them for TPUs")
    add("--setup", choices=("auto", "none"), default="auto",
        help="auto: install this checkout in every pod; none: the image has it")  # fmt: skip
    add("--extras", default=EXTRAS, help=f"optional dependencies to install (default {EXTRAS})")
    add("--service_account", default="", help="the Kubernetes service account, for buckets")
    add("--queue", default="", help="the Kueue queue")
    add("--grace_s", type=count, default=60, help="seconds between SIGTERM and SIGKILL (default 60)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GkeSpec:
    """A job before anything of it is created."""

    options: argparse.Namespace
    record: JobRecord  # its record, which is not written yet
    job: GkeJob
    environment: JobEnvironment
    wheel_name: str  # the file name of the wheel; "": none is sent

    @classmethod
    def of(cls, options: argparse.Namespace, slices: int | None = None, attempts: int = 0) -> "GkeSpec":
        """Read the options."""
        kind = slice_of(options.tpu_type)
        if kind is None:
            raise ConfigError("--tpu_type is not given; backend gke needs it. Add it: --tpu_type v6e-8")
        if bool(options.reservation) != (options.capacity_type == "reserved"):
            raise ConfigError("--reservation NAME and --capacity_type reserved belong together: give both, or neither.")
        least, most = slice_counts(options)
        if least < most and not options.foreground:
            raise ConfigError(
                f"--slices {options.slices} with --no-foreground: the launcher must stay to start with fewer. Leave "
                "one of them out."
            )
        slices = slices or most
        record = new_record(options, options.name or name_from_date())
        notes = {"id": secrets.token_hex(8), "slices": slices, "attempts": attempts}
        record = dataclasses.replace(record, notes=notes)
        if not re.fullmatch(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", record.name):
            raise ConfigError(
                f"--name is {record.name!r}; it must begin with a lower-case letter, have at most 40 lower-case "
                "letters, digits and '-', and not end with '-': Kubernetes makes the pods' host names of it."
            )
        environment = job_environment(options, make_key=not options.dry_run)
        wheel_name = wheel_path(ROOT, version_of()).name if options.setup == "auto" else ""
        extras = f"[{options.extras}]" if options.extras else ""
        files = [SYNCED] if options.sync else []
        files += [PINS, wheel_name] if wheel_name else []
        files += filter_files() if environment.secret else {}
        required = options.require_process_count or kind.hosts * slices
        job = GkeJob(
            name=record.name,
            id=record.notes["id"],
            slice=kind,
            slices=slices,
            command=options.command,
            image=options.image,
            environment={**job_variables(required), **environment.public},
            secret_names=list(environment.secret),
            files=files,
            requirement=f"{FILES}/{wheel_name}{extras}" if wheel_name else "",
            retries=options.retries,
            spot=options.capacity_type == "spot",
            reservation=options.reservation,
            queue=options.queue,
            service_account=options.service_account,
            grace_s=options.grace_s,
            privileged=options.privileged,
        )
        return cls(options=options, record=record, job=job, environment=environment, wheel_name=wheel_name)

    def with_files(self) -> tuple[GkeJob, list[dict[str, Any]], str]:
        """The job with the number of its ConfigMaps, these, and the sizes of the files in words.

        The wheel is built where it is not there yet.
        """
        files, warning = self._files()
        archive = pack(files) if files else b""
        sizes = ", ".join(f"{name} {len(data):,}" for name, data in files.items())
        if len(archive) > MAX_PARTS * PART_BYTES:
            raise ConfigError(
                f"the job's files have {len(archive):,} bytes ({sizes}); its ConfigMaps may have "
                f"{MAX_PARTS * PART_BYTES:,}. Leave data out of --sync and read it from a bucket, or put all into an "
                "image: --image NAME --setup none."
            )
        maps = config_maps(self.job, archive)
        words = [warning, f"{len(maps)} ConfigMap(s) with {sizes} bytes" if maps else "", *self.environment.remarks]
        return dataclasses.replace(self.job, parts=len(maps)), maps, "\n".join(filter(None, words))

    def _files(self) -> tuple[dict[str, bytes], str]:
        """The files, as `GkeJob.files` names them, and what is to be said of those that were left out."""
        files: dict[str, bytes] = filter_files() if self.environment.secret else {}
        warning = ""
        if self.wheel_name:
            files[self.wheel_name] = build_wheel(ROOT, version_of()).read_bytes()
            files[PINS] = (ROOT / PINS).read_bytes()
        if self.options.sync:
            with tempfile.TemporaryDirectory(prefix="lockstep-sync-") as directory:
                archive = make_archive(self.options.sync, self.options.env_file, Path(directory) / SYNCED)
                files[SYNCED], warning = archive.path.read_bytes(), archive.warning()
        return files, warning


POLL_S: Final = 5.0  # seconds between two looks at the JobSet and its pods
SAY_S: Final = 60.0  # seconds between two lines that say which processes have not started
NAMED: Final = 8  # processes that such a line names
STUCK: Final = ("InvalidImageName", "CreateContainerConfigError")  # reasons of pods that will never start
PULLS: Final = ("ErrImagePull", "ImagePullBackOff")
PULL_S: Final = 300.0  # seconds for which Kubernetes may try to pull an image


class Gke:
    """JobSets: each pod is one process of the job, found by JAX from what GKE tells a pod of its slice."""

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        add_gke_options(parser)

    def run(self, options: argparse.Namespace) -> int:
        """Create the objects and, in the foreground, show the pods' logs until the JobSet has ended."""
        spec = GkeSpec.of(options)
        options = argparse.Namespace(**{**vars(options), "name": spec.record.name})
        Cluster(spec.record).make_room(find_earlier(spec.record))
        spec.record.make_directory()
        console = Console(log=spec.record.directory / "launcher.log")
        while True:
            cluster = _created(spec, console)
            if not options.foreground:
                console.say(f"lockstep launch status|logs|stop|delete {options.name}")
                return DONE
            try:
                return _follow(cluster, console, stop_on_signal=True)
            except _FewerSlicesError as fewer:
                cluster.delete()
                spec = GkeSpec.of(options, fewer.slices, fewer.attempts)

    def dry_run(self, options: argparse.Namespace) -> int:
        """Print the manifest and the commands that create the objects, ready to paste."""
        spec = GkeSpec.of(options)
        kubectl = Cluster(spec.record).kubectl
        job, _, remarks = spec.with_files()
        if spec.environment.secret:
            names = "".join(f"{name}\n" for name in spec.environment.secret)
            words = kubectl.argv("create", "secret", "generic", job.name, "--from-env-file=/dev/stdin")
            # A line with a name alone is the variable of kubectl's environment: no value is in a command line.
            print(f"# The Secret with {', '.join(spec.environment.secret)}, from the variables of your shell:")
            if options.env_file:
                path = shlex.quote(os.path.join(".", options.env_file))
                print(f"(set -a && . {path} && set +a && {shlex.join(words)}) {here_document(names)}")
            else:
                print(f"{shlex.join(words)} {here_document(names)}")
        for line in remarks.splitlines():
            print(f"# {line}")
        if job.parts:
            print(f"# The launcher makes the ConfigMaps of part-00 to part-{job.parts - 1:02}.")
        text = json.dumps(job_set(job), indent=2) + "\n"
        print(f"{shlex.join(kubectl.argv('create', '--filename=-'))} {here_document(text)}")
        return DONE

    def status(self, job: JobRecord) -> int:
        job_set, pods = Cluster(job).look()
        state = job_set.get("status", {}).get("terminalState")
        print(f"{job.name}: {state or ('Running' if job_set else 'there is no such JobSet any more')}")
        for pod in pods:
            print(f"  process {pod.process} ({pod.name}): {pod}")
        code = verdict(job_set, pods) if job_set else job.attempts[-1].code
        return code or DONE

    def logs(self, job: JobRecord, *, follow: bool) -> int:
        """Print what the pods have printed; where they are gone, what was followed before."""
        cluster = Cluster(job)
        job_set, pods = cluster.look()
        if follow and job_set and verdict(job_set, pods) is None:
            return _follow(cluster, Console(), stop_on_signal=False)
        with contextlib.closing(PodLogs(job, cluster.kubectl, Console(), to_the_end=False)) as logs:
            logs.show_kept({pod.attempt for pod in pods})
            for pod in pods:
                logs.follow(pod)
                logs.join()  # one after the other
        return DONE

    def stop(self, job: JobRecord) -> int:
        """Suspend the JobSet: its pods get SIGTERM, and SIGKILL after ``--grace_s``; what they print is kept."""
        cluster = Cluster(job)
        job_set, pods = cluster.look()
        if job_set and verdict(job_set, pods) is None:
            with contextlib.closing(PodLogs(job, cluster.kubectl, None)) as logs:
                for pod in pods:
                    logs.follow(pod)
                _end(cluster, Patience(Console()))
                logs.join()
        return DONE

    def delete(self, job: JobRecord) -> int:
        """Stop the job and delete its objects; the logs stay."""
        self.stop(job)
        Cluster(job).delete()
        dataclasses.replace(job, deleted=True).save()
        return DONE


class _FewerSlicesError(Exception):
    """A job has ended because it can go on with some of its slices alone."""

    def __init__(self, slices: int, attempts: int) -> None:
        super().__init__()
        self.slices, self.attempts = slices, attempts


def _created(spec: GkeSpec, console: Console) -> Cluster:
    """Create a job's objects, all of them or none."""
    job, maps, remarks = spec.with_files()
    console.say(f"job {job.name}: {job.slices} x {job.slice.name}, {job.pods} pods{remarks and chr(10)}{remarks}")
    record = spec.record.with_attempt(Attempt(number=1, id=job.name, started=time.time()))
    record.save()  # whoever starts a job of this name next knows what this one may have left
    cluster = Cluster(record)
    try:
        if spec.environment.secret:
            cluster.create(secret(job, spec.environment.secret))
        for config_map in maps:
            cluster.create(config_map)
        cluster.create(job_set(job))
    except BaseException as error:
        code = error.code if isinstance(error, LaunchError) else INTERRUPTED
        record = record.with_end(code)
        try:
            cluster.delete()
            dataclasses.replace(record, deleted=True).save()
        except LaunchError as left:
            record.save()
            console.say(f"not all objects of the job could be deleted: {left}")
        raise
    return cluster


def _end(cluster: Cluster, patience: Patience) -> None:
    """Suspend a JobSet, and wait until no pod runs."""
    patience.insist(cluster.suspend, POLL_S)
    while (looked := patience.look(cluster.look)) is None or any(pod.running for pod in looked[1]):
        time.sleep(min(POLL_S, 1.0))


class _Following(PlatformLoop):
    """A JobSet that is followed with the logs of its pods."""

    def __init__(self, cluster: Cluster, logs: PodLogs, console: Console, *, stop_on_signal: bool) -> None:
        super().__init__(console, "the pods", stop_on_signal=stop_on_signal)
        self._cluster, self._logs = cluster, logs
        self._shown = ""
        self._pulling: dict[str, float] = {}  # since when an image cannot be pulled, by the identity of the pod
        self._began_at = self._reported_at = self._complete_since = time.monotonic()

    def end(self, *, kill: bool) -> None:
        if kill:  # it waits for nothing
            self._cluster.kill()
            return
        for pod in self._cluster.look()[1]:  # one that has started since the last look says its last words too
            self._logs.follow(pod)
        self._cluster.suspend()

    def look(self) -> int | None:
        self.tell()
        if (looked := self.patience.look(self._cluster.look)) is None:
            return None
        job_set, pods = looked
        for pod in pods:
            self._logs.follow(pod)
        state = ", ".join(sorted({str(pod) for pod in pods})) or "waiting for pods"
        if state != self._shown:
            self.console.say(f"{self._cluster.job.name}: {state}")
            self._shown = state
        if self.stopped_by is None and verdict(job_set, ()) is None:
            self._report_missing(pods)
            self._check_slices(pods)
        else:
            self._complete_since = time.monotonic()
        stuck = self._stuck(pods)
        if self.stopped_by is not None and self.to_do is None and not any(pod.running for pod in pods):
            return 128 + self.stopped_by
        code = verdict(job_set, self._logs.seen) if job_set else WORKER_LOST
        if stuck and code is None and self.stopped_by is None:
            self.console.say(
                f"process {stuck[0].process} can never start. Mend it (--image), then start the job again."
            )
            self.patience.insist(self._cluster.kill, POLL_S)
            return SETUP_FAILED
        return code

    def _stuck(self, pods: Sequence[PodState]) -> list[PodState]:
        """The pods that can never start."""
        now = time.monotonic()
        self._pulling = {pod.uid: self._pulling.get(pod.uid, now) for pod in pods if pod.waits in PULLS}
        return [pod for pod in pods if pod.waits in STUCK or now - self._pulling.get(pod.uid, now) > PULL_S]

    def _report_missing(self, pods: Sequence[PodState]) -> None:
        """Name the processes that have not started, where there are some, once in a while."""
        now = time.monotonic()
        if now - self._reported_at < SAY_S:
            return
        self._reported_at = now
        installs = self._cluster.job.options["setup"] == "auto"
        missing = not_started(pods, self._cluster.count, self._logs.installed if installs else None)
        if missing:
            more = f" and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
            self.console.say(
                f"{self._cluster.job.name}: {len(missing)} of {self._cluster.count} processes have not started after "
                f"{now - self._began_at:.0f} s: {', '.join(missing[:NAMED])}{more}"
            )

    def _check_slices(self, pods: Sequence[PodState]) -> None:
        """End the job to go on with fewer slices, where the others have not come for long enough."""
        usable = self._cluster.fewer(pods)
        waited = time.monotonic() - self._complete_since
        if usable is None:
            self._complete_since = time.monotonic()
        elif waited >= self._cluster.job.options["slices_wait_s"]:
            self.console.say(
                f"going on with {usable} of {self._cluster.slices} slices: the pods of the others have not started in "
                f"{waited:.0f} s"
            )
            _end(self._cluster, self.patience)
            self._logs.join()
            raise _FewerSlicesError(usable, max(pod.attempt for pod in pods))


def _follow(cluster: Cluster, console: Console, *, stop_on_signal: bool) -> int:
    """Show logs and states until the JobSet has ended; return its code."""
    with contextlib.closing(PodLogs(cluster.job, cluster.kubectl, console)) as logs:
        code, ended = _Following(cluster, logs, console, stop_on_signal=stop_on_signal).run(POLL_S)
        if not ended:
            return code
        logs.join()
        job = cluster.job
        if code and (first := logs.first_failure()) is not None:
            console.say(f"process {first.process} failed first; its log is {job.log(first.attempt, first.process)}")
        job.with_end(code).save()
        if code:
            console.say(f"failed: {describe_code(code)}")
        console.say(f"its objects stay until: lockstep launch delete {job.name}")
        return code
