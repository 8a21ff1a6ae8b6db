"""The backend ``gke``: a JobSet on a cluster of Google Kubernetes Engine whose node pools have TPU slices."""

import argparse
import dataclasses
import json
import os
import shlex
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from lockstep.exits import DONE, INTERRUPTED, REFUSED, SETUP_FAILED, WORKER_LOST, describe_code
from lockstep.launch.backend import LaunchError, Patience
from lockstep.launch.console import Console
from lockstep.launch.environment import here_document
from lockstep.launch.gke_manifest import JOB_ID, job_set, secret
from lockstep.launch.gke_spec import GkeSpec, add_gke_options
from lockstep.launch.kubectl import Kubectl, PodLogs, PodState, not_started, pod_states, verdict
from lockstep.launch.processes import signals_to
from lockstep.launch.record import Attempt, JobRecord, find_record
from lockstep.launch.slices import slice_of

POLL_S: Final = 5.0
"""Seconds between two looks at the JobSet and its pods."""
SAY_S: Final = 60.0
"""Seconds between two lines that say which processes have not started."""
NAMED: Final = 8
"""Processes that such a line names."""
STUCK: Final = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "CreateContainerConfigError")
"""The reasons of pods that wait and will never start."""


class Gke:
    """JobSets: each pod is one process of the job, found by JAX from what GKE tells a pod of its slice."""

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Add what a JobSet is made of."""
        add_gke_options(parser)

    def run(self, options: argparse.Namespace) -> int:
        """Create the objects and, in the foreground, show the pods' logs until the JobSet has ended."""
        spec = GkeSpec.of(options)
        record, cluster = spec.record, Cluster(spec.record)
        cluster.make_room(find_record(record.name))
        job, maps, said = spec.with_files()
        record.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        console = Console(log=record.directory / "launcher.log")
        console.say(f"job {job.name}: {job.slices} x {job.slice.name}, {job.pods} pods{said and chr(10)}{said}")
        record = record.with_attempt(Attempt(number=1, id=job.name, started=time.time()))
        record.save()  # whoever starts a job of this name next knows what this one may have left
        try:
            if spec.environment.secret:
                cluster.create(secret(job, spec.environment.secret))
            for each in maps:
                cluster.create(each)
            cluster.create(job_set(job))
        except BaseException as error:
            code = error.code if isinstance(error, LaunchError) else INTERRUPTED
            record = record.with_attempt(dataclasses.replace(record.attempts[-1], ended=time.time(), code=code))
            try:
                cluster.delete()
                dataclasses.replace(record, deleted=True).save()
            except LaunchError as left:
                record.save()
                console.say(f"not all objects of the job could be deleted: {left}")
            raise
        if not options.foreground:
            console.say(f"lockstep launch status|logs|stop|delete {record.name}")
            return DONE
        return _follow(Cluster(record), console, stop_on_signal=True)

    def dry_run(self, options: argparse.Namespace) -> int:
        """Print the manifest and the commands that create the objects, ready to paste."""
        spec = GkeSpec.of(options)
        kubectl = Cluster(spec.record).kubectl
        job, _, said = spec.with_files()
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
        for line in said.splitlines():
            print(f"# {line}")
        if job.parts:
            print(f"# The launcher makes the ConfigMaps of part-00 to part-{job.parts - 1:02}.")
        text = json.dumps(job_set(job), indent=2) + "\n"
        print(f"{shlex.join(kubectl.argv('create', '--filename=-'))} {here_document(text)}")
        return DONE

    def status(self, job: JobRecord) -> int:
        """Print the JobSet's state, and each pod's."""
        found, pods = Cluster(job).look()
        state = found.get("status", {}).get("terminalState")
        print(f"{job.name}: {state or ('Running' if found else 'there is no such JobSet any more')}")
        for pod in pods:
            print(f"  process {pod.process} ({pod.name}): {pod}")
        code = verdict(found, pods) if found else job.attempts[-1].code
        return code or DONE

    def logs(self, job: JobRecord, *, follow: bool) -> int:
        """Print what the pods have printed; where they are gone, what was followed before."""
        cluster = Cluster(job)
        found, pods = cluster.look()
        if follow and found and verdict(found, pods) is None:
            return _follow(cluster, Console(), stop_on_signal=False)
        logs = PodLogs(job, cluster.kubectl, Console())
        logs.show_kept({pod.attempt for pod in pods})
        for pod in pods:
            logs.follow(pod)
            logs.join()  # one after the other
        return DONE

    def stop(self, job: JobRecord) -> int:
        """Suspend the JobSet: its pods get SIGTERM, and SIGKILL after ``--grace_s``; what they print is kept."""
        cluster = Cluster(job)
        found, pods = cluster.look()
        if found and verdict(found, pods) is None:
            logs = PodLogs(job, cluster.kubectl, None)
            for pod in pods:
                logs.follow(pod)
            cluster.suspend()
            while any(pod.running for pod in cluster.look()[1]):
                time.sleep(min(POLL_S, 1.0))
            logs.join()
        return DONE

    def delete(self, job: JobRecord) -> int:
        """Stop the job and delete its objects; the logs stay."""
        self.stop(job)
        Cluster(job).delete()
        dataclasses.replace(job, deleted=True).save()
        return DONE


