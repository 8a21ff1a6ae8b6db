"""The objects of a job on GKE, against the models that Kubeflow makes of JobSet's published OpenAPI schema."""

import base64
import shutil
import subprocess

import pytest
from kubeflow_trainer_api import models

from lockstep.exits import EXIT_CODES, is_retried
from lockstep.launch.gke_manifest import GkeJob, config_maps, job_set, pod_script, secret
from lockstep.launch.setup_vm import uv_requirement
from lockstep.launch.slices import slices
from tests.fake_cloud.fake_kubectl import expanded
from tests.fake_cloud.shellcheck import shellcheck


def job(**changes):
    given = {
        "name": "my-job",
        "id": "0123456789abcdef",
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
    files=["sync.tar.gz", "hashes.txt"],
    parts=2,
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
    archive = bytes(range(256)) * 8192
    maps = config_maps(ALL, archive)
    assert [each["metadata"]["name"] for each in maps] == [f"my-job-files-0{index}" for index in range(3)]
    data = {name: base64.b64decode(value) for each in maps for name, value in each["binaryData"].items()}
    assert b"".join(data[name] for name in sorted(data)) == archive and max(map(len, data.values())) < 1 << 20
    for each in (*maps, secret(ALL, {}), job_set(ALL), pod_template(ALL)):
        assert each["metadata"]["labels"]["lockstep/job-id"] == ALL.id
    pod = job_set(ALL)["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert pod["containers"][0]["envFrom"] == [{"secretRef": {"name": "my-job"}}]
    (parts,) = [each["projected"]["sources"] for each in pod["volumes"] if each["name"] == "parts"]
    assert parts == [{"configMap": {"name": f"my-job-files-0{index}"}} for index in range(2)]


def pod_template(given):
    return job_set(given)["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]


def test_a_container_is_privileged_only_where_that_is_asked_for():
    container = pod_template(job())["spec"]["containers"][0]
    assert container["securityContext"] == {"capabilities": {"add": ["SYS_RESOURCE"]}}
    assert "ulimit -l 68719476736" in container["command"][2]
    container = pod_template(job(privileged=True))["spec"]["containers"][0]
    assert container["securityContext"] == {"privileged": True} and "ulimit" not in container["command"][2]


def test_extras_are_one_word_of_the_script(tmp_path):
    given = job(files=["x.whl"], parts=1, requirement="/lockstep/files/x.whl[tpu]'; touch pwned; '")
    text = pod_script(given).replace("/lockstep/", f"{tmp_path}/")
    for name in ("work", "files/uv/bin", "parts"):
        (tmp_path / name).mkdir(parents=True)
    for program in ("python3", "files/uv/bin/uv"):
        (tmp_path / program).write_text('#!/bin/sh\nfor word; do echo "$word"; done\n')
        (tmp_path / program).chmod(0o755)
    subprocess.run(["tar", "-czf", tmp_path / "parts/part-00", "-T", "/dev/null"], check=True)
    words = [shutil.which("bash"), "-c", text, "lockstep", "echo", "ran"]
    done = subprocess.run(words, env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, capture_output=True, text=True)
    words = done.stdout.splitlines()
    assert {"--require-hashes", f"{tmp_path}/files/hashes.txt"} <= {*words}
    assert (tmp_path / "files/uv.txt").read_text() == uv_requirement() + "\n"
    assert words[-3:] == [
        given.requirement.replace("/lockstep/", f"{tmp_path}/"), "lockstep: installed, the command starts", "ran",
    ]  # fmt: skip
    assert not list(tmp_path.rglob("pwned"))


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("$(A)-$(B)", "a-b"),
        ("$(A)-$(NONE)", "a-$(NONE)"),
        ("f000-$$VAR_A", "f000-$VAR_A"),
        ("$$(A)", "$(A)"),
        ("$$$$$$$(A)", "$$$a"),
        ("$A $ $(A $", "$A $ $(A $"),
    ],
)
def test_the_fake_replaces_as_kubernetes_does(text, seen):
    """Cases of its expand_test.go."""
    assert expanded(text, {"A": "a", "B": "b"}) == seen


def test_what_kubernetes_would_replace_is_kept():
    words = ["bash", "-c", "echo $$ $(date) $${x}", "$$(HOME)", "a$$b$"]
    given = job(command=words, environment={"A": "a$$b $(HOME) $$(HOME)"})
    container = pod_template(given)["spec"]["containers"][0]
    known = {"HOME": "/root"}
    assert [expanded(word, known) for word in container["args"]] == words
    assert expanded(container["command"][2], known) == pod_script(given)
    assert [expanded(each["value"], known) for each in container["env"] if each["name"] == "A"] == [
        given.environment["A"]
    ]


@pytest.mark.parametrize("given", [job(), ALL], ids=["plain", "all"])
def test_shellcheck_finds_nothing_in_the_script_of_a_pod(given):
    assert shellcheck("#!/bin/bash\n" + pod_script(given)) == ""
