"""The Kubernetes objects of a job on GKE: a JobSet, a Secret with its variables, ConfigMaps with its files.

The fields of a JobSet: https://jobset.sigs.k8s.io/docs/reference/jobset.v1alpha2/. What GKE wants for TPUs:
https://docs.cloud.google.com/kubernetes-engine/docs/tutorials/tpu-multislice-kueue and
https://docs.cloud.google.com/kubernetes-engine/docs/concepts/tpus.
"""

import base64
import dataclasses
import gzip
import io
import shlex
import tarfile
from collections.abc import Mapping, Sequence
from typing import Any, Final

from lockstep.exits import EXIT_CODES, FAULT, PEER_FAILED, SETUP_FAILED
from lockstep.launch.environment import RESTARTS, run_command
from lockstep.launch.setup_vm import PINS, uv_requirement
from lockstep.launch.slices import Slice

ACCELERATORS: Final = {
    "v4": "tpu-v4-podslice",
    "v5p": "tpu-v5p-slice",
    "v5litepod": "tpu-v5-lite-podslice",
    "v6e": "tpu-v6e-slice",
    "tpu7x": "tpu7x",
}
"""The value of the node label ``cloud.google.com/gke-tpu-accelerator`` by generation."""
REPLICATED_JOB: Final = "slice"
CONTAINER: Final = "worker"
JOB_ID: Final = "lockstep/job-id"
"""The label of all objects and pods of a job with its `GkeJob.id`: what lacks it is not this job's."""
PARTS: Final = "/lockstep/parts"  # the directory of the ConfigMaps in a pod, as the files `part-00`, `part-01`, …
FILES: Final = "/lockstep/files"  # the directory of the files in a pod once the parts are put together
WORKDIR: Final = "/lockstep/work"  # the directory in which the command runs in a pod, in the copy of `--sync`
SYNCED: Final = "sync.tar.gz"
INSTALLED: Final = "lockstep: installed, the command starts"
"""The line that a pod prints between the two: until then the others wait for it."""
CAUSE_S: Final = 15
"""Seconds by which a pod that failed because of another delays its exit, so that Kubernetes records the cause first."""
PART_BYTES: Final = 1_000_000
"""Bytes of the files in one ConfigMap, which may have 1 MiB (https://kubernetes.io/docs/concepts/configuration/configmap/)."""
MAX_PARTS: Final = 16  # ConfigMaps of a job: what is larger is data, and belongs in a bucket
LOCKED_KIB: Final = 68_719_476_736
"""The limit of locked memory, in KiB, that TPUs want, which only privileged pods have without asking.

https://docs.cloud.google.com/kubernetes-engine/docs/how-to/tpus#privileged-mode
"""
LIMIT_STAYS: Final = 'echo "the limit of locked memory stays at $(ulimit -l) KiB; TPUs may want more: --privileged" >&2'


@dataclasses.dataclass(frozen=True, kw_only=True)
class GkeJob:
    """A job on GKE, of which the objects are made."""

    name: str  # the name of all of them
    id: str  # what no other job has, of this name or another
    slice: Slice
    slices: int
    command: Sequence[str]
    image: str
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    secret_names: Sequence[str] = ()  # the names of the variables in the Secret
    files: Sequence[str] = ()  # the names of the files in the ConfigMaps
    parts: int = 0
    requirement: str = ""  # what is installed before the command runs, with `PINS`; "": nothing
    retries: int = 0  # how often all pods are started again after a failure that another try can cure
    spot: bool = False
    reservation: str = ""  # the name of a reservation; "": none
    queue: str = ""  # the Kueue queue; "": none
    service_account: str = ""  # the Kubernetes service account, for buckets; "": the namespace's
    grace_s: int = 60
    privileged: bool = False  # whether the containers are privileged, as GKE before 1.28 wants it

    @property
    def pods(self) -> int:
        """The number of pods, each of which is one process of the job."""
        return self.slice.hosts * self.slices


