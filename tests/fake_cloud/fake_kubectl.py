"""``kubectl`` and a cluster with the JobSet controller for tests: pods are processes of this machine.

``install(directory)`` puts kubectl there. The cluster is the directory ``$FAKE_KUBE``. Each pod has a home directory of
its own, and ``/lockstep/…`` of its script is there. Faults, each a variable: ``FAKE_KUBE_REFUSES`` is what the cluster
answers instead of creating a JobSet; ``FAKE_KUBE_DISRUPTS`` is the process whose node is taken away half a second after
all showed a line; ``FAKE_KUBE_WAITS`` is why pods never start; with ``FAKE_KUBE_DROPS`` a connection to a log breaks
after two lines. With the file ``away`` there, the cluster does not answer, once. The file ``slices`` has the number of
slices that nodes are there for: pods of others wait. A JobSet of a queue is one of Kueue's, which starts it again when
somebody else suspends it, as long as its Workload is active. The cluster of ``--context=NAME`` is the directory
``NAME`` in it.

What it does not have: images, namespaces.
"""

import base64
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

WORKLOADS = "workloads.kueue.x-k8s.io"
KINDS = {"JobSet": "jobset", "Secret": "secret", "ConfigMap": "configmap"}


def install(directory: Path) -> None:
    """Make the command in a directory, which belongs on PATH."""
    from tests.fake_cloud.commands import write_command  # which the command itself cannot import

    directory.mkdir(parents=True, exist_ok=True)
    write_command(directory / "kubectl", "-S", __file__)


def home() -> Path:
    directory = Path(os.environ["FAKE_KUBE"])
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def read(kind: str, name: str):
    path = home() / f"{kind}-{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def write(kind: str, name: str, value) -> None:
    path = home() / f"{kind}-{name}.json"
    new = path.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
    new.write_text(json.dumps(value))
    new.replace(path)


def option(words: list[str], name: str) -> str:
    found = [word.partition("=")[2] for word in words if word.startswith(f"--{name}=")]
    return found[-1] if found else ""


def main(words: list[str]) -> int:
    if context := option(words, "context"):
        os.environ["FAKE_KUBE"] += f"/{context}"
    words = [word for word in words if not word.startswith(("--context=", "--namespace="))]
    with (home() / "calls").open("a") as calls:
        calls.write(json.dumps(words) + "\n")
    return {
        "create": create, "get": get, "logs": logs, "patch": patch, "delete": delete,
        "controller": controller,
    }[words[0]](words[1:])  # fmt: skip


def create(words: list[str]) -> int:
    manifest = json.load(sys.stdin)
    kind, name = KINDS[manifest["kind"]], manifest["metadata"]["name"]
    if read(kind, name) is not None:
        sys.exit(f'Error from server (AlreadyExists): error when creating "STDIN": {kind}s "{name}" already exists')
    if kind == "jobset":
        if refusal := os.environ.get("FAKE_KUBE_REFUSES"):
            sys.exit(refusal)
        manifest["status"] = {}
        manifest["metadata"]["uid"] = f"uid-of-{name}"
        write("pods", name, [])
        if "kueue.x-k8s.io/queue-name" in manifest["metadata"]["labels"]:
            labels = {"kueue.x-k8s.io/job-uid": f"uid-of-{name}"}
            write(WORKLOADS, name, {"metadata": {"name": name, "labels": labels}, "spec": {"active": True}})
    write(kind, name, manifest)
    if kind == "jobset":
        subprocess.Popen(
            [sys.executable, "-S", __file__, "controller", name], start_new_session=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=(home() / "controller.log").open("a"),
        )  # fmt: skip
    print(f"{kind}/{name} created")
    return 0


def get(words: list[str]) -> int:
    if words[0] == "pods" and (home() / "away").exists():
        (home() / "away").unlink()
        sys.exit("Unable to connect to the server: net/http: TLS handshake timeout")
    if words[0] == "pods":
        names = selected("jobset", words)
        print(json.dumps({"items": [pod for name in names for pod in read("pods", name) or []]}))
    elif words[0] == WORKLOADS:
        print(json.dumps({"items": [read(WORKLOADS, name) for name in selected(WORKLOADS, words)]}))
    elif (found := read(words[0], words[1])) is not None:
        print(json.dumps(found))
    return 0


def patch(words: list[str]) -> int:
    found = read(words[0], words[1])
    assert option(words, "type") == "merge", words
    given = json.loads(option(words, "patch"))
    found["spec"].update(given.get("spec", {}))
    found["metadata"].setdefault("annotations", {}).update(given.get("metadata", {}).get("annotations", {}))
    write(words[0], words[1], found)
    return 0


