"""gcloud: command lines, and what its errors mean. The texts are what gcloud printed to users; see the module."""

import pytest

from lockstep.exits import REFUSED, UNAVAILABLE, UNREACHABLE
from lockstep.launch.gcloud import CAUSES, Gcloud
from lockstep.launch.tool import ToolError
from tests.fake_cloud.google_cloud import Cloud

CAPACITY = """Waiting for operation [projects/p/locations/us-central1-b/operations/operation-1756] to complete...failed.
ERROR: (gcloud.compute.tpus.tpu-vm.create) {
  "code": 8,
  "message": "There is no more capacity in the zone \"us-central1-b\"; you can try in another zone where Cloud TPU
Nodes are offered (see https://cloud.google.com/tpu/docs/regions) [EID: 0xe1d1ce9f2eae7a03]"
}"""
STOCKOUT = """ERROR: (gcloud.compute.instances.create) Could not fetch resource:
---
code: ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS
message: The zone 'projects/p/zones/us-central1-b' does not have enough resources available to fulfill the request."""
QUOTA = """ERROR: (gcloud.compute.tpus.tpu-vm.create) HttpError accessing <https://tpu.googleapis.com/v2/projects/p>:
response: <{'status': 429}>, content <{ "error": { "code": 429, "message": "Quota limit
'TPUV5sLitepodServingPerProjectPerZoneForTPUAPI' has been exceeded. Limit: 4 in zone us-east5-a." } }>
This may be due to network connectivity issues. Please check your network settings, and the status of the service."""
COMPUTE_QUOTA = """ERROR: (gcloud.compute.instances.create) Could not fetch resource:
 - Quota 'TPUS_PER_TPU_FAMILY' exceeded. Limit: 0.0 in region us-east5."""
ZONE = """ERROR: (gcloud.compute.tpus.tpu-vm.create) PERMISSION_DENIED: Permission denied on 'locations/us-central2-b'
(or it may not exist). This command is authenticated as a@example.com which is the active account."""
KIND = """ERROR: (gcloud.alpha.compute.tpus.queued-resources.create) INVALID_ARGUMENT: Cloud TPU received a bad
request. The requested accelerator configuration for accelerator type, "v6e-4", could not be found in the zonal
accelerator configurations for "asia-east1-a".; the accelerator v6e-4 was not found in zone asia-east1-a [EID: 0xada]"""
API = """ERROR: (gcloud.compute.tpus.queued-resources.create) PERMISSION_DENIED: Cloud TPU API has not been used in
project 1021909506 before or it is disabled. Enable it by visiting https://console.developers.google.com then retry."""
CRASH = "ERROR: gcloud crashed (ConnectionError): Max retries exceeded with url"
UNAVAILABLE_503 = "HttpError accessing <https://tpu.googleapis.com>: response: <{'status': 503}>, content <>"
BAD_ZONE = 'INVALID_ARGUMENT: Cloud TPU received a bad request. The requested zone "asia-south1-a" is not supported.'
TAKEN = " - The resource 'projects/p/zones/z/instanceGroupManagers/pod' already exists"
NO_GROUP = " - The resource 'projects/p/zones/us-east5-a/instanceGroupManagers/pod' was not found"
NO_PROJECT = "ERROR: (gcloud.compute) The required property [project] is not currently set."
NO_ROLE = "PERMISSION_DENIED: Permission 'tpu.nodes.create' denied on resource"