def job_set(job: GkeJob) -> dict[str, Any]:
    """The JobSet: a Job for each slice with a pod on each of its hosts."""
    hosts = job.slice.hosts
    labels = {"kueue.x-k8s.io/queue-name": job.queue} if job.queue else {}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {
            "name": job.name,
            "labels": {**_labels(job), **labels},
            # A slice's pods have a node pool of their own: its nodes are one slice.
            "annotations": {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"},
        },
        "spec": {
            "failurePolicy": {
                "maxRestarts": job.retries,
                "rules": [{"name": "user_error", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}],
            },
            "replicatedJobs": [
                {
                    "name": REPLICATED_JOB,
                    "replicas": job.slices,
                    "template": {
                        "spec": {
                            "parallelism": hosts,
                            "completions": hosts,
                            "completionMode": "Indexed",
                            "backoffLimit": 0,
                            "podFailurePolicy": {"rules": _pod_failure_rules()},
                            "template": {"metadata": {"labels": _labels(job)}, "spec": _pod(job)},
                        }
                    },
                }
            ],
        },
    }


def secret(job: GkeJob, variables: Mapping[str, str]) -> dict[str, Any]:
    """The Secret with the secret variables; it goes to kubectl's standard input and nowhere else."""
    data = {name: base64.b64encode(value.encode()).decode() for name, value in variables.items()}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": _metadata(job, job.name), "type": "Opaque", "data": data}


def pack(files: Mapping[str, bytes]) -> bytes:
    """A compressed tar archive that is the same for the same files."""
    target = io.BytesIO()
    with gzip.GzipFile(fileobj=target, mode="wb", mtime=0) as packed, tarfile.open(fileobj=packed, mode="w") as tar:
        for name in sorted(files):
            info = tarfile.TarInfo(name)
            info.size = len(files[name])
            tar.addfile(info, io.BytesIO(files[name]))
    return target.getvalue()


def config_maps(job: GkeJob, archive: bytes) -> list[dict[str, Any]]:
    """The ConfigMaps with the job's files."""
    parts = [archive[at : at + PART_BYTES] for at in range(0, len(archive), PART_BYTES)]
    return [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": _metadata(job, config_map_name(job, index)),
            "binaryData": {f"part-{index:02}": base64.b64encode(part).decode()},
        }
        for index, part in enumerate(parts)
    ]


def config_map_name(job: GkeJob, index: int) -> str:
    """The name of one of the ConfigMaps."""
    return f"{job.name}-files-{index:02}"


def pod_script(job: GkeJob) -> str:
    """The Bash of a pod: it puts the files together, installs, and runs its arguments."""
    lines = ["set -u", f"cd {WORKDIR} || exit {SETUP_FAILED}"]
    if not job.privileged:
        lines += [f"ulimit -l {LOCKED_KIB} 2> /dev/null || {{ {LIMIT_STAYS}; }}"]
    if job.files:
        lines += [f"cat {PARTS}/part-* | tar -xzf - -C {FILES} || exit {SETUP_FAILED}"]
    if SYNCED in job.files:
        lines += [f"tar -xzf {FILES}/{SYNCED} || exit {SETUP_FAILED}"]
    if job.requirement:
        # pip takes no hashes beside a file of ours. uv does, and is itself the file of a hash.
        uv, failed = f"{FILES}/uv", f"|| exit {SETUP_FAILED}"
        pip = "python3 -m pip install --quiet --root-user-action=ignore --disable-pip-version-check"
        install = f'{uv}/bin/uv pip install --quiet --python "$(command -v python3)" --prerelease allow'
        lines += [
            f"echo {shlex.quote(uv_requirement())} > {uv}.txt",
            f"{pip} --require-hashes --no-deps --only-binary :all: --target {uv} -r {uv}.txt {failed}",
            f"{install} --only-binary :all: --constraint {FILES}/{PINS} {shlex.quote(job.requirement)} {failed}",
            f"echo '{INSTALLED}'",
        ]
    script = "\n".join(lines) + "\n" + run_command(list(job.secret_names), FILES, forward=True)
    return script + (
        "# The pod that failed first is to be seen first.\n"
        f'case $code in\n    {PEER_FAILED} | {FAULT}) sleep {CAUSE_S} ;;\nesac\nexit "$code"\n'
    )