def selected(kind: str, words: list[str]) -> list[str]:
    """The names of the objects that have the label of ``--selector``."""
    label, _, value = option(words, "selector").partition("=")
    assert label and value, words
    found = [json.loads(path.read_text())["metadata"] for path in sorted(home().glob(f"{kind}-*.json"))]
    return [each["name"] for each in found if each.get("labels", {}).get(label) == value]


def delete(words: list[str]) -> int:
    if words[0] == "pods":
        for name in selected("jobset", words):
            (home() / f"kill-{name}").touch()
        return 0
    for name in selected(words[0], words):
        (home() / f"{words[0]}-{name}.json").unlink()
        for pod in (home() / "pods").glob(f"{name}-*") if words[0] == "jobset" else ():
            shutil.rmtree(pod)
    return 0


def logs(words: list[str]) -> int:
    path, since = home() / "pods" / words[-1].removeprefix("pod/") / "log", option(words, "since-time")
    dropped, shown = path.with_name("dropped"), 0
    with path.open() as log:
        while True:
            ended = path.with_name("ended").exists()
            for line in iter(log.readline, ""):
                if line.split(" ", 1)[0] >= since:
                    print(line, end="", flush=True)
                    shown += 1
                    if shown == 1:
                        path.with_name("followed").touch()
                if shown == 2 and os.environ.get("FAKE_KUBE_DROPS") and not dropped.exists():
                    dropped.touch()
                    sys.exit("error: unexpected EOF")
            if ended or "--follow" not in words:
                return 0
            time.sleep(0.02)


class Pod:
    """A process of this machine with what Kubernetes says of it."""

    def __init__(self, job_set, slice_index: int, index: int, attempt: int) -> None:
        replicated = job_set["spec"]["replicatedJobs"][0]
        self.hosts = replicated["template"]["spec"]["completions"]
        spec = replicated["template"]["spec"]["template"]["spec"]
        set_name = job_set["metadata"]["name"]
        self.name = f"{set_name}-{replicated['name']}-{slice_index}-{index}-a{attempt}"
        self.labels = {
            "jobset.sigs.k8s.io/jobset-name": set_name,
            "jobset.sigs.k8s.io/job-index": str(slice_index),
            "jobset.sigs.k8s.io/restart-attempt": str(attempt),
        }
        self.index, self.process_number = index, slice_index * self.hosts + index
        self.disrupted, self.ended = False, ""
        self.followed = home() / "pods" / self.name / "followed"
        room = home() / "slices"
        no_node = room.exists() and slice_index >= int(room.read_text())
        self.waits = "Unschedulable" if no_node else os.environ.get("FAKE_KUBE_WAITS")
        self.process = None if self.waits else self._start(spec, set_name)

    def _start(self, spec, set_name: str) -> subprocess.Popen:
        directory = home() / "pods" / self.name
        for part in ("parts", "files", "work", "home"):
            (directory / part).mkdir(parents=True)
        container = spec["containers"][0]
        sources = [each for volume in spec["volumes"] for each in volume.get("projected", {}).get("sources", ())]
        for source in sources:
            for name, data in read("configmap", source["configMap"]["name"])["binaryData"].items():
                (directory / "parts" / name).write_bytes(base64.b64decode(data))
        environment = {**os.environ, "HOME": str(directory / "home"), "TPU_WORKER_ID": str(self.index)}
        environment["BASH_FUNC_ulimit%%"] = (
            "() { :; }"  # pods may raise the limit of locked memory, this machine may not
        )
        environment["TPU_WORKER_HOSTNAMES"] = ",".join(["localhost"] * self.hosts)
        for each in container.get("envFrom", ()):
            data = read("secret", each["secretRef"]["name"])["data"]
            environment |= {name: base64.b64decode(value).decode() for name, value in data.items()}
        for each in container["env"]:
            given = each.get("valueFrom")
            environment[each["name"]] = self._field(given) if given else expanded(each["value"], environment)
        words = [*container["command"], *container["args"]]
        words = [in_pod(expanded(word, environment), directory) for word in words]
        process = subprocess.Popen(
            words, env=environment, cwd=directory, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        self.writer = threading.Thread(target=self._write_log, args=(process, directory))
        self.writer.start()
        return process

    def _field(self, source) -> str:
        path = source["fieldRef"]["fieldPath"]
        return self.labels[re.fullmatch(r"metadata\.labels\['(.*)'\]", path)[1]]

    def _write_log(self, process: subprocess.Popen, directory: Path) -> None:
        with (directory / "log").open("wb") as log:
            for line in process.stdout:
                now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f000Z ")
                log.write(now.encode() + line)
                log.flush()
        (directory / "ended").touch()

    def code(self) -> int | None:
        code = None if self.process is None else self.process.poll()
        if code is not None and not self.ended:
            self.writer.join()
            self.ended = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")  # Kubernetes knows whole seconds
        return 128 - code if code is not None and code < 0 else code

    def signal(self, number: int) -> None:
        """As Kubernetes does, to the first process of the container; SIGKILL to all of it."""
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, number) if number == signal.SIGKILL else self.process.send_signal(number)

    def described(self):
        code, waits = self.code(), self.waits
        phase = "Running" if code is None else "Failed" if code else "Succeeded"
        state = {"running": {}} if code is None else {"terminated": {"exitCode": code, "finishedAt": self.ended}}
        if waits:
            phase, state = "Pending", {"waiting": {"reason": waits, "message": "as the test wants it"}}
        return {
            "metadata": {
                "name": self.name, "uid": self.name, "labels": self.labels,
                "annotations": {"batch.kubernetes.io/job-completion-index": str(self.index)},
            },
            "status": {"phase": phase, "containerStatuses": [{"state": state}]},
        }  # fmt: skip


