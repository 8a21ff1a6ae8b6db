"""The fake gcloud: the commands that the launcher uses, on the files of `google_cloud.Cloud`.

It refuses options that the real command does not have: ``gcloud_flags.json`` was read out of Google's own SDK.
"""

import contextlib
import dataclasses
import io
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.fake_cloud import gcloud_ssh, google_cloud

TABLE = json.loads((Path(__file__).parent / "gcloud_flags.json").read_text())
EVERYWHERE = {"--project", "--quiet", "--format"}


USER = "alice_example_com"
"""The user on the machines, as OS Login names it."""


@dataclasses.dataclass(frozen=True)
class OnMachine:
    """A command to run on a machine once the state is free."""

    address: str
    command: str


class Refused(Exception):
    """How a command fails."""


def main(words: list[str]) -> int:
    cloud = google_cloud.Cloud(Path(os.environ[google_cloud.DIRECTORY]))
    line = shlex.join(words)
    with cloud.change() as state:
        state["calls"].append(line)
        for reply in state["replies"]:
            if reply["words"] in line and reply["times"] > 0:
                reply["times"] -= 1
                print(reply["stderr"], file=sys.stderr)
                return int(reply["code"])
        known = [command for command in TABLE if words[: len(command.split())] == command.split()]
        if not known:
            print(f"ERROR: (gcloud) Invalid choice: {line!r}.", file=sys.stderr)
            return 2
        command = max(known, key=len)
        rest = words[len(command.split()) :]
        flags = {word.partition("=")[0]: word.partition("=")[2] for word in rest if word.startswith("--")}
        names = [word for word in rest if not word.startswith("--")]
        if unknown := sorted(set(flags) - set(TABLE[command]) - EVERYWHERE):
            print(f"ERROR: (gcloud.{command.replace(' ', '.')}) unrecognized arguments: {unknown[0]}", file=sys.stderr)
            return 2
        name = command.removeprefix("alpha ").removeprefix("compute ")
        try:
            found = COMMANDS[name](Call(cloud, state, names, flags))
        except Refused as error:
            print(f"ERROR: (gcloud.{command.replace(' ', '.')}) {error}", file=sys.stderr)
            return 1
    if isinstance(found, OnMachine):
        return gcloud_ssh.main(["--", f"{USER}@{found.address}", found.command])
    if found is not None:
        print(json.dumps(found) if flags.get("--format") == "json" else found)
    return 0


class Call:
    """One call: the cloud, its state, the names and the options."""

    def __init__(self, cloud, state, names, flags):
        self.cloud, self.state, self.names, self.flags = cloud, state, names, flags

    @property
    def name(self):
        return self.names[0]

    def existing(self, kind, name=None):
        name = name or self.name
        if name not in self.state[kind]:
            raise Refused(f"NOT_FOUND: Resource 'projects/p/locations/z/{kind}/{name}' was not found")
        return self.state[kind][name]

    def new(self, kind, name=None):
        name = name or self.name
        if name in self.state[kind]:
            raise Refused(f"ALREADY_EXISTS: Resource 'projects/p/locations/z/{kind}/{name}' already exists")


def request_create(call):
    call.new("requests")
    flags = call.flags
    count = int(flags.get("--node-count", 0))
    names = [f"{flags['--node-prefix']}-{i}" for i in range(count)] if count else [flags["--node-id"]]
    for name in names:
        call.new("nodes", name)
    states = call.state["queues"].pop(0) if call.state["queues"] else list(google_cloud.QUEUE)
    call.state["requests"][call.name] = {
        "state": "CREATING", "states": states, "nodes": names, "type": flags["--accelerator-type"],
        "labels": dict([flags["--labels"].split("=")]) if "--labels" in flags else {}, "error": "",
    }  # fmt: skip


def request_describe(call):
    request = call.existing("requests")
    advance(call, call.name, request)
    state = {"state": request["state"]}
    if request["error"]:
        state["failedData"] = {"error": {"code": 8, "message": request["error"]}}
    if request["state"] == "SUSPENDED":
        state["stateInitiator"] = "SERVICE"
    if call.flags.get("--format", "").startswith("value"):
        return request["state"]
    specs = [{"nodeId": name, "node": {"labels": request["labels"]}} for name in request["nodes"]]
    return {"name": f"projects/p/locations/z/queuedResources/{call.name}", "state": state, "tpu": {"nodeSpec": specs}}


