"""Cloud TPU nodes: commands, states as they come, what exists, what was taken away. On a fake Google Cloud of files."""

import shlex

import pytest

from lockstep.exits import REFUSED, UNAVAILABLE
from lockstep.launch.backend import LaunchError
from lockstep.launch.gcloud import Gcloud
from lockstep.launch.pod import Wait
from lockstep.launch.slices import slices
from lockstep.launch.tool import ToolError
from lockstep.launch.tpu_vm import TpuVm
from tests.fake_cloud import gcloud
from tests.fake_cloud.google_cloud import QUEUE
from tests.unit.launch.test_pod import ensure


def pod(kind="v6e-16", **values):
    google = Gcloud(project="p", zone="us-east5-a")
    return TpuVm(**{"gcloud": google, "name": "pod", "slice": slices()[kind] if kind else None, **values})


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "--node-id=pod --accelerator-type=v6e-16 --runtime-version=v2-alpha-tpuv6e"),
        ({"capacity": "spot"}, "--spot"),
        ({"capacity": "reserved"}, "--reserved"),
        ({"capacity": "best-effort"}, "gcloud alpha compute tpus queued-resources create pod"),
        ({"kind": "v5p-64"}, "--accelerator-type=v5p-64 --runtime-version=v2-alpha-tpuv5 "),
        ({"kind": "v5litepod-16"}, "--runtime-version=v2-alpha-tpuv5-lite"),
        ({"count": 2}, "--node-count=2 --node-prefix=pod"),
        ({"network": "net", "service_account": "a@b", "internal_ip": True, "runtime_version": "r"},
         "--runtime-version=r --labels=lockstep-launch=yes --network=net --service-account=a@b --internal-ips"),
    ],
)  # fmt: skip
def test_the_command_that_makes_it(google_cloud, values, words):
    (command,) = pod(**values).create_commands()
    assert words in shlex.join(command)
    assert command[-3:] == ["--zone=us-east5-a", "--project=p", "--quiet"]


def test_a_new_one_is_asked_for_and_each_state_is_shown_once(google_cloud):
    google_cloud.queue(["WAITING_FOR_RESOURCES", "WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE"])
    new = pod()
    assert ensure(new) == [
        "pod: asking for v6e-16 (on-demand, 4 hosts) in us-east5-a",
        "pod: WAITING_FOR_RESOURCES",
        "pod: PROVISIONING",
        "pod: ACTIVE, READY",
    ]
    assert [machine.name for machine in new.machines()] == [f"pod worker {i}" for i in range(4)]
    assert len({machine.address for machine in new.machines()}) == 4
    assert new.lost() is None and new.made_here()
    # The second time it is there: nothing is made.
    assert ensure(new) == ["pod: using what exists", "pod: ACTIVE, READY"]
    assert len(google_cloud.calls("queued-resources create")) == 1
    said = []
    new.delete(Wait(say=said.append, timeout_s=60, poll_s=0.01))
    assert said[0].startswith("pod: deleted") and len(said) == 1 and not google_cloud.costs()


def test_two_slices_are_two_nodes_of_one_request(google_cloud):
    both = pod(count=2)
    assert ensure(both)[0] == "pod: asking for 2 × v6e-16 (on-demand, 8 hosts) in us-east5-a"
    assert [(machine.name, machine.slice_id) for machine in both.machines()] == [
        (f"pod-{s} worker {i}", s) for s in (0, 1) for i in range(4)
    ]
    assert [shlex.join(each) for each in both.login_commands(None)] == [
        f"gcloud compute tpus tpu-vm ssh pod-{s} --worker=0 --command=true --zone=us-east5-a --project=p --quiet"
        for s in (0, 1)
    ]
    assert both.ssh_command(5, "ls")[5:8] == ["pod-1", "--worker=1", "--command=ls"]


def test_a_node_that_somebody_made_is_used_and_not_called_ours(google_cloud):
    ensure(pod())
    with google_cloud.change() as state:
        state["requests"].clear()
        state["nodes"]["pod"].update(labels={}, request="")
    found = pod(kind=None)
    assert ensure(found) == ["pod: using what exists", "pod: READY"]
    assert not found.made_here() and len(found.machines()) == 4
    with pytest.raises(LaunchError, match=r"is a v6e-16, but --tpu_type is v5p-16. Leave --tpu_type out"):
        ensure(pod("v5p-16"))


@pytest.mark.parametrize(
    ("text", "cause", "code"),
    [
        ("There is no more capacity in the zone", "capacity", UNAVAILABLE),
        ("Quota limit 'TPUV6E' has been exceeded. Limit: 0 in region us-east5", "quota", REFUSED),
        ("PERMISSION_DENIED: Permission 'tpu.nodes.create' denied", "permission", REFUSED),
        ("Insufficient reserved capacity.", "reservation", REFUSED),
        ("ALREADY_EXISTS: Resource 'nodes/pod' already exists", "exists", REFUSED),
    ],
)
@pytest.mark.parametrize("late", [False, True], ids=["at once", "later"])
def test_a_refusal_is_told_and_leaves_nothing_behind(google_cloud, text, cause, code, late):
    if late:
        google_cloud.queue(["WAITING_FOR_RESOURCES", {"FAILED": text}])
    else:
        google_cloud.reply("queued-resources create", f"ERROR: (gcloud.compute.tpus.queued-resources.create) {text}")
    with pytest.raises(ToolError) as caught:
        ensure(pod())
    assert (caught.value.cause.name, caught.value.code) == (cause, code) and text in str(caught.value)
    # A request that has failed is cleared away by the next start.
    assert ensure(pod())[-1] == "pod: ACTIVE, READY"


