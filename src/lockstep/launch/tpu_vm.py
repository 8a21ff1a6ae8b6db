"""Slices by the Cloud TPU API: existing nodes, or new ones by a queued resource.

A queued resource is asked for whatever the kind of capacity, because it waits where a direct request fails. States and
their meaning: https://cloud.google.com/tpu/docs/queued-resources and the messages of the API (tpu/v2 in SDK 528).
"""

import argparse
import dataclasses
import shlex
from collections.abc import Callable, Sequence
from typing import Any, Final

from lockstep.errors import ConfigError
from lockstep.exits import REFUSED, UNAVAILABLE
from lockstep.launch.backend import LaunchError
from lockstep.launch.pod import LABEL, GooglePod, Machine, RequestFailedError, Wait
from lockstep.launch.slices import Slice

CAPACITY_FLAGS: Final = {
    "on-demand": [],
    "spot": ["--spot"],
    "reserved": ["--reserved"],
    "best-effort": ["--best-effort"],
}
"""Options of ``queued-resources create`` for each ``--capacity_type``."""

ENDED: Final = frozenset({"FAILED", "SUSPENDING", "SUSPENDED"})
"""States of a queued resource that has no nodes any more, and will have none."""
COMES_BACK: Final = frozenset({"CREATING", "RESTARTING", "REIMAGING", "REPAIRING", "STARTING", "STOPPING"})
"""States of a node that a READY may follow. STOPPING is also how a preemption begins."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TpuVm(GooglePod):
    """The nodes of one queued resource of the pod's name, or nodes that somebody made in another way."""

    title = "tpu-vm: slices by the Cloud TPU API"
    noun = "TPU"
    undoing = "withdrawing the request"
    undone = ", and the request is withdrawn"

    runtime_version: str = ""  # the image, or empty for the one that belongs to the kind of slice

    @staticmethod
    def add_own_options(add: Callable[..., object]) -> None:
        add("--runtime_version", default="", help="the image of new machines (default: the one for the --tpu_type)")

    @staticmethod
    def own_values(options: argparse.Namespace, kind: Slice | None) -> dict[str, Any]:
        if kind is not None and not kind.family.runtime_version:
            raise ConfigError(
                f"--tpu_type is {kind.name}, which the Cloud TPU API does not have. Use --backend mig, or gke."
            )
        return {"runtime_version": options.runtime_version}

    @property
    def hosts(self) -> int:
        return self.slice.hosts if self.slice else 0

    def create_commands(self) -> list[list[str]]:
        kind = self.kind()
        nodes = (
            [f"--node-id={self.name}"]
            if self.count == 1
            else [f"--node-count={self.count}", f"--node-prefix={self.name}"]
        )
        words = [
            # Best effort is known to the alpha commands alone.
            *(["alpha"] if self.capacity == "best-effort" else []),
            *("compute", "tpus", "queued-resources", "create", self.name, *nodes),
            f"--accelerator-type={kind.name}",
            f"--runtime-version={self.runtime_version or kind.family.runtime_version}",
            *CAPACITY_FLAGS[self.capacity],
            f"--labels={LABEL}=yes",
            *self.account_options(),
            *(["--internal-ips"] if self.internal_ip else []),
            "--async",
        ]
        return [self.gcloud.command(*words)]

    def wait_lines(self) -> list[str]:
        describe = self.gcloud.command("compute", "tpus", "queued-resources", "describe", self.name)
        look = shlex.join([*describe, "--format=value(state.state)"])
        return [f"until {look} | tee /dev/stderr | grep -qx ACTIVE; do sleep 10; done"]

    def delete_commands(self) -> list[list[str]]:
        return [self._delete_request()]

    def login_commands(self, machines: Sequence[Machine] | None) -> list[list[str]]:
        # A key belongs to a node, so one worker of each is enough (AddSSHKeyIfNeeded in gcloud's tpu_vm/ssh.py).
        return [self._ssh(node, 0, "true") for node in self.slice_names]

    def ssh_command(self, worker: int, command: str) -> list[str]:
        per_slice = self.hosts or worker + 1
        return self._ssh(self.slice_names[worker // per_slice], worker % per_slice, command)

    def made_here(self) -> bool:
        request = self._request()
        if request is not None:
            specs = request.get("tpu", {}).get("nodeSpec", [])
            return any(LABEL in spec.get("node", {}).get("labels", {}) for spec in specs)
        return any(LABEL in (described or {}).get("labels", {}) for described in self._nodes().values())

    def take_existing(self, wait: Wait) -> bool:
        request, nodes = self._request(), self._nodes()
        state = _state_of(request)
        if state == "DELETING":  # by a delete that was not waited for
            self._await_deletion(wait)
            return False
        # Nodes that nobody queued for end for good by themselves.
        dead = any(described and described.get("state") in {"PREEMPTED", "TERMINATED"} for described in nodes.values())
        if state in ENDED or dead:
            self.kind()  # before anything is deleted
            was = state if state in ENDED else "PREEMPTED"
            wait.say(f"{self.name}: it is {was}; deleting what is left of it, to ask for a new one")
            self.delete(wait)
            return False
        for node, described in nodes.items():
            kind = (described or {}).get("acceleratorType", "")
            if self.slice is not None and kind and kind != self.slice.name:
                raise self.other_kind(f"{node} exists and is a {kind}", f"is {self.slice.name}")
        return request is not None or any(nodes.values())

    def undo(self) -> None:
        self.run_unless_gone(self._delete_request())

    def machines(self) -> list[Machine]:
        machines = []
        for slice_id, (node, described) in enumerate(self._nodes().items()):
            for i, endpoint in enumerate((described or {}).get("networkEndpoints", [])):
                external = endpoint.get("accessConfig", {}).get("externalIp", "")
                addresses = endpoint.get("ipAddress", ""), external
                key = f"tpu.{described['id']}-{i}" if described else ""
                machines.append(self.machine(f"{node} worker {i}", slice_id, *addresses, key))
        return machines

    def lost(self) -> str | None:
        state = _state_of(self._request())
        if state in ENDED or state == "DELETING":
            return f"queued resource {self.name} is {state}"
        for node, described in self._nodes().items():
            if described is None:
                return f"{node} is gone"
            if described.get("state") != "READY":
                return f"{node} is {described.get('state')}"
        return None

    def delete(self, wait: Wait) -> None:
        """Delete the queued resource with its nodes, or nodes that were made without one; wait until they are gone."""
        request = self._request()
        if request is not None:
            if _state_of(request) != "DELETING":
                self.run_unless_gone(self._delete_request())
        else:
            for node, described in self._nodes().items():
                if described is not None:
                    words = ("compute", "tpus", "tpu-vm", "delete", node, "--async")
                    self.run_unless_gone(self.gcloud.command(*words))

        self._await_deletion(wait)

    def watch(self) -> Callable[[], tuple[str, bool]]:
        """As in the base class; the function raises where all of it is gone that an earlier call has seen."""
        seen = False

        def look() -> tuple[str, bool]:
            nonlocal seen
            request, nodes = self._request(), self._nodes()
            there = request is not None or any(nodes.values())
            if seen and not there:
                raise LaunchError(
                    f"{self.name} is gone: somebody has deleted it while it was waited for. Start again to ask for it "
                    "anew.",
                    REFUSED,
                )
            seen = seen or there
            return self._state(request, nodes)

        return look

    def _state(self, request: dict[str, Any] | None, nodes: dict[str, dict[str, Any] | None]) -> tuple[str, bool]:
        """Return the state to show, and whether every node can be used."""
        state = _state_of(request)
        if state in ENDED:
            self._raise_ended(request or {})
        if request is not None and state != "ACTIVE":
            return state, False
        states = {node: (described or {}).get("state", "not there yet") for node, described in nodes.items()}
        dead = [f"{node} is {now}" for node, now in states.items() if nodes[node] and now not in {"READY", *COMES_BACK}]
        if dead:
            raise LaunchError(f"{', '.join(dead)}. Start it (gcloud compute tpus tpu-vm start), or delete it.", REFUSED)
        if all(now == "READY" for now in states.values()):
            return (f"{state}, " if state else "") + "READY", True
        waiting = ", ".join(f"{node} {now}" for node, now in states.items() if now != "READY")
        return f"{state + ', ' if state else ''}{waiting}", False

    def _await_deletion(self, wait: Wait) -> None:
        """Wait until nothing of it is left."""

        def look() -> tuple[str, bool]:
            request, nodes = self._request(), self._nodes()
            left = [node for node, described in nodes.items() if described is not None]
            if request is None and not left:
                return "deleted", True
            return f"deleting ({', '.join(left) or 'queued resource'})", False

        if not wait.until(self.name, look):
            raise LaunchError(
                f"{self.name} is still being deleted after {wait.timeout_s:.0f} s. Google goes on with it; start again "
                "later.",
                UNAVAILABLE,
            )

    def _raise_ended(self, request: dict[str, Any]) -> None:
        """Raise what is known of why a request has ended without nodes."""
        data = request.get("state", {})
        message = data.get("failedData", {}).get("error", {}).get("message", "")
        if message:
            words = self.gcloud.command("compute", "tpus", "queued-resources", "describe", self.name)
            cause = self.gcloud.error(words, message).cause
            raise RequestFailedError(cause, shlex.join(words), message, self.gcloud.names)
        initiator = {"USER": "by a user", "SERVICE": "by Google"}.get(data.get("stateInitiator", ""), "")
        raise LaunchError(
            f"queued resource {self.name} is {data.get('state')} {initiator}".strip()
            + ": it has no TPUs any more. Start again to have new ones, with --retries to have that done by itself.",
            UNAVAILABLE,
        )

    def _ssh(self, node: str, worker: int, command: str) -> list[str]:
        words = ["compute", "tpus", "tpu-vm", "ssh", node, f"--worker={worker}", f"--command={command}"]
        return self.gcloud.command(*words, *(["--internal-ip"] if self.internal_ip else []))

    def _delete_request(self) -> list[str]:
        return self.gcloud.command("compute", "tpus", "queued-resources", "delete", self.name, "--force", "--async")

    def _request(self) -> dict[str, Any] | None:
        request = self.gcloud.read("compute", "tpus", "queued-resources", "describe", self.name)
        return request if request is None else dict(request)

    def _nodes(self) -> dict[str, dict[str, Any] | None]:
        return {node: self.gcloud.read("compute", "tpus", "tpu-vm", "describe", node) for node in self.slice_names}


def _state_of(request: dict[str, Any] | None) -> str:
    return "" if request is None else str(request.get("state", {}).get("state", ""))