class Cluster:
    """A job's objects on its cluster.

    Attributes:
        count: The number of its processes.
    """

    def __init__(self, job: JobRecord) -> None:
        self.job = job
        self.kubectl = Kubectl(context=job.options["context"], namespace=job.options["namespace"])
        self._id = job.notes.get("id", "")
        self._selector = f"--selector={JOB_ID}={self._id}"
        kind = slice_of(job.options["tpu_type"])
        assert kind is not None, "a job has a slice"
        self._hosts = kind.hosts
        self.count = kind.hosts * int(job.options["slices"])

    def look(self) -> tuple[dict[str, Any], list[PodState]]:
        """The JobSet, empty where it is gone, and its pods."""
        found = self.kubectl.get("jobset", self.job.name)
        pods = self.kubectl.get("pods", self._selector)
        return found if self._id in _ids(found) else {}, pod_states(pods, self._hosts)

    def create(self, manifest: dict[str, Any]) -> None:
        """Create an object that is not there yet; it goes through standard input."""
        self.kubectl.run("create", "--filename=-", manifest=manifest)

    def make_room(self, before: JobRecord | None) -> None:
        """Refuse a name that a JobSet has, and delete what else an earlier job of this launcher has left.

        Args:
            before: The last job of this name that this machine has started; None: there was none.

        Raises:
            LaunchError: A JobSet has it.
        """
        known = None if before is None else before.notes.get("id")
        if found := self.kubectl.get("jobset", self.job.name):
            ours = known in _ids(found)
            way = f"lockstep launch delete {self.job.name}" if ours else f"kubectl delete jobset {self.job.name}"
            raise LaunchError(
                f"there is a JobSet {self.job.name} already. Give another --name, or delete it: {way}",
                REFUSED,
            )
        if before is not None and known:
            Cluster(before).delete()

    def suspend(self) -> None:
        """Have the pods deleted in order; the JobSet stays."""
        patch = '{"spec": {"suspend": true}}'
        self.kubectl.run("patch", "jobset", self.job.name, "--type=merge", f"--patch={patch}")

    def kill(self) -> None:
        """Have the pods deleted at once; the JobSet stays."""
        self.suspend()
        self.kubectl.run("delete", "pods", self._selector, "--grace-period=0", "--force", "--wait=false")

    def delete(self) -> None:
        """Delete all objects of the job that there are, and none of another of its name.

        Raises:
            LaunchError: Some could not be deleted; the others are.
        """
        failed = []
        for kind in ("jobset", "secret", "configmap"):
            try:
                self.kubectl.run("delete", kind, self._selector, "--ignore-not-found")
            except LaunchError as error:
                failed.append(error)
        if failed:
            raise failed[0]


def _ids(found: Mapping[str, Any]) -> tuple[str, ...]:
    """The id of the job that an object is of; none where it is no job's, or not there."""
    labels = found.get("metadata", {}).get("labels", {})
    return (labels[JOB_ID],) if JOB_ID in labels else ()


def _say_who_is_missing(
    cluster: Cluster, pods: Sequence[PodState], logs: PodLogs, console: Console, waited_s: float
) -> None:
    """Name the processes that have not started, where there are some."""
    installs = cluster.job.options["setup"] == "auto"
    missing = not_started(pods, cluster.count, logs.installed if installs else None)
    if missing:
        more = f" and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
        console.say(
            f"{cluster.job.name}: {len(missing)} of {cluster.count} processes have not started after {waited_s:.0f} s: "
            f"{', '.join(missing[:NAMED])}{more}"
        )


def _follow(cluster: Cluster, console: Console, *, stop_on_signal: bool) -> int:
    """Show logs and states until the JobSet has ended; return its code."""
    logs, shown = PodLogs(cluster.job, cluster.kubectl, console), ""
    received: list[int] = []
    stopped_by: int | None = None
    wake, patience = threading.Event(), Patience(console)
    begun = said = time.monotonic()

    def receive(number: int) -> None:
        received.append(number)
        wake.set()

    with signals_to(receive):
        while True:
            if received:
                number = received.pop(0)
                if not stop_on_signal:
                    return 128 + number
                console.say(f"{signal.Signals(number).name}, {'killing' if stopped_by else 'ending'} the pods")
                # One that has started since the last look says its last words too; a second signal waits for nothing.
                for pod in (patience.look(cluster.look) or ({}, []))[1] if stopped_by is None else ():
                    logs.follow(pod)
                cluster.kill() if stopped_by else cluster.suspend()
                stopped_by = stopped_by or number
            looked = patience.look(cluster.look)
            if looked is None:
                wake.wait(POLL_S)
                wake.clear()
                continue
            found, pods = looked
            for pod in pods:
                logs.follow(pod)
            state = ", ".join(sorted({str(pod) for pod in pods})) or "waiting for pods"
            if state != shown:
                console.say(f"{cluster.job.name}: {state}")
                shown = state
            if stopped_by is None and verdict(found, ()) is None and time.monotonic() - said >= SAY_S:
                said = time.monotonic()
                _say_who_is_missing(cluster, pods, logs, console, said - begun)
            stuck = [pod for pod in pods if pod.waits in STUCK]
            code = verdict(found, logs.seen) if found else WORKER_LOST
            if stopped_by is not None and not any(pod.running for pod in pods):
                code = 128 + stopped_by
            elif stuck and code is None and stopped_by is None:
                console.say(f"process {stuck[0].process} can never start. Mend it (--image), then start the job again.")
                cluster.kill()
                code = SETUP_FAILED
            if code is not None:
                break
            wake.wait(POLL_S)
            wake.clear()
    logs.join()
    if code and (first := logs.first_failure()) is not None:
        console.say(f"process {first.process} failed first; its log is {cluster.job.log(first.attempt, first.process)}")
    job = cluster.job
    job.with_attempt(dataclasses.replace(job.attempts[-1], ended=time.time(), code=code)).save()
    if code:
        console.say(f"failed: {describe_code(code)}")
    console.say(f"its objects stay until: lockstep launch delete {job.name}")
    return code
