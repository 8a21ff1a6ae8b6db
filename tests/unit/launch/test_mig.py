"""Managed instance groups: commands, states as they come, what was taken away. On a fake Google Cloud of files."""

import json
import re
import shlex

import pytest

from lockstep.exits import REFUSED
from lockstep.launch.backend import LaunchError
from lockstep.launch.gcloud import Gcloud
from lockstep.launch.mig import Mig
from lockstep.launch.pod import Wait
from lockstep.launch.slices import slices
from lockstep.launch.tool import ToolError
from tests.unit.launch.test_pod import ensure


def mig(kind="v6e-16", machine_type="ct6e-standard-4t", **values):
    google = Gcloud(project="p", zone="us-east5-a")
    kind = slices()[kind] if kind else None
    return Mig(**{"gcloud": google, "name": "pod", "slice": kind, "machine_type": machine_type, **values})


def test_the_commands_that_make_it(google_cloud):
    lines = [shlex.join(command) for command in mig(capacity="spot").create_commands()]
    assert lines == [
        "gcloud compute resource-policies create workload-policy pod --type=HIGH_THROUGHPUT --accelerator-topology=4x4 "
        "--description=lockstep-launch --region=us-east5 --project=p --quiet",
        "gcloud compute instance-templates create pod --machine-type=ct6e-standard-4t "
        "--image-family=ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e --image-project=ubuntu-os-accelerator-images "
        "--boot-disk-size=200GB --maintenance-policy=TERMINATE --scopes=cloud-platform --labels=lockstep-launch=yes "
        "--provisioning-model=SPOT --instance-termination-action=STOP --project=p --quiet",
        "gcloud compute instance-groups managed create pod --size=4 --template=pod --description=lockstep-launch "
        "--default-action-on-vm-failure=do-nothing --target-size-policy-mode=bulk "
        "--workload-policy=projects/p/regions/us-east5/resourcePolicies/pod --zone=us-east5-a --project=p --quiet",
    ]
    reserved = mig(capacity="reserved", reservation="mine", network="net", service_account="a@b", internal_ip=True)
    template = shlex.join(reserved.create_commands()[1])
    assert "RESERVATION_BOUND --reservation-affinity=specific --reservation=mine --network=net" in template
    assert "--service-account=a@b --no-address" in template
    tpu7x = [shlex.join(each) for each in mig("tpu7x-128", "tpu7x-standard-4t").create_commands()]
    assert "--accelerator-topology=4x4x4" in tpu7x[0] and "ubuntu-accel-2404-amd64-tpu-tpu7x" in tpu7x[1]
    assert "--size=16" in tpu7x[2]


def test_one_machine_needs_no_shape_and_no_bulk_mode(google_cloud):
    template, group = (shlex.join(each) for each in mig("v6e-8", "ct6e-standard-8t").create_commands())
    assert "--size=1" in group and "bulk" not in group and "workload-policy" not in group + template
    assert mig("v6e-8", "ct6e-standard-4t").hosts == 2


def test_without_a_project_it_is_that_of_gclouds_configuration(google_cloud):
    google = Gcloud(zone="us-east5-a")
    assert "projects/fake-project/regions" in shlex.join(mig(gcloud=google).create_commands()[-1])


def test_a_new_one_is_made_and_all_of_it_deleted(google_cloud):
    new = mig()
    assert ensure(new) == [
        "pod: asking for v6e-16 (on-demand, 4 × ct6e-standard-4t) in us-east5-a",
        "pod: 4 PENDING",
        "pod: 4 STAGING",
        "pod: 4 RUNNING",
    ]
    names = [machine.name for machine in new.machines()]
    assert names == sorted(names) and len(names) == 4 and new.made_here() and new.lost() is None
    assert ensure(new) == ["pod: using what exists", "pod: 4 RUNNING"]
    said = []
    new.delete(Wait(say=said.append, timeout_s=60, poll_s=0.01))
    assert said == ["pod: deleted"] and google_cloud.costs() == []
    new.delete(Wait(say=said.append, timeout_s=60, poll_s=0.01))  # a second time


def test_two_slices_are_two_groups_of_one_template(google_cloud):
    both = mig(count=2)
    assert len(both.create_commands()) == 4
    ensure(both)
    assert [machine.slice_id for machine in both.machines()] == [0] * 4 + [1] * 4
    assert google_cloud.read()["groups"].keys() == {"pod-0", "pod-1"}