def advance(call, name, request):
    """Bring a queued resource to its next state, and make the nodes that belong to it."""
    if not request["states"]:
        return
    state = request["states"].pop(0)
    if isinstance(state, dict):
        request["state"], request["error"] = next(iter(state.items()))
        return
    request["state"] = state
    hosts = hosts_of(request["type"])
    for slice_id, node in enumerate(request["nodes"]):
        if state == "PROVISIONING":
            call.state["nodes"][node] = {
                "state": "CREATING", "type": request["type"], "hosts": hosts, "request": name,
                "id": f"90{len(call.state['calls'])}{slice_id}", "labels": request["labels"],
            }  # fmt: skip
        if state == "ACTIVE":
            call.state["nodes"][node]["state"] = "READY"
            for i in range(hosts):
                google_cloud.new_machine(call.state, call.cloud.directory, f"{node} worker {i}", slice_id, i)


def hosts_of(kind):
    """The machines of a slice, for the kinds that tests rent."""
    return {"v6e-8": 1, "v6e-16": 4, "v5p-8": 1, "v5p-16": 2, "v5p-32": 4}[kind]


def request_delete(call):
    request = call.existing("requests")
    if request["state"] == "ACTIVE" and "--force" not in call.flags:
        raise Refused("FAILED_PRECONDITION: queued resource is ACTIVE; use --force")
    for node in request["nodes"]:
        remove_node(call, node)
    del call.state["requests"][call.name]


def remove_node(call, name):
    node = call.state["nodes"].pop(name, None)
    for i in range(node["hosts"] if node else 0):
        google_cloud.end_machine(call.state, f"{name} worker {i}")


def node_describe(call):
    node = call.existing("nodes")
    machines = [call.state["machines"].get(f"{call.name} worker {i}") for i in range(node["hosts"])]
    internal = call.cloud.directory / "internal_only"
    return {
        "name": f"projects/p/locations/z/nodes/{call.name}",
        "id": node["id"],
        "acceleratorType": node["type"],
        "state": node["state"],
        "labels": node["labels"],
        "networkEndpoints": [
            {
                "ipAddress": each["internal"],
                "port": 8470,
                "accessConfig": {} if internal.exists() else {"externalIp": each["external"]},
            }
            for each in machines
            if each
        ],
    }


def node_delete(call):
    call.existing("nodes")
    remove_node(call, call.name)


def ssh(call, machine):
    """Both kinds of ssh: make the key, and with --dry-run print the command."""
    if machine is None or machine["name"] in call.state["unreachable"]:
        raise Refused("[/usr/bin/ssh] exited with return code [255].")
    key = Path(os.environ["HOME"]) / ".ssh" / "google_compute_engine"
    key.parent.mkdir(exist_ok=True)
    key.write_text("a key")
    if "--dry-run" in call.flags:
        address = machine["internal"] if "--internal-ip" in call.flags else machine["external"]
        return f"/usr/bin/ssh -T -i {key} -o CheckHostIP=no {USER}@{address} -- {call.flags['--command']}"
    return OnMachine(machine["external"], call.flags["--command"])


def node_ssh(call):
    call.existing("nodes")
    return ssh(call, call.state["machines"].get(f"{call.name} worker {call.flags['--worker']}"))


def policy_create(call):
    call.new("policies")
    call.state["policies"][call.name] = {
        "topology": call.flags["--accelerator-topology"],
        "description": call.flags.get("--description", ""),
    }


def template_create(call):
    call.new("templates")
    labels = dict([call.flags["--labels"].split("=")]) if "--labels" in call.flags else {}
    call.state["templates"][call.name] = {"machineType": call.flags["--machine-type"], "labels": labels}


