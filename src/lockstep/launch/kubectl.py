"""kubectl, the pods of a job as it shows them, and the job's objects on its cluster."""

import collections
import dataclasses
import json
import shutil
import subprocess
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import IO, Any, Final

from lockstep.exits import (
    DONE,
    FAULT,
    NOT_FOUND,
    PEER_FAILED,
    REFUSED,
    TERMINATED,
    UNREACHABLE,
    WORKER_LOST,
    describe_code,
)
from lockstep.json_text import parse_json
from lockstep.launch.backend import Console, LaunchError
from lockstep.launch.gke_manifest import CONTAINER, INSTALLED, JOB_ID
from lockstep.launch.options import slice_counts
from lockstep.launch.processes import failed_by_their_logs
from lockstep.launch.record import JobRecord
from lockstep.launch.slices import slice_of

STOPPED: Final = "Stopped"
"""The state of a JobSet that the launcher has suspended, once no pod runs. Its annotation tells it from one that Kueue
suspends until there is room."""
STOP: Final = "lockstep/stopped"
CALL_S: Final = 120.0  # seconds that a call may take that does not follow anything

CAUSES: Final = (
    ("executable gke-gcloud-auth-plugin not found", REFUSED,
     "Install GKE's plugin: gcloud components install gke-gcloud-auth-plugin."),
    ("no matches for kind \"JobSet\"", REFUSED,
     "The cluster has no JobSet: see https://jobset.sigs.k8s.io/docs/installation/."),
    ("no configuration has been provided", REFUSED,
     "kubectl knows no cluster: gcloud container clusters get-credentials CLUSTER --location ZONE."),
    ("context was not found", REFUSED, "kubectl config get-contexts lists what there is for --context."),
    ("namespaces", REFUSED, "Make it: kubectl create namespace NAME, or give another --namespace."),
    ("(AlreadyExists)", REFUSED,
     "It is not of this job, so it stays as it is. Give another --name, or delete it where nothing needs it."),
    ("exceeded quota", REFUSED, "The namespace's quota does not allow it: kubectl describe quota."),
    ("orbidden", REFUSED, "Your account may not do this: ask for the role Kubernetes Engine Developer."),
    ("Unauthorized", REFUSED, "The login has expired: gcloud auth login."),
    ("is invalid", REFUSED, "The cluster's JobSet is older than this needs (0.6): upgrade it."),
    ("Unable to connect to the server", UNREACHABLE, "Is the cluster there, and do you reach its network?"),
    ("connection refused", UNREACHABLE, "Is the cluster there, and do you reach its network?"),
)  # fmt: skip
"""A part of kubectl's text, the launcher's exit code, and what to try."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kubectl:
    """kubectl for one namespace."""

    context: str = ""  # the context of the user's configuration; "": the current one
    namespace: str = ""  # the namespace; "": the context's

    def argv(self, *words: str) -> list[str]:
        given = {"context": self.context, "namespace": self.namespace}
        return ["kubectl", *(f"--{name}={value}" for name, value in given.items() if value), *words]

    def run(self, *words: str, manifest: Mapping[str, Any] | None = None) -> str:
        if shutil.which("kubectl") is None:
            raise LaunchError(
                "kubectl was not found. Install it: gcloud components install kubectl; then "
                "gcloud container clusters get-credentials CLUSTER --location ZONE.",
                NOT_FOUND,
            )
        text = None if manifest is None else json.dumps(manifest)
        try:
            done = subprocess.run(
                self.argv(*words), input=text, capture_output=True, text=True, timeout=CALL_S, check=False
            )
        except subprocess.TimeoutExpired:
            raise LaunchError(
                f"kubectl {words[0]} did not answer within {CALL_S:g} s. Is the cluster there?", UNREACHABLE
            ) from None
        if done.returncode:
            raise _explained(words, done.stderr)
        return done.stdout

    def get(self, *words: str) -> dict[str, Any]:
        """Objects as ``kubectl get`` prints them; without items or fields where there are none."""
        text = self.run("get", *words, "--ignore-not-found", "--output=json")
        if not text.strip():
            return {}
        return parse_json(text, "what kubectl prints", dict, "Run it by hand: what prints beside it?", LaunchError)


def _explained(words: Sequence[str], said: str) -> LaunchError:
    text = said.strip() or "it gave no reason"
    for part, code, advice in CAUSES:
        if part in said:
            return LaunchError(f"kubectl {words[0]} was refused: {text}\n{advice}", code)
    return LaunchError(f"kubectl {words[0]} failed: {text}", REFUSED)


RECONNECT_S = 2.0  # seconds between two connections to the same log
IN_CONSEQUENCE = (PEER_FAILED, TERMINATED)  # codes of pods that another one has ended


@dataclasses.dataclass(frozen=True, kw_only=True)
class PodState:
    """The state of a pod, as Kubernetes tells it."""

    name: str
    uid: str  # its identity: a pod that is made again has another
    process: int  # number of its process in the job
    attempt: int  # number of the attempt, from 1
    phase: str  # `Pending`, `Running`, `Succeeded` or `Failed`
    waits: str = ""  # why it does not run yet, in Kubernetes' word; "": it does, or nobody says why
    message: str = ""
    code: int | None = None  # the exit code of its container; None: it has not ended
    ended: str = ""  # when it ended, as Kubernetes writes times, which sort as texts; "": it has not

    @property
    def running(self) -> bool:
        """Whether its container runs, or may still start."""
        return self.phase in ("Pending", "Running") and self.code is None

    @property
    def started(self) -> bool:
        return self.code is not None or self.phase == "Running"

    def __str__(self) -> str:
        if self.code is not None:
            return describe_code(self.code)
        reason = f" ({self.waits}{': ' + self.message if self.message else ''})" if self.waits else ""
        return f"{self.phase}{reason}"


def pod_states(found: Mapping[str, Any], hosts: int, attempts: int = 0) -> list[PodState]:
    """The pods of ``kubectl get pods``, by attempt and process."""
    states = (_pod_state(each, hosts, attempts) for each in found.get("items", ()))
    return sorted(states, key=lambda pod: (pod.attempt, pod.process))


def verdict(job_set: Mapping[str, Any], pods: Iterable[PodState]) -> int | None:
    """The exit code of a job; None: it has not ended."""
    state = job_set.get("status", {}).get("terminalState")
    if not state:
        return None
    if state == STOPPED:
        return TERMINATED
    if state == "Completed":
        return DONE
    first = first_failure(pods)
    return WORKER_LOST if first is None or first.code is None else first.code


def first_failure(pods: Iterable[PodState], themselves: Collection[int] = ()) -> PodState | None:
    """The pod of the last attempt that failed first; one that failed by itself before one that another has ended."""
    pods = list(pods)
    last = max((pod.attempt for pod in pods), default=0)
    failed = [pod for pod in pods if pod.attempt == last and pod.code]

    def rank(pod: PodState) -> tuple[bool, bool, bool, str]:
        return pod.code in IN_CONSEQUENCE, pod.code == FAULT, pod.process not in themselves, pod.ended

    return min(failed, key=rank, default=None)


def not_started(pods: Iterable[PodState], count: int, installed: Collection[str] | None) -> list[str]:
    """The processes that the others of a job wait for, and what they wait for in their turn.

    Args:
        installed: The identities of the pods that have installed what they need; None: nothing is to be installed.
    """
    pods = list(pods)
    last = max((pod.attempt for pod in pods), default=1)
    present = {pod.process: pod for pod in pods if pod.attempt == last}
    found = []
    for process in range(count):
        pod = present.get(process)
        if pod is None:
            found.append(f"process {process} (no pod yet)")
        elif not pod.started:
            found.append(f"process {process} ({pod.name}: {pod})")
        elif pod.code is None and installed is not None and pod.uid not in installed:
            found.append(f"process {process} ({pod.name}: installing)")
    return found


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

    def first_failure(self) -> PodState | None:
        last = max((pod.attempt for pod in self.seen), default=0)
        logs = self._job.directory.glob(f"attempt-{last}/worker-*.log")
        return first_failure(self.seen, failed_by_their_logs(logs))

    def show_kept(self, present: set[int]) -> None:
        """Show the kept logs of attempts whose pods are gone."""
        for path in sorted(self._job.directory.glob("attempt-*/worker-*.log")):
            attempt, process = (int(name.rpartition("-")[2]) for name in (path.parent.name, path.stem))
            if attempt not in present and self._console is not None:
                for line in path.read_bytes().splitlines():
                    self._console.line(f"[{process}] ", line)

    def _run(self, pod: PodState) -> None:
        path = self._job.log(pod.attempt, pod.process)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        last = ""
        with open(path, "wb") as log:
            while True:
                since = [f"--since-time={last}"] if last else []
                words = ("logs", *self._words, "--timestamps", f"--container={CONTAINER}", *since, f"pod/{pod.name}")
                child = subprocess.Popen(
                    self._kubectl.argv(*words),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                )
                assert child.stdout is not None
                last = self._copy(child.stdout, log, pod, last)
                if child.wait() == 0 or not self._seen[pod.uid].running:
                    return
                time.sleep(RECONNECT_S)

    def _copy(self, lines: IO[bytes], log: IO[bytes], pod: PodState, last: str) -> str:
        """Copy lines that are newer than the time ``last``; return the time of the newest."""
        for line in lines:
            when, _, text = line.rstrip(b"\n").partition(b" ")
            if when.decode() <= last:
                continue  # from before the connection broke
            last = when.decode()
            if text == INSTALLED.encode():
                self.installed.add(pod.uid)
            log.write(text + b"\n")
            log.flush()
            if self._console is not None:
                self._console.line(f"[{pod.process}] ", text)
        return last


def _pod_state(found: Mapping[str, Any], hosts: int, attempts: int) -> PodState:
    meta, status = found["metadata"], found.get("status", {})
    labels = meta.get("labels", {})
    index = meta.get("annotations", {}).get("batch.kubernetes.io/job-completion-index", "0")
    state: Mapping[str, Any] = next((each.get("state", {}) for each in status.get("containerStatuses", ())), {})
    ended, waiting = state.get("terminated", {}), state.get("waiting", {})
    unscheduled: Mapping[str, Any] = next(
        (each for each in status.get("conditions", ()) if each["type"] == "PodScheduled" and each["status"] == "False"),
        {},
    )
    return PodState(
        name=meta["name"],
        uid=meta["uid"],
        process=int(labels.get("jobset.sigs.k8s.io/job-index", "0")) * hosts + int(index),
        attempt=attempts + int(labels.get("jobset.sigs.k8s.io/restart-attempt", "0")) + 1,
        phase=status.get("phase", "Pending"),
        waits=waiting.get("reason") or unscheduled.get("reason", ""),
        message=waiting.get("message") or unscheduled.get("message", ""),
        code=ended.get("exitCode"),
        ended=ended.get("finishedAt") or "",
    )


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
        found = self.kubectl.get("jobset", self.job.name)
        pods = self.kubectl.get("pods", self._selector)
        states = pod_states(pods, self._hosts, self.job.notes.get("attempts", 0))
        if self._id not in _ids(found):
            return {}, states
        stopped = found["spec"].get("suspend") and STOP in found["metadata"].get("annotations", {})
        if stopped and not any(pod.running for pod in states):
            found["status"] = {"terminalState": STOPPED, **found.get("status", {})}
        return found, states

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
        if found := self.kubectl.get("jobset", self.job.name):
            ours = known in _ids(found)
            way = f"lockstep launch delete {self.job.name}" if ours else f"kubectl delete jobset {self.job.name}"
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
        patch = json.dumps({"metadata": {"annotations": {STOP: "true"}}, "spec": {"suspend": True}})
        self.kubectl.run("patch", "jobset", self.job.name, "--type=merge", f"--patch={patch}")

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


def _ids(found: Mapping[str, Any]) -> tuple[str, ...]:
    """The id of the job that an object is of; none where it is no job's, or not there."""
    labels = found.get("metadata", {}).get("labels", {})
    return (labels[JOB_ID],) if JOB_ID in labels else ()