def test_a_request_that_somebody_has_deleted_is_not_waited_for(google_cloud):
    google_cloud.queue(["WAITING_FOR_RESOURCES"] * 1000)

    def say(text):
        if "WAITING" in text:
            gcloud.run(["gcloud", "compute", "tpus", "queued-resources", "delete", "pod", "--force"])

    with pytest.raises(LaunchError, match="pod is gone: somebody has deleted it while it was waited for") as caught:
        pod().ensure(Wait(say=say, timeout_s=60, poll_s=0.01))
    assert caught.value.code == REFUSED


def test_a_wait_survives_a_network_that_is_gone_for_a_while(google_cloud):
    google_cloud.queue(["WAITING_FOR_RESOURCES", *QUEUE])

    def say(text):
        said.append(text)
        if text == "pod: WAITING_FOR_RESOURCES" and len(said) == 2:
            google_cloud.reply("describe pod", "ERROR: gcloud crashed (ConnectionError): Max retries exceeded", times=2)

    said: list[str] = []
    pod().ensure(Wait(say=say, timeout_s=60, poll_s=0.01))
    assert any("no answer from Google" in line for line in said) and said[-1] == "pod: ACTIVE, READY"


@pytest.mark.parametrize("whole", [True, False], ids=["request suspended", "node preempted"])
def test_what_was_taken_away_is_seen_and_made_again(google_cloud, whole):
    new = pod(capacity="spot")
    ensure(new)
    before = {machine.host_key_alias for machine in new.machines()}
    google_cloud.preempt("pod")
    if not whole:
        with google_cloud.change() as state:
            state["requests"]["pod"]["state"] = "ACTIVE"
    assert new.lost() == ("queued resource pod is SUSPENDED" if whole else "pod is PREEMPTED")
    with pytest.raises(LaunchError, match="Give --tpu_type"):
        ensure(pod(kind=None))
    said = ensure(new)
    assert said[0].startswith(f"pod: it is {'SUSPENDED' if whole else 'PREEMPTED'}; deleting what is left")
    assert said[1:3] == ["pod: deleted", "pod: asking for v6e-16 (spot, 4 hosts) in us-east5-a"]
    assert said[3:] == ["pod: WAITING_FOR_RESOURCES", "pod: PROVISIONING", "pod: ACTIVE, READY"]
    assert new.lost() is None
    # Other machines have other names for ssh, though their addresses may come back.
    assert not before & {machine.host_key_alias for machine in new.machines()}


def test_a_suspension_while_we_wait_ends_the_wait(google_cloud):
    google_cloud.queue(["WAITING_FOR_RESOURCES", {"SUSPENDED": ""}])
    with pytest.raises(LaunchError, match=r"is SUSPENDED by Google: it has no TPUs any more") as caught:
        ensure(pod())
    assert caught.value.code == UNAVAILABLE


def test_one_that_is_being_deleted_is_waited_for_and_made_anew(google_cloud):
    ensure(pod())
    with google_cloud.change() as state:
        state["requests"]["pod"]["state"] = "DELETING"

    def say(text):
        said.append(text.partition(" after ")[0])
        if "deleting" in text:
            gcloud.run(["gcloud", "compute", "tpus", "queued-resources", "delete", "pod", "--force"])

    said: list[str] = []
    pod().ensure(Wait(say=say, timeout_s=60, poll_s=0.01))
    assert said[:2] == ["pod: deleting (pod)", "pod: deleted"] and said[-1].startswith("pod: ACTIVE, READY")


def test_a_stopped_node_is_not_waited_for(google_cloud):
    ensure(pod())
    with google_cloud.change() as state:
        state["nodes"]["pod"]["state"] = "STOPPED"
    assert pod().lost() == "pod is STOPPED"
    with pytest.raises(LaunchError, match=r"pod is STOPPED. Start it \(gcloud compute tpus tpu-vm start\)"):
        ensure(pod())


def test_a_node_that_is_repaired_is_waited_for(google_cloud):
    ensure(pod())
    with google_cloud.change() as state:
        state["nodes"]["pod"]["state"] = "REPAIRING"
    said = []

    def say(text):
        said.append(text)
        with google_cloud.change() as state:
            state["nodes"]["pod"]["state"] = "READY" if "REPAIRING" in text else state["nodes"]["pod"]["state"]

    pod().ensure(Wait(say=say, timeout_s=60, poll_s=0.01))
    assert said == ["pod: using what exists", "pod: ACTIVE, pod REPAIRING", "pod: ACTIVE, READY"]


def test_machines_without_an_external_address(google_cloud):
    ensure(pod())
    (google_cloud.directory / "internal_only").touch()
    with pytest.raises(LaunchError, match=r"pod worker 0 has no external address.*--internal_ip"):
        pod().machines()
    inside = pod(internal_ip=True)
    assert [machine.address for machine in inside.machines()] == [f"127.0.0.{i + 2}" for i in range(4)]
    assert "--internal-ip" in inside.login_commands(None)[0]
