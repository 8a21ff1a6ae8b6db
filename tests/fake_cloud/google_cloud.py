"""A Google Cloud of files: what the fake gcloud and ssh read and write, and what tests script.

A machine is a home directory of its own and the processes that ssh has started there. Everything is below one
directory, in ``state.json``, under a lock. Standard library only: each fake command is a process of its own.
"""

import contextlib
import fcntl
import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
DIRECTORY = "FAKE_GOOGLE"
"""The variable with the directory of the cloud."""
MACHINE = "FAKE_MACHINE"
"""The variable by which the processes of a machine are known."""
QUEUE = ["WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE"]
"""The states of a queued resource; each look brings it to the next."""
EMPTY: dict[str, Any] = {
    "requests": {}, "nodes": {}, "policies": {}, "templates": {}, "groups": {}, "instances": {}, "machines": {},
    "replies": [], "queues": [], "calls": [], "made": 0, "unreachable": [], "drops": {},
}  # fmt: skip


class Cloud:
    """The cloud in a directory.

    Args:
        directory: Where its files are.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    @contextlib.contextmanager
    def change(self) -> Iterator[dict[str, Any]]:
        """Give the state to the block, alone, and keep what the block makes of it."""
        path = self.directory / "state.json"
        with open(self.directory / "lock", "w", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            state = json.loads(path.read_text()) if path.exists() else json.loads(json.dumps(EMPTY))
            yield state
            path.with_suffix(".new").write_text(json.dumps(state, indent=1))
            path.with_suffix(".new").replace(path)

    def read(self) -> dict[str, Any]:
        with self.change() as state:
            return state

    # What tests script.

    def install(self, bin_directory: Path) -> None:
        """Write the commands ``gcloud`` and ``ssh`` into a directory."""
        from tests.fake_cloud.commands import write_command  # which the commands themselves cannot import

        bin_directory.mkdir(parents=True, exist_ok=True)
        for name, file in (("gcloud", "gcloud.py"), ("ssh", "gcloud_ssh.py")):
            write_command(bin_directory / name, "-S", HERE / file)

    def reply(self, words: str, stderr: str, *, code: int = 1, times: int = 1) -> None:
        """Have the next calls whose command line contains ``words`` fail."""
        with self.change() as state:
            state["replies"].append({"words": words, "stderr": stderr, "code": code, "times": times})

    def queue(self, states: list[Any]) -> None:
        """Give the next queued resource these states; ``{"FAILED": text}`` fails with an error."""
        with self.change() as state:
            state["queues"].append(states)

    def costs(self) -> list[str]:
        """The kinds of things that are left in the cloud."""
        state = self.read()
        kinds = ("requests", "nodes", "policies", "templates", "groups", "instances", "machines")
        return [kind for kind in kinds if state[kind]]

    def calls(self, words: str = "") -> list[str]:
        """The command lines so far that contain ``words``."""
        return [call for call in self.read()["calls"] if words in call]

    def home(self, name: str) -> Path:
        """The home directory of the machine that has this name now."""
        return Path(next(each["home"] for each in self.read()["machines"].values() if each["name"] == name))

    def unreachable(self, name: str, is_so: bool = True) -> None:
        """Have ssh not reach the machine of a name."""
        with self.change() as state:
            names = set(state["unreachable"]) - {name}
            state["unreachable"] = sorted(names | {name} if is_so else names)

    def drop_connections(self, name: str) -> None:
        """End every ssh connection that the machine of a name has now; what runs on it goes on."""
        with self.change() as state:
            state["drops"][name] = state["drops"].get(name, 0) + 1

    def preempt(self, name: str) -> None:
        """Take a node or a group's machines away: their processes die and their disks are gone."""
        with self.change() as state:
            if name in state["groups"]:
                lost = [each for each in state["instances"].values() if each["group"] == name]
                for instance in lost:
                    instance["status"] = "TERMINATED"
                    end_machine(state, instance["name"])
            else:
                node = state["nodes"][name]
                node["state"] = "PREEMPTED"
                if request := state["requests"].get(node["request"]):
                    request["state"] = "SUSPENDED"
                for i in range(node["hosts"]):
                    end_machine(state, f"{name} worker {i}")


def new_machine(state: dict[str, Any], directory: Path, name: str, slice_id: int, worker: int) -> dict[str, Any]:
    """Add a machine with an empty home directory; its id is one that no other machine had."""
    state["made"] += 1
    number = state["made"]
    home = directory / "machines" / str(number)
    home.mkdir(parents=True)
    machine = {
        "id": str(7000 + number),
        "name": name,
        "internal": f"127.0.{slice_id}.{worker + 2}",
        "external": f"203.0.{slice_id}.{number}",
        "home": str(home),
        "slice": slice_id,
        "worker": worker,
    }
    state["machines"][name] = machine
    return machine


def end_machine(state: dict[str, Any], name: str) -> None:
    """Remove a machine, its processes and its disk."""
    machine = state["machines"].pop(name, None)
    if machine is None:
        return
    kill_processes(machine["home"])
    shutil.rmtree(machine["home"], ignore_errors=True)


def kill_processes(home: str) -> None:
    """Kill every process that was started on the machine with this home directory."""
    mark = f"{MACHINE}={home}\0".encode()
    for _ in range(3):  # one may start another while we look
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if mark in path.read_bytes() and path.parent.name != str(os.getpid()):
                    os.kill(int(path.parent.name), signal.SIGKILL)
