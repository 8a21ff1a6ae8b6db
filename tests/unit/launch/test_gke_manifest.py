"""The objects of a job on GKE, against the models that Kubeflow makes of JobSet's published OpenAPI schema."""

import base64

import pytest
from kubeflow_trainer_api import models

from lockstep.exit_codes import EXIT_CODES, is_retried
from lockstep.launch.gke_manifest import GkeJob, config_map, job_set, pod_script, secret
from lockstep.slices import slices
from tests.fake_cloud.shellcheck import shellcheck


def job(**changes):
    given = {
        "name": "my-job",
        "slice": slices()["v5p-64"],
        "slices": 1,
        "command": ["lockstep", "sample"],
        "image": "i",
    }
    return GkeJob(**{**given, **changes})


ALL = job(
    slices=2,
    environment={"A": "b $(c)"},
    secret_names=["HF_TOKEN"],
    files=["sync.tar.gz", "constraints.txt"],
    requirement="/lockstep/files/x.whl[tpu]",
    retries=3,
    spot=True,
    reservation="mine",
    queue="team",
    service_account="bucket-reader",
)


def read_back(model, manifest):
    """The manifest as the schema's model has it: fields that it does not know are lost, wrong types raise."""
    return model.from_dict(manifest).to_dict()


@pytest.mark.parametrize("given", [job(), ALL], ids=["plain", "all"])
def test_the_manifest_has_only_fields_of_the_schema_with_their_types(given):
    manifest = job_set(given)
    assert read_back(models.JobsetV1alpha2JobSet, manifest) == manifest


def test_a_field_that_the_schema_does_not_know_is_seen():
    manifest = job_set(job())
    manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["backofLimit"] = 0
    assert read_back(models.JobsetV1alpha2JobSet, manifest) != manifest
    manifest = job_set(job())
    manifest["spec"]["failurePolicy"]["maxRestarts"] = "3"
    with pytest.raises(ValueError, match="maxRestarts"):
        models.JobsetV1alpha2JobSet.from_dict(manifest)


@pytest.mark.parametrize(
    ("name", "accelerator", "topology", "hosts", "chips"),
    [
        ("v5p-64", "tpu-v5p-slice", "2x4x4", 8, 4),
        ("v6e-8", "tpu-v6e-slice", "2x4", 1, 8),
        ("v6e-16", "tpu-v6e-slice", "4x4", 4, 4),
        ("v5litepod-16", "tpu-v5-lite-podslice", "4x4", 4, 4),
        ("v4-16", "tpu-v4-podslice", "2x2x2", 2, 4),
    ],
)
def test_nodes_of_a_slice(name, accelerator, topology, hosts, chips):
    spec = job_set(job(slice=slices()[name], slices=2))["spec"]["replicatedJobs"][0]
    pod = spec["template"]["spec"]["template"]["spec"]
    assert spec["replicas"] == 2 and spec["template"]["spec"]["completions"] == hosts
    assert pod["nodeSelector"]["cloud.google.com/gke-tpu-accelerator"] == accelerator
    assert pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"] == topology
    assert pod["containers"][0]["resources"]["limits"] == {"google.com/tpu": chips}


def test_what_another_try_cannot_cure_ends_the_job_set():
    """Any code that the table does not retry fails the Job by its policy, for which the JobSet has a rule too."""
    manifest = job_set(job(retries=3))
    rules = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["podFailurePolicy"]["rules"]
    assert rules[0] == {"action": "Count", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    codes = rules[1]["onExitCodes"]
    assert (rules[1]["action"], codes["operator"]) == ("FailJob", "NotIn")
    assert {code for code in EXIT_CODES if is_retried(code)} == set(codes["values"])
    assert manifest["spec"]["failurePolicy"]["maxRestarts"] == 3
    (rule,) = manifest["spec"]["failurePolicy"]["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])


def test_the_secret_and_the_files():
    assert base64.b64decode(secret(ALL, {"HF_TOKEN": "hf_x"})["data"]["HF_TOKEN"]) == b"hf_x"
    assert base64.b64decode(config_map(ALL, {"a.txt": b"\x00"})["binaryData"]["a.txt"]) == b"\x00"
    pod = job_set(ALL)["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert pod["containers"][0]["envFrom"] == [{"secretRef": {"name": "my-job"}}]
    assert {"name": "files", "configMap": {"name": "my-job"}} in pod["volumes"]


def test_what_kubernetes_would_replace_is_kept():
    pod = job_set(job(command=["echo", "$(HOME)"], environment={"A": "$(B)"}))["spec"]["replicatedJobs"][0]
    container = pod["template"]["spec"]["template"]["spec"]["containers"][0]
    assert container["args"] == ["echo", "$$(HOME)"] and {"name": "A", "value": "$$(B)"} in container["env"]


@pytest.mark.parametrize("given", [job(), ALL], ids=["plain", "all"])
def test_shellcheck_finds_nothing_in_the_script_of_a_pod(given):
    assert shellcheck("#!/bin/bash\n" + pod_script(given)) == ""
