"""``kubectl``: how it is called, and what its errors mean."""

import dataclasses
import json
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any, Final

from lockstep.exits import NOT_FOUND, REFUSED, UNREACHABLE
from lockstep.json_text import parse_json
from lockstep.launch.backend import LaunchError

CALL_S: Final = 120.0
"""Seconds that a call may take that does not follow anything."""

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
    """kubectl for one namespace.

    Args:
        context: The context of the user's configuration; "": the current one.
        namespace: The namespace; "": the context's.
    """

    context: str = ""
    namespace: str = ""

    def argv(self, *words: str) -> list[str]:
        """The command line.

        Args:
            words: What follows the context and the namespace.
        """
        given = {"context": self.context, "namespace": self.namespace}
        return ["kubectl", *(f"--{name}={value}" for name, value in given.items() if value), *words]

    def run(self, *words: str, manifest: Mapping[str, Any] | None = None) -> str:
        """Run it and return its output.

        Args:
            words: What follows the context and the namespace.
            manifest: An object for its standard input.

        Raises:
            LaunchError: It is not there, it refused, or it did not answer in time.
        """
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
        """What ``kubectl get`` says of objects; without items or fields where there are none.

        Args:
            words: Kind and name, or kind and selector.

        Raises:
            LaunchError: See `run`.
        """
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