CASES = [
    (CAPACITY, "capacity", UNAVAILABLE, "another --zone"),
    (STOCKOUT, "capacity", UNAVAILABLE, "another --zone"),
    (QUOTA, "quota", REFUSED, "iam-admin/quotas in project my-project "),
    (COMPUTE_QUOTA, "quota", REFUSED, "smaller --tpu_type"),
    ("RATE_LIMIT_EXCEEDED: Maximum number of CreateNode requests per minute", "rate", UNREACHABLE, "a minute"),
    ('{"code": 9, "message": "Insufficient reserved capacity. Contact"}', "reservation", REFUSED, "reservations list"),
    ('{ "code": 5, "message": "Reservation not found" }', "reservation", REFUSED, "--capacity_type"),
    (NO_ROLE, "permission", REFUSED, "roles/tpu.admin"),
    (" - Required 'compute.instanceGroupManagers.create' permission for 'projects/p'", "permission", REFUSED, "roles/"),
    (API, "api", REFUSED, "gcloud services enable tpu.googleapis.com"),
    ("API [tpu.googleapis.com] not enabled on project [p].", "api", REFUSED, "gcloud services enable"),
    ("ERROR: You do not currently have an active account selected.", "login", REFUSED, "gcloud auth login"),
    ("There was a problem refreshing your current auth tokens: x", "login", REFUSED, "gcloud auth login"),
    (NO_PROJECT, "project", REFUSED, "--project"),
    ("ALREADY_EXISTS: Resource 'projects/p/locations/z/nodes/pod' already exists", "exists", REFUSED, "--tpu_name"),
    (TAKEN, "exists", REFUSED, "--tpu_name"),
    (KIND, "type", REFUSED, "accelerator-types list --zone us-east5-a"),
    (BAD_ZONE, "type", REFUSED, "regions-zones"),
    (" - This user agent is not allowed to use the machine type [ct5lp-hightpu-1t].", "type", REFUSED, "tpu-vm"),
    (ZONE, "type", REFUSED, "regions-zones"),
    ("NOT_FOUND: Resource 'projects/p/locations/z/nodes/pod' was not found", "gone", REFUSED, "--tpu_name"),
    (NO_GROUP, "gone", REFUSED, "--zone"),
    ("ERROR: (gcloud.x.ssh) [/usr/bin/ssh] exited with return code [255].", "ssh", UNREACHABLE, "--internal_ip"),
    ("alice@34.1.2.3: Permission denied (publickey).", "ssh", UNREACHABLE, "firewall-rules"),
    (CRASH, "network", UNREACHABLE, "connection"),
    (UNAVAILABLE_503, "network", UNREACHABLE, "connection"),
    ("ERROR: something that nobody has seen", "unknown", REFUSED, "by hand"),
]


@pytest.mark.parametrize(("text", "name", "code", "advice"), CASES)
def test_an_error_says_its_cause_and_what_to_try(text, name, code, advice):
    error = Gcloud(zone="us-east5-a", project="my-project").error(["gcloud", "compute", "x"], text)
    assert (error.cause.name, error.code) == (name, code)
    assert advice in str(error) and "$ gcloud compute x" in str(error)
    assert text.splitlines()[-1].strip() in str(error), "what gcloud said is shown"
    assert "{zone}" not in str(error) and "{project}" not in str(error)


def test_every_cause_is_tested():
    assert {cause.name for cause in CAUSES} == {name for _, name, _, _ in CASES} - {"unknown"}


def test_command_lines():
    gcloud = Gcloud(project="p", zone="us-east5-a")
    assert gcloud.command("compute", "x") == [
        "gcloud", "compute", "x", "--zone=us-east5-a", "--project=p", "--quiet",
    ]  # fmt: skip
    assert gcloud.command("x", place="region")[2:] == ["--region=us-east5", "--project=p", "--quiet"]
    assert Gcloud(zone="us-east5-a").command("x", place="") == ["gcloud", "x", "--quiet"]


def test_what_is_there_and_what_is_not(tmp_path, monkeypatch):
    cloud = Cloud(tmp_path / "cloud")
    cloud.install(tmp_path / "bin")
    monkeypatch.setenv("FAKE_GOOGLE", str(cloud.directory))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    gcloud = Gcloud(zone="us-east5-a")
    assert gcloud.read("compute", "tpus", "tpu-vm", "describe", "pod") is None
    cloud.reply("describe pod", "PERMISSION_DENIED: no")
    with pytest.raises(ToolError, match="the account may not do this"):
        gcloud.read("compute", "tpus", "tpu-vm", "describe", "pod")
    assert gcloud.configured_project() == "fake-project"
    with pytest.raises(ToolError, match="unrecognized arguments: --zoom"):
        gcloud.run(["gcloud", "compute", "tpus", "tpu-vm", "describe", "pod", "--zoom=3"])
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ToolError, match=r"(?s)no gcloud command on this machine.*docs/install") as caught:
        gcloud.read("compute", "tpus", "tpu-vm", "describe", "pod")
    assert caught.value.code == REFUSED
