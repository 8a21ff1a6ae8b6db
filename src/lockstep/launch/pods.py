"""The pods of a job as Kubernetes shows them, and what their ends mean."""

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

from lockstep.exits import DIED, DONE, TERMINATED, WORKER_LOST, cause_of, describe_code

STOPPED: Final = "Stopped"
"""The state of a JobSet that the launcher has suspended, once no pod runs. Its annotation tells it from one that Kueue
suspends until there is room."""


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


def pod_states(listed: Mapping[str, Any], hosts: int, attempts: int = 0) -> list[PodState]:
    """The pods of ``kubectl get pods``, by attempt and process."""
    states = (_pod_state(pod, hosts, attempts) for pod in listed.get("items", ()))
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
    """The pod of the last attempt that is the cause of the end of the others, see `cause_of`.

    Kubernetes knows the second of an end. A pod that ends because of another waits before it does (`gke_manifest`), so
    that of two ends in the same second that of a pod that died without a word came first.
    """
    pods = list(pods)
    last = max((pod.attempt for pod in pods), default=0)
    failed = [pod for pod in pods if pod.attempt == last and pod.code]
    failed.sort(key=lambda pod: (pod.ended, pod.code not in DIED))
    own = [pod for pod in failed if pod.process in themselves]
    return cause_of(failed, lambda pod: pod.code or DONE, own) if failed else None


def not_started(pods: Iterable[PodState], count: int, installed: Collection[str] | None) -> list[str]:
    """The processes that the others of a job wait for, and what they wait for in their turn.

    Args:
        installed: The identities of the pods that have installed what they need; None: nothing is to be installed.
    """
    pods = list(pods)
    last = max((pod.attempt for pod in pods), default=1)
    present = {pod.process: pod for pod in pods if pod.attempt == last}
    missing = []
    for process in range(count):
        pod = present.get(process)
        if pod is None:
            missing.append(f"process {process} (no pod yet)")
        elif not pod.started:
            missing.append(f"process {process} ({pod.name}: {pod})")
        elif pod.code is None and installed is not None and pod.uid not in installed:
            missing.append(f"process {process} ({pod.name}: installing)")
    return missing


def _pod_state(pod: Mapping[str, Any], hosts: int, attempts: int) -> PodState:
    meta, status = pod["metadata"], pod.get("status", {})
    labels = meta.get("labels", {})
    index = meta.get("annotations", {}).get("batch.kubernetes.io/job-completion-index", "0")
    containers, conditions = status.get("containerStatuses", ()), status.get("conditions", ())
    state: Mapping[str, Any] = next((container.get("state", {}) for container in containers), {})
    ended, waiting = state.get("terminated", {}), state.get("waiting", {})
    waits = (row for row in conditions if (row["type"], row["status"]) == ("PodScheduled", "False"))
    unscheduled: Mapping[str, Any] = next(waits, {})
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