def test_what_exists_is_used_unless_it_is_another_kind(google_cloud):
    ensure(mig())
    assert ensure(mig(kind=None, machine_type=""))[0] == "pod: using what exists"
    with pytest.raises(LaunchError, match=r"has 4 × ct6e-standard-4t, but --tpu_type v6e-8 is 1 × ct6e-standard-8t"):
        ensure(mig("v6e-8", "ct6e-standard-8t"))
    with google_cloud.change() as state:
        state["groups"]["pod"]["description"] = ""
    assert not mig().made_here()


@pytest.mark.parametrize("step", ["resource-policies create", "instance-templates create", "managed create"])
def test_a_refusal_at_any_step_leaves_nothing_behind(google_cloud, step):
    google_cloud.reply(step, " - Quota 'TPUS_PER_TPU_FAMILY' exceeded. Limit: 0.0 in region us-east5.")
    with pytest.raises(ToolError, match="quota for this kind of TPU is used up") as caught:
        ensure(mig())
    assert caught.value.code == REFUSED and google_cloud.costs() == []


def test_an_error_of_the_group_ends_the_wait_or_is_shown(google_cloud):
    errors = google_cloud.directory / "group_errors.json"
    stockout = {"code": "ZONE_RESOURCE_POOL_EXHAUSTED", "message": "does not have enough resources available"}
    errors.write_text(json.dumps([stockout]))
    said = ensure(mig())
    assert said[1] == "pod: 4 PENDING (the zone has no free TPUs of this kind at the moment)" and len(said) == 4
    mig().delete(Wait(say=said.append, timeout_s=60, poll_s=0.01))
    errors.write_text(json.dumps([{"code": "QUOTA_EXCEEDED", "message": "Quota 'TPUS' exceeded. Limit: 0.0"}]))
    with pytest.raises(ToolError, match="quota for this kind of TPU is used up"):
        ensure(mig())
    assert google_cloud.costs() == []


def test_what_others_made_under_the_name_is_never_deleted(google_cloud):
    with google_cloud.change() as state:
        state["templates"]["pod"] = {"machineType": "n2-standard-4", "labels": {}}
    with pytest.raises(ToolError, match="the name is taken"):
        ensure(mig())
    assert google_cloud.costs() == ["templates"], "theirs is there, and nothing of ours"
    with google_cloud.change() as state:
        state["templates"].clear()
    ensure(mig())
    google_cloud.preempt("pod")
    with google_cloud.change() as state:
        state["groups"]["pod"]["description"] = "somebody's"
    with pytest.raises(LaunchError, match=r"is TERMINATED, and group pod was not made by this launcher"):
        ensure(mig())
    assert google_cloud.read()["groups"]


def test_what_was_taken_away_is_seen_and_made_again(google_cloud):
    new = mig(capacity="spot")
    ensure(new)
    before = {machine.host_key_alias for machine in new.machines()}
    google_cloud.preempt("pod")
    assert re.fullmatch(r"pod-\w+ is TERMINATED", new.lost() or "")
    with pytest.raises(LaunchError, match="Give --tpu_type"):
        ensure(mig(kind=None, machine_type=""))
    said = ensure(new)
    assert "is TERMINATED: deleting what is left of pod" in said[0] and said[-1] == "pod: 4 RUNNING"
    assert new.lost() is None and not before & {machine.host_key_alias for machine in new.machines()}
    with google_cloud.change() as state:
        state["instances"].popitem()
    assert new.lost() == "group pod has 3 of 4 machines"
    with google_cloud.change() as state:
        del state["groups"]["pod"]
    assert new.lost() == "group pod is gone"


def test_how_people_reach_a_worker(google_cloud):
    ensure(mig())
    first, second, line = mig().ssh_command(1, "echo 'a b'")
    assert (first, second) == ("sh", "-c") and "| sed -n 2p)" in line and line.startswith("gcloud compute ssh ")
    assert shlex.split(line)[-4:] == ["--command=echo 'a b'", "--zone=us-east5-a", "--project=p", "--quiet"]
    assert mig().login_commands(None) == []
    (login,) = mig(internal_ip=True).login_commands(mig().machines())
    assert login[:3] == ["gcloud", "compute", "ssh"] and login[-1] == "--quiet" and "--internal-ip" in login