def group_create(call):
    call.new("groups")
    if call.flags["--template"] not in call.state["templates"]:
        raise Refused("Could not fetch resource:\n - The resource 'template' was not found")
    policy = call.flags.get("--workload-policy", "").rpartition("/")[2]
    if policy and policy not in call.state["policies"]:
        raise Refused("Could not fetch resource:\n - The resource 'policy' was not found")
    call.state["groups"][call.name] = {
        "size": int(call.flags["--size"]),
        "looks": 0,
        "description": call.flags.get("--description", ""),
        "errors": [],
    }


def group_describe(call):
    group = call.existing("groups")
    return {"name": call.name, "targetSize": group["size"], "description": group["description"]}


def group_list(call):
    """The machines: first none, then in the making, then all of them at once, as in bulk mode."""
    group = call.existing("groups")
    group["looks"] += 1
    slice_id = int(call.name.rpartition("-")[2]) if call.name.rpartition("-")[2].isdigit() else 0
    if group["looks"] == 2:
        # Names in another order than numbers.
        for i in range(group["size"]):
            name = f"{call.name}-{'xwzq'[i % 4]}{i}"
            google_cloud.new_machine(call.state, call.cloud.directory, name, slice_id, i)
            call.state["instances"][name] = {"name": name, "group": call.name, "status": "STAGING"}
    mine = [each for each in call.state["instances"].values() if each["group"] == call.name]
    if group["looks"] == 3:
        for each in mine:
            each["status"] = "RUNNING"
    if call.flags.get("--format", "").startswith("value"):
        return "\n".join(sorted(each["name"] for each in mine))
    return [
        {
            "instance": f"https://www.googleapis.com/compute/v1/projects/p/zones/z/instances/{each['name']}",
            "instanceStatus": each["status"],
            "currentAction": "CREATING" if each["status"] == "STAGING" else "NONE",
        }
        for each in mine
    ]


def group_wait(call):
    while not all(each["instanceStatus"] == "RUNNING" for each in group_list(call) or [{"instanceStatus": ""}]):
        pass


def group_errors(call):
    errors = call.existing("groups")["errors"]
    script = call.cloud.directory / "group_errors.json"
    errors = errors + (json.loads(script.read_text()) if script.exists() else [])
    return [{"error": error} for error in errors]


def group_delete(call):
    call.existing("groups")
    for name in [each["name"] for each in call.state["instances"].values() if each["group"] == call.name]:
        del call.state["instances"][name]
        google_cloud.end_machine(call.state, name)
    del call.state["groups"][call.name]


def instances(call):
    names = call.flags["--filter"].removeprefix("name=(").removesuffix(")").split()
    machines = [call.state["machines"][name] for name in names if name in call.state["machines"]]
    return [
        {
            "name": each["name"],
            "id": each["id"],
            "networkInterfaces": [{"networkIP": each["internal"], "accessConfigs": [{"natIP": each["external"]}]}],
        }
        for each in machines
    ]


def remove(kind):
    def delete(call):
        call.existing(kind)
        del call.state[kind][call.name]

    return delete


COMMANDS = {
    "config get-value": lambda call: "fake-project",
    "tpus queued-resources create": request_create,
    "tpus queued-resources describe": request_describe,
    "tpus queued-resources delete": request_delete,
    "tpus tpu-vm describe": node_describe,
    "tpus tpu-vm delete": node_delete,
    "tpus tpu-vm ssh": node_ssh,
    "ssh": lambda call: ssh(call, call.state["machines"].get(call.name)),
    "resource-policies create workload-policy": policy_create,
    "resource-policies describe": lambda call: call.existing("policies"),
    "resource-policies delete": remove("policies"),
    "instance-templates create": template_create,
    "instance-templates describe": lambda call: {"properties": call.existing("templates")},
    "instance-templates delete": remove("templates"),
    "instance-groups managed create": group_create,
    "instance-groups managed describe": group_describe,
    "instance-groups managed list-instances": group_list,
    "instance-groups managed list-errors": group_errors,
    "instance-groups managed wait-until": group_wait,
    "instance-groups managed delete": group_delete,
    "instances list": instances,
}


def run(command, timeout=0.0, **_):
    """In place of ``subprocess.run``: the same in this process, which takes no time."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(list(command[1:]))
    return subprocess.CompletedProcess(command, code, out.getvalue(), err.getvalue())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
