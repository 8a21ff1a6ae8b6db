"""How kubectl is called; what its errors mean is in test_gke.py."""

import pytest

from lockstep.exits import REFUSED, UNREACHABLE
from lockstep.launch.backend import LaunchError
from lockstep.launch.kubectl import Kubectl


@pytest.fixture
def says(tmp_path, monkeypatch):
    """Make a kubectl of a shell script."""

    def make(script):
        (tmp_path / "kubectl").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "kubectl").chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    return make


def test_context_and_namespace_come_first():
    assert Kubectl(context="c", namespace="n").argv("get", "pods") == [
        "kubectl", "--context=c", "--namespace=n", "get", "pods",
    ]  # fmt: skip
    assert Kubectl().argv("get", "pods") == ["kubectl", "get", "pods"]


def test_nothing_is_an_empty_object(says):
    says("true")
    assert Kubectl().get("jobset", "x") == {}
    says("echo Update available; echo '{}'")
    with pytest.raises(LaunchError, match="what kubectl prints is not JSON: .*Run it by hand"):
        Kubectl().get("jobset", "x")


@pytest.mark.parametrize(
    ("text", "code", "advice"),
    [
        ("executable gke-gcloud-auth-plugin not found", REFUSED, "gcloud components install gke-gcloud-auth-plugin"),
        ("error: You must be logged in to the server (Unauthorized)", REFUSED, "gcloud auth login"),
        ("something new", REFUSED, "kubectl get failed: something new"),
    ],
)
def test_an_error_is_explained(says, text, code, advice):
    says(f"echo '{text}' >&2; exit 1")
    with pytest.raises(LaunchError, match=advice) as caught:
        Kubectl().get("jobset", "x")
    assert caught.value.code == code


def test_a_cluster_that_does_not_answer(says, monkeypatch):
    says("exec sleep 20")
    monkeypatch.setattr("lockstep.launch.kubectl.CALL_S", 0.2)
    with pytest.raises(LaunchError, match="did not answer within 0.2 s") as caught:
        Kubectl().get("jobset", "x")
    assert caught.value.code == UNREACHABLE