def in_pod(text: str, directory: Path) -> str:
    """A text with the paths of a pod's own folders below a directory of this machine; other paths stay as they are."""
    return re.sub(r"(?<![\w./-])/lockstep/(?=(?:parts|files|work)\b)", lambda _: f"{directory}/", text)


def expanded(text: str, environment) -> str:
    """Every ``$$`` replaced by ``$``, and ``$(NAME)`` by the variable where there is one.

    As third_party/forked/golang/expansion/expand.go of Kubernetes does it.
    """
    return re.sub(
        r"\$(?:\$|\(([^)]*)\))", lambda found: "$" if found[1] is None else environment.get(found[1], found[0]), text
    )


def controller(words: list[str]) -> int:
    """What the controllers of JobSets and Jobs do with one JobSet."""
    (name,) = words
    attempt = 0
    while True:
        found = read("jobset", name)
        if found is None:
            return 0
        hosts = found["spec"]["replicatedJobs"][0]["template"]["spec"]["completions"]
        slices = found["spec"]["replicatedJobs"][0]["replicas"]
        pods = [Pod(found, index // hosts, index % hosts, attempt) for index in range(slices * hosts)]
        state = watch(name, found, pods, attempt)
        if state == "Restart":
            attempt += 1
            continue
        if (found := read("jobset", name)) is not None and state:
            found["status"] = {"terminalState": state}
            write("jobset", name, found)
        return 0


def watch(name: str, found, pods: list[Pod], attempt: int) -> str:
    """Wait for the end of an attempt; return the JobSet's state, ``Restart``, or "" for suspended or deleted."""
    job = found["spec"]["replicatedJobs"][0]["template"]["spec"]
    grace_s = min(job["template"]["spec"]["terminationGracePeriodSeconds"], 3)
    disrupts = os.environ.get("FAKE_KUBE_DISRUPTS")
    while True:
        write("pods", name, [pod.described() for pod in pods])
        now = read("jobset", name)
        if (
            now is not None
            and now["spec"].get("suspend")
            and (read(WORKLOADS, name) or {"spec": {}})["spec"].get("active")
        ):
            write("jobset", name, now | {"spec": now["spec"] | {"suspend": False}})
            continue
        if now is None or now["spec"].get("suspend"):
            end(pods, grace_s, home() / f"kill-{name}")
            write("pods", name, [])
            return ""
        shown = [pod.followed.exists() and time.time() - pod.followed.stat().st_mtime > 0.5 for pod in pods]
        if disrupts and attempt == 0 and all(shown):
            pods[int(disrupts)].disrupted = True
            pods[int(disrupts)].signal(signal.SIGKILL)
        codes = [pod.code() for pod in pods]
        if all(code == 0 for code in codes):
            write("pods", name, [pod.described() for pod in pods])
            return "Completed"
        failed = [pod for pod, code in zip(pods, codes, strict=True) if code]
        if failed:
            by_user = not failed[0].disrupted and rule(job, failed[0].code()) == "FailJob"
            end(pods, grace_s, home() / f"kill-{name}")
            again = not by_user and attempt < found["spec"]["failurePolicy"]["maxRestarts"]
            write("pods", name, [] if again else [pod.described() for pod in failed])
            return "Restart" if again else "Failed"
        time.sleep(0.05)


def rule(job, code: int) -> str:
    """The action of the first rule of the pod failure policy that a code matches."""
    for each in job["podFailurePolicy"]["rules"]:
        wanted = each.get("onExitCodes")
        if wanted and (code in wanted["values"]) == (wanted["operator"] == "In"):
            return each["action"]
    return "Count"


def end(pods: list[Pod], grace_s: float, kill: Path) -> None:
    for pod in pods:
        pod.signal(signal.SIGTERM)
    limit = time.monotonic() + grace_s
    while time.monotonic() < limit and not kill.exists() and any(pod.code() is None for pod in pods if pod.process):
        time.sleep(0.05)
    for pod in pods:
        pod.signal(signal.SIGKILL)
    while any(pod.code() is None for pod in pods if pod.process):
        time.sleep(0.01)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
