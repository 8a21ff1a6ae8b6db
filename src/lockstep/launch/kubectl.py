"""kubectl, the logs of pods, and a job's objects on its cluster."""

import collections
import dataclasses
import fcntl
import json
import os
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final, Self

from lockstep.exits import NOT_FOUND, REFUSED, UNREACHABLE
from lockstep.files import private
from lockstep.json_text import parse_json
from lockstep.launch.backend import Console, LaunchError
from lockstep.launch.failure import failed_by_their_logs
from lockstep.launch.gke_manifest import CONTAINER, INSTALLED, JOB_ID
from lockstep.launch.options import slice_counts
from lockstep.launch.pods import STOPPED, PodState, first_failure, pod_states
from lockstep.launch.record import JobRecord, kept_logs
from lockstep.launch.slices import slice_of
from lockstep.launch.tool import Cause, Tool

STOP: Final = "lockstep/stopped"
QUEUED: Final = "kueue.x-k8s.io/job-uid"  # a label of Kueue's Workload: the uid of what it queues
CALL_S: Final = 120.0  # seconds that a call may take that does not follow anything

CAUSES: Final = tuple(
    Cause(pattern=pattern, summary="kubectl {verb} was refused", advice=advice, code=code)
    for pattern, code, advice in (
        ("executable gke-gcloud-auth-plugin not found", REFUSED,
         "Install GKE's plugin: gcloud components install gke-gcloud-auth-plugin"),
        ("no matches for kind \"JobSet\"", REFUSED,
         "The cluster has no JobSet: see https://jobset.sigs.k8s.io/docs/installation/"),
        ("no configuration has been provided", REFUSED,
         "kubectl knows no cluster: gcloud container clusters get-credentials CLUSTER --location ZONE"),
        ("context was not found", REFUSED, "kubectl config get-contexts lists what there is for --context"),
        ("namespaces", REFUSED, "Make it: kubectl create namespace NAME, or give another --namespace"),
        (r"\(AlreadyExists\)", REFUSED,
         "It is not of this job, so it stays as it is. Give another --name, or delete it where nothing needs it"),
        ("exceeded quota", REFUSED, "The namespace's quota does not allow it: kubectl describe quota"),
        ("orbidden", REFUSED, "Your account may not do this: ask for the role Kubernetes Engine Developer"),
        ("Unauthorized", REFUSED, "The login has expired: gcloud auth login"),
        ("is invalid", REFUSED, "The cluster's JobSet is older than this needs (0.6): upgrade it"),
        (r"Unable to connect to the server|[Cc]onnection (refused|reset|lost)|did not answer|unexpected EOF|i/o timeout"
         r"|\((ServiceUnavailable|Timeout|ServerTimeout|InternalError|TooManyRequests)\)|etcdserver: "
         r"|The connection to the server .* was refused|TLS handshake timeout", UNREACHABLE,
         "Is the cluster there, and do you reach its network? "
         "Its control plane is away for minutes while it is upgraded"),
    )
)  # fmt: skip
TOOL: Final = Tool(
    missing=Cause(
        summary="kubectl was not found",
        advice="Install it: gcloud components install kubectl; then gcloud container clusters get-credentials CLUSTER "
        "--location ZONE",
        code=NOT_FOUND,
    ),
    causes=CAUSES,
    unknown=Cause(summary="kubectl {verb} failed", advice="Run the command by hand to see more"),
    limit_s=CALL_S,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kubectl:
    """kubectl for one namespace."""

    context: str = ""  # the context of the user's configuration; "": the current one
    namespace: str = ""  # the namespace; "": the context's

    def argv(self, *words: str) -> list[str]:
        options = {"context": self.context, "namespace": self.namespace}
        return ["kubectl", *(f"--{name}={value}" for name, value in options.items() if value), *words]

    def run(self, *words: str, manifest: Mapping[str, Any] | None = None) -> str:
        """Run a command, with an object as its standard input, and return what it prints."""
        stdin = "" if manifest is None else json.dumps(manifest)
        return TOOL.run(self.argv(*words), {"verb": words[0]}, stdin=stdin)

    def get(self, *words: str) -> dict[str, Any]:
        """Objects as ``kubectl get`` prints them; without items or fields where there are none."""
        text = self.run("get", *words, "--ignore-not-found", "--output=json")
        if not text.strip():
            return {}
        return parse_json(text, "what kubectl prints", dict, "Run it by hand: what prints beside it?", LaunchError)


RECONNECT_S = 2.0  # seconds between two connections to the same log


class KeptLog:
    """The log of a process in the job's directory and, in a file beside it, the time of its last line.

    The first who opens it writes both; others read them, and show what follows.

    Attributes:
        text: What was printed before.
        last: The time of its last line, as Kubernetes writes times; empty: there is none.
    """

    def __init__(self, path: Path) -> None:
        self._log = private(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._time = private(path.with_suffix(".time"), os.O_RDWR | os.O_CREAT)
        self._writes = True
        try:
            fcntl.flock(self._time, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._writes = False
        self.last, before = self._newest(), None
        while before != self.last:  # another process is writing
            before, self.text, self.last = self.last, path.read_bytes(), self._newest()
        if self._writes and not self.last:
            os.ftruncate(self._log, 0)  # nobody knows when a line of it was printed, and the cluster has it
            self.text = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._log)
        os.close(self._time)

    def write(self, line: bytes, when: str) -> None:
        self.last = when
        if self._writes:
            os.write(self._log, line + b"\n")
            os.pwrite(self._time, when.encode().ljust(_TIME_BYTES), 0)

    def _newest(self) -> str:
        return os.pread(self._time, _TIME_BYTES, 0).decode().strip()


_TIME_BYTES = 40  # more than a time with nanoseconds and an offset has


class PodLogs:
    """Follows the logs of pods, each over a connection of its own, and keeps them in the job's directory.

    Attributes:
        installed: The identities of the pods that have installed what they need.
    """

    def __init__(self, job: JobRecord, kubectl: Kubectl, console: Console | None, *, to_the_end: bool = True) -> None:
        self._job = job
        self._kubectl = kubectl
        self._console = console
        self._words = ["--follow"] if to_the_end else []  # without it a log ends with what has been printed
        self._threads: dict[str, threading.Thread] = {}
        self._children: set[subprocess.Popen[bytes]] = set()
        self._closed = threading.Event()
        self._seen: dict[str, PodState] = {}
        self.installed: set[str] = set()

    @property
    def seen(self) -> list[PodState]:
        """The last state of every pod that `follow` was given."""
        return list(self._seen.values())

    def follow(self, pod: PodState) -> None:
        """Show a pod's log from its beginning, in a thread, once there is one."""
        self._seen[pod.uid] = pod
        if pod.started and pod.uid not in self._threads:
            thread = threading.Thread(target=self._run, args=(pod,), daemon=True)
            self._threads[pod.uid] = thread
            thread.start()

    def join(self) -> None:
        """Wait until all logs have come to their ends, for half a minute at most."""
        end = time.monotonic() + 30.0
        for thread in self._threads.values():
            thread.join(max(0.0, end - time.monotonic()))

    def close(self) -> None:
        """End the connections that are left."""
        self._closed.set()
        for child in tuple(self._children):
            child.kill()

    def first_failure(self) -> PodState | None:
        last = max((pod.attempt for pod in self.seen), default=0)
        return first_failure(self.seen, failed_by_their_logs(kept_logs(self._job.directory, last)))

    def show_kept(self, present: set[int]) -> None:
        """Show the kept logs of attempts whose pods are gone."""
        for attempt, process, path in kept_logs(self._job.directory):
            if attempt not in present and self._console is not None:
                for line in path.read_bytes().splitlines():
                    self._console.line(process, line)

    def _run(self, pod: PodState) -> None:
        with KeptLog(self._job.log(pod.attempt, pod.process)) as kept:
            for text in kept.text.splitlines():
                self._show(pod, text)
            while True:
                since = [f"--since-time={kept.last}"] if kept.last else []
                words = ("logs", *self._words, "--timestamps", f"--container={CONTAINER}", *since, f"pod/{pod.name}")
                child = subprocess.Popen(
                    self._kubectl.argv(*words),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,  # as all that kubectl does
                )
                self._children.add(child)
                assert child.stdout is not None
                self._copy(child.stdout, kept, pod)
                self._children.remove(child)
                if child.wait() == 0 or not self._seen[pod.uid].running or self._closed.wait(RECONNECT_S):
                    return

    def _copy(self, lines: IO[bytes], kept: KeptLog, pod: PodState) -> None:
        """Show and keep the lines that are newer than the last one that is kept."""
        for line in lines:
            when, _, text = line.rstrip(b"\n").partition(b" ")
            if when.decode() > kept.last:  # else from before the connection broke
                kept.write(text, when.decode())
                self._show(pod, text)

    def _show(self, pod: PodState, text: bytes) -> None:
        if text == INSTALLED.encode():
            self.installed.add(pod.uid)
        if self._console is not None:
            self._console.line(pod.process, text)


class Cluster:
    """A job's objects on its cluster."""

    def __init__(self, job: JobRecord) -> None:
        self.job = job
        self.kubectl = Kubectl(context=job.options["context"], namespace=job.options["namespace"])
        self._id = job.notes.get("id", "")
        self._selector = f"--selector={JOB_ID}={self._id}"
        kind = slice_of(job.options["tpu_type"])
        assert kind is not None, "a job has a slice"
        self._hosts = kind.hosts
        self.slices = int(job.notes.get("slices") or job.options["slices"])
        self.count = kind.hosts * self.slices

    def look(self) -> tuple[dict[str, Any], list[PodState]]:
        """The JobSet, empty where it is gone, and its pods."""
        job_set = self.kubectl.get("jobset", self.job.name)
        pods = self.kubectl.get("pods", self._selector)
        states = pod_states(pods, self._hosts, self.job.notes.get("attempts", 0))
        if self._id not in _ids(job_set):
            return {}, states
        stopped = job_set["spec"].get("suspend") and STOP in job_set["metadata"].get("annotations", {})
        if stopped and not any(pod.running for pod in states):
            job_set["status"] = {"terminalState": STOPPED, **job_set.get("status", {})}
        return job_set, states

    def fewer(self, pods: Sequence[PodState]) -> int | None:
        """The slices of the last attempt all pods of which have started, where they are enough and not all."""
        last = max((pod.attempt for pod in pods), default=1)
        started = collections.Counter(pod.process // self._hosts for pod in pods if pod.attempt == last and pod.started)
        count, least = list(started.values()).count(self._hosts), slice_counts(self.job.namespace())[0]
        return count if least <= count < self.slices else None

    def create(self, manifest: dict[str, Any]) -> None:
        """Create an object that is not there yet; it goes through standard input."""
        self.kubectl.run("create", "--filename=-", manifest=manifest)

    def make_room(self, before: JobRecord | None) -> None:
        """Refuse a name that a JobSet has, and delete what else an earlier job of this launcher has left.

        Args:
            before: The last job of this name that this machine has started; None: there was none.
        """
        known = None if before is None else before.notes.get("id")
        if job_set := self.kubectl.get("jobset", self.job.name):
            is_ours = known in _ids(job_set)
            way = f"lockstep launch delete {self.job.name}" if is_ours else f"kubectl delete jobset {self.job.name}"
            raise LaunchError(
                f"there is a JobSet {self.job.name} already. Give another --name, or delete it: {way}", REFUSED
            )
        if before is not None and known:
            earlier = Cluster(before)
            if earlier.look()[0]:
                raise LaunchError(
                    f"there is a JobSet {self.job.name} of this launcher elsewhere (--context "
                    f"{earlier.kubectl.context!r}, --namespace {earlier.kubectl.namespace!r}). Give another --name, or "
                    f"delete it: lockstep launch delete {self.job.name}",
                    REFUSED,
                )
            earlier.delete()

    def suspend(self) -> None:
        """Have the pods deleted in order; the JobSet stays."""
        try:
            if self.job.options["queue"]:
                self._deactivate()
        finally:  # also where the account may not change what is Kueue's
            patch = json.dumps({"metadata": {"annotations": {STOP: "true"}}, "spec": {"suspend": True}})
            self.kubectl.run("patch", "jobset", self.job.name, "--type=merge", f"--patch={patch}")

    def _deactivate(self) -> None:
        """Take the job from Kueue, which would start a JobSet that somebody else suspends again."""
        uid = self.kubectl.get("jobset", self.job.name).get("metadata", {}).get("uid")
        kind, patch = "workloads.kueue.x-k8s.io", json.dumps({"spec": {"active": False}})
        for workload in self.kubectl.get(kind, f"--selector={QUEUED}={uid}").get("items", ()) if uid else ():
            self.kubectl.run("patch", kind, workload["metadata"]["name"], "--type=merge", f"--patch={patch}")

    def kill(self) -> None:
        """Have the pods deleted at once; the JobSet stays."""
        self.suspend()
        self.kubectl.run("delete", "pods", self._selector, "--grace-period=0", "--force", "--wait=false")

    def delete(self) -> None:
        """Delete all objects of the job that there are, and none of another of its name."""
        failed = []
        for kind in ("jobset", "secret", "configmap"):
            try:
                self.kubectl.run("delete", kind, self._selector, "--ignore-not-found")
            except LaunchError as error:
                failed.append(error)
        if failed:
            raise failed[0]


def _ids(described: Mapping[str, Any]) -> tuple[str, ...]:
    """The id of the job that an object is of; none where it is no job's, or not there."""
    labels = described.get("metadata", {}).get("labels", {})
    return (labels[JOB_ID],) if JOB_ID in labels else ()
