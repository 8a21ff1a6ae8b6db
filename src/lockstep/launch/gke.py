"""The backend ``gke``: a JobSet on a cluster of Google Kubernetes Engine whose node pools have TPU slices."""

import argparse
import dataclasses
import json
import shlex
import signal
import threading
import time
from typing import Any, Final

from lockstep.exit_codes import DONE, REFUSED, SETUP_FAILED, WORKER_LOST, describe_code
from lockstep.launch.backend import LaunchError
from lockstep.launch.console import Console
from lockstep.launch.gke_manifest import config_map, job_set, secret
from lockstep.launch.gke_plan import GkePlan, add_gke_options
from lockstep.launch.gke_pods import PodLogs, PodState, pod_states, verdict
from lockstep.launch.google import slice_of
from lockstep.launch.kubectl import Kubectl
from lockstep.launch.patience import Patience
from lockstep.launch.processes import signals_to
from lockstep.launch.record import Attempt, JobRecord, find_record

POLL_S: Final = 5.0
"""Seconds between two looks at the JobSet and its pods."""
STUCK: Final = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "CreateContainerConfigError")
"""Why a pod waits that will never start."""


class Gke:
    """JobSets: each pod is one process of the job, found by JAX from what GKE tells a pod of its slice."""

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Add what a JobSet is made of."""
        add_gke_options(parser)

    def run(self, options: argparse.Namespace) -> int:
        """Create the objects and, in the foreground, show the pods' logs until the JobSet has ended."""
        plan = GkePlan.of(options)
        job, record, cluster = plan.job, plan.record, Cluster(plan.record)
        cluster.refuse_taken_name()
        files = plan.files()
        record.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        console = Console(log=record.directory / "launcher.log")
        console.say(f"job {job.name}: {job.slices} x {job.slice.name}, {job.pods} pods")
        try:
            if plan.environment.secret:
                cluster.create(secret(job, plan.environment.secret))
            if files:
                cluster.create(config_map(job, files))
            cluster.create(job_set(job))
        except LaunchError:
            cluster.delete()
            raise
        record = record.with_attempt(Attempt(number=1, id=job.name, started=time.time()))
        record.save()
        if not options.foreground:
            console.say(f"lockstep launch status|logs|stop|delete {record.name}")
            return DONE
        return _follow(Cluster(record), console, stop_on_signal=True)

    def dry_run(self, options: argparse.Namespace) -> int:
        """Print the manifest and the commands that create the objects, ready to paste."""
        plan = GkePlan.of(options)
        job, kubectl = plan.job, Cluster(plan.record).kubectl
        if plan.environment.secret:
            given = [f"--from-env-file={shlex.quote(str(options.env_file))}"] if options.env_file else []
            given += [
                f'--from-literal={name}="${name}"' for name in plan.environment.secret if name in dict(options.env)
            ]
            print(f"# The Secret with {', '.join(plan.environment.secret)}:")
            print(shlex.join(kubectl.argv("create", "secret", "generic", job.name)), *given)
        if job.files:
            print(f"# The launcher makes the ConfigMap {job.name} with {', '.join(job.files)}.")
        print(f"{shlex.join(kubectl.argv('create', '--filename=-'))} << 'END_OF_FILE'")
        print(f"{json.dumps(job_set(job), indent=2)}\nEND_OF_FILE")
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

    Args:
        job: The job.
    """

    def __init__(self, job: JobRecord) -> None:
        self.job = job
        self.kubectl = Kubectl(context=job.options["context"], namespace=job.options["namespace"])
        kind = slice_of(job.options["tpu_type"])
        assert kind is not None, "a job has a slice"
        self._hosts = kind.hosts

    def look(self) -> tuple[dict[str, Any], list[PodState]]:
        """What there is of the JobSet, nothing where it is gone, and its pods."""
        found = self.kubectl.get("jobset", self.job.name)
        pods = self.kubectl.get("pods", f"--selector=jobset.sigs.k8s.io/jobset-name={self.job.name}")
        return found, pod_states(pods, self._hosts)

    def create(self, manifest: dict[str, Any]) -> None:
        """Create an object, or replace what an earlier job of this name has left; it goes through standard input."""
        self.kubectl.run("apply", "--server-side", "--force-conflicts", "--filename=-", manifest=manifest)

    def refuse_taken_name(self) -> None:
        """Refuse a name that a JobSet has.

        Raises:
            LaunchError: One has it.
        """
        if self.kubectl.get("jobset", self.job.name):
            ours = find_record(self.job.name) is not None
            way = f"lockstep launch delete {self.job.name}" if ours else f"kubectl delete jobset {self.job.name}"
            raise LaunchError(
                f"there is a JobSet {self.job.name} already. Give another --name, or delete it: {way}",
                REFUSED,
            )

    def suspend(self) -> None:
        """Have the pods deleted in order; the JobSet stays."""
        patch = '{"spec": {"suspend": true}}'
        self.kubectl.run("patch", "jobset", self.job.name, "--type=merge", f"--patch={patch}")

    def kill(self) -> None:
        """Have the pods deleted at once; the JobSet stays."""
        self.suspend()
        selector = f"--selector=jobset.sigs.k8s.io/jobset-name={self.job.name}"
        self.kubectl.run("delete", "pods", selector, "--grace-period=0", "--force", "--wait=false")

    def delete(self) -> None:
        """Delete all objects of the job that there are."""
        for kind in ("jobset", "secret", "configmap"):
            self.kubectl.run("delete", kind, self.job.name, "--ignore-not-found")


def _follow(cluster: Cluster, console: Console, *, stop_on_signal: bool) -> int:
    """Show logs and states until the JobSet has ended; return its code."""
    logs, shown = PodLogs(cluster.job, cluster.kubectl, console), ""
    received: list[int] = []
    stopped_by: int | None = None
    wake, patience = threading.Event(), Patience(console)

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