def _pod(job: GkeJob) -> dict[str, Any]:
    nodes = {
        "cloud.google.com/gke-tpu-accelerator": ACCELERATORS[job.slice.family.prefix],
        "cloud.google.com/gke-tpu-topology": job.slice.topology,
    }
    if job.spot:
        nodes["cloud.google.com/gke-spot"] = "true"
    if job.reservation:
        nodes["cloud.google.com/reservation-name"] = job.reservation
    volumes: list[dict[str, Any]] = [
        {"name": "work", "emptyDir": {}},
        {"name": "memory", "emptyDir": {"medium": "Memory"}},
    ]
    mounts: list[dict[str, Any]] = [{"name": "work", "mountPath": WORKDIR}, {"name": "memory", "mountPath": "/dev/shm"}]
    if job.files:
        sources = [{"configMap": {"name": config_map_name(job, index)}} for index in range(job.parts)]
        volumes += [{"name": "parts", "projected": {"sources": sources}}, {"name": "files", "emptyDir": {}}]
        mounts += [{"name": "parts", "mountPath": PARTS, "readOnly": True}, {"name": "files", "mountPath": FILES}]
    container = {
        "name": CONTAINER,
        "image": job.image,
        "command": ["bash", "-c", _literal(pod_script(job)), "lockstep"],
        "args": [_literal(word) for word in job.command],
        "env": _environment(job),
        "resources": {"limits": {"google.com/tpu": job.slice.chips // job.slice.hosts}},
        # GKE's TPU plugin gives a pod its chips; the capability is for the limit of locked memory.
        "securityContext": {"privileged": True} if job.privileged else {"capabilities": {"add": ["SYS_RESOURCE"]}},
        "volumeMounts": mounts,
    }
    if job.secret_names:
        container["envFrom"] = [{"secretRef": {"name": job.name}}]
    pod = {
        "restartPolicy": "Never",
        "hostNetwork": True,
        "dnsPolicy": "ClusterFirstWithHostNet",
        "terminationGracePeriodSeconds": job.grace_s,
        "nodeSelector": nodes,
        "tolerations": [{"key": "google.com/tpu", "operator": "Exists", "effect": "NoSchedule"}],
        "containers": [container],
        "volumes": volumes,
    }
    if job.service_account:
        pod["serviceAccountName"] = job.service_account
    return pod


def _environment(job: GkeJob) -> list[dict[str, Any]]:
    """Public variables, and with several slices what MegaScale needs; GKE adds which host of its slice a pod is on."""
    restarts = "metadata.labels['jobset.sigs.k8s.io/restart-attempt']"
    variables: list[dict[str, Any]] = [
        {"name": "PYTHONUNBUFFERED", "value": "1"},
        {"name": RESTARTS, "valueFrom": {"fieldRef": {"fieldPath": restarts}}},
    ]
    if job.slices > 1:
        index = "metadata.labels['jobset.sigs.k8s.io/job-index']"
        variables += [
            {"name": "MEGASCALE_NUM_SLICES", "value": str(job.slices)},
            {"name": "MEGASCALE_SLICE_ID", "valueFrom": {"fieldRef": {"fieldPath": index}}},
            # The name that a JobSet gives its first pod: https://jobset.sigs.k8s.io/docs/concepts/
            {"name": "MEGASCALE_COORDINATOR_ADDRESS", "value": f"{job.name}-{REPLICATED_JOB}-0-0.{job.name}"},
        ]
    return variables + [{"name": name, "value": _literal(value)} for name, value in job.environment.items()]


def _literal(text: str) -> str:
    """A text as a container gets it: Kubernetes reads ``$(NAME)`` in it as a variable, and ``$$`` as ``$``."""
    return text.replace("$", "$$")


def _pod_failure_rules() -> list[dict[str, Any]]:
    """The rules for a failed pod: a disruption, or a code that another try can cure, counts; others end the JobSet."""
    retried = [row.code for row in EXIT_CODES.values() if row.retried]
    return [
        {"action": "Count", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {
            "action": "FailJob",
            "onExitCodes": {"containerName": CONTAINER, "operator": "NotIn", "values": sorted(retried)},
        },
    ]


def _metadata(job: GkeJob, name: str) -> dict[str, Any]:
    return {"name": name, "labels": _labels(job)}


def _labels(job: GkeJob) -> dict[str, str]:
    return {"app.kubernetes.io/managed-by": "lockstep", JOB_ID: job.id}
