"""`lockstep launch --backend tpu-vm` as a user starts it: real processes on the machines of a fake Google Cloud."""

import signal
from pathlib import Path

import pytest

from lockstep.errors import ConfigError
from lockstep.exits import INTERRUPTED, PREFLIGHT, REFUSED, SETUP_FAILED
from lockstep.launch import BACKENDS, parse
from lockstep.launch.google import GoogleBackend
from lockstep.launch.mig import Mig
from lockstep.launch.tpu_vm import TpuVm
from tests.fake_cloud.laptop import Laptop

SLICE = ["--tpu_name", "pod", "--tpu_type", "v6e-16", "--zone", "us-east5-a", "--project", "p", "--poll_s", "0.05"]
TWO_HOSTS = ["--tpu_type", "v5p-16"]
SECRET = "hf_very_secret_token_0123456789"


@pytest.fixture
def laptop(tmp_path):
    found = Laptop(tmp_path)
    yield found
    found.close()


def run(laptop: Laptop, program: str, *options: str, code: int = 0) -> str:
    return laptop.launch(*SLICE, "--setup", "none", *options, "--", "sh", "-c", program, code=code)


def ordered(output: str, *texts: str) -> None:
    """Every text is there, after the one before."""
    at = -1
    for text in texts:
        found = output.find(text, at + 1)
        assert found > at, f"{text!r} is not there, or too early:\n{output}"
        at = found


@pytest.mark.slow
def test_from_nothing_to_a_run_on_all_workers_and_back(laptop):
    program = 'echo "$FAKE_WORKER of $REQUIRE_JAX_PROCESS_COUNT, multi $REQUIRE_MULTIHOST, $(cat ~/.mark 2>/dev/null)"'
    laptop.cloud.reply("tpu-vm ssh", "ERROR: (gcloud.compute.tpus.tpu-vm.ssh) [ssh] exited with return code [255].")
    output = run(
        laptop,
        f"{program}; echo port $JAX_COORDINATOR_PORT $LOCKSTEP_LIVENESS_PORT",
        *TWO_HOSTS,
        *("--capacity_type", "spot"),
    )
    ordered(
        output, "pod: asking for v5p-16 (spot, 2 hosts) in us-east5-a", "pod: WAITING_FOR_RESOURCES",
        "pod: PROVISIONING", "pod: ACTIVE, READY", "pod: ssh does not answer yet",
        "pod: 2 workers, user alice_example_com",
        "costs money until: lockstep launch delete pod", "starting on 2 worker(s)",
    )  # fmt: skip
    for i in range(2):
        assert f"[{i}] {i} of 2, multi 1, " in output
        assert f"[{i}] port 8476 11211" in output, "others are closed by Google's rule"
        (laptop.cloud.home(f"pod worker {i}") / ".mark").write_text("here before")
    # Again: the same machines.
    output = run(laptop, program, *TWO_HOSTS, "--require-process-count", "2")
    assert output.count("here before") == 2 and "asking for" not in output
    assert len(laptop.cloud.calls("queued-resources create")) == 1
    assert "exit code 0, done" in laptop.launch("status", "pod")
    assert "pod: deleted" in laptop.launch("delete", "pod")
    assert not laptop.cloud.read()["requests"] and not laptop.cloud.read()["machines"]


@pytest.mark.slow
def test_what_was_preempted_is_made_again_and_the_command_started_again(laptop):
    program = """
        file=~/../starts$FAKE_WORKER; echo start >> $file; echo "start $(wc -l < $file)"
        if [ "$(wc -l < $file)" = 1 ]; then sleep 600; fi
    """
    options = [*TWO_HOSTS, "--setup", "none", "--retries", "1", "--capacity_type", "spot"]
    process = laptop.start(*SLICE, *options, "--", "sh", "-c", program)
    output = laptop.read_until(process, "start 1", times=2)
    laptop.cloud.preempt("pod")
    output += process.communicate(timeout=300)[0]
    assert process.returncode == 0, output
    ordered(
        output, "start 1", "queued resource pod is SUSPENDED", "trying again in", "it is SUSPENDED; deleting what",
        "pod: deleted", "pod: asking for", "start 2",
    )  # fmt: skip
    attempts = sorted(path.name for path in (laptop.directory / "jobs" / "pod").glob("attempt-*"))
    assert attempts == ["attempt-1", "attempt-2"], "the logs of both are kept"


def test_what_google_refuses_has_an_exit_code_and_advice(laptop):
    text = "Quota limit 'TPUV6E' has been exceeded. Limit: 0 in region us-east5."
    laptop.cloud.reply("queued-resources create", f"ERROR: (gcloud.x) {text}")
    output = run(laptop, "true", code=REFUSED)
    assert "iam-admin/quotas in project p " in output and text in output and "Traceback" not in output


@pytest.mark.slow
def test_what_dry_run_prints_can_be_pasted(laptop):
    printed = run(laptop, 'echo "hello from $FAKE_WORKER"', *TWO_HOSTS, "--dry-run")
    assert not laptop.cloud.calls(), "nothing was asked"
    assert sorted(laptop.paste(printed).split("\n"))[1:] == ["hello from 0", "hello from 1"]


@pytest.mark.nightly  # in make slow: the tests around it
def test_a_port_of_worker_0_that_the_network_closes_is_found_before_the_start(laptop):
    run(laptop, "true", *TWO_HOSTS)
    with laptop.cloud.change() as state:
        for machine in state["machines"].values():
            machine["internal"] = "255.255.255.255"  # where no system connects to
    output = run(laptop, "echo began", *TWO_HOSTS, "--env", "JAX_COORDINATOR_PORT=8482", code=PREFLIGHT)
    assert (
        "worker pod worker 1: it cannot reach 255.255.255.255:8482" in output
        and "worker pod worker 0: it" not in output
    )
    assert "Google's rule for new networks opens 8470, 8471, 8474, 8476 and 11211" in output
    assert "gcloud compute firewall-rules create lockstep-8482 " in output and "[0] began" not in output


def test_ctrl_c_while_waiting_leaves_no_request_behind(laptop):
    laptop.cloud.queue(["WAITING_FOR_RESOURCES"] * 10000)
    process = laptop.start(*SLICE, "--setup", "none", "--", "true")
    output = laptop.read_until(process, "WAITING_FOR_RESOURCES")
    process.send_signal(signal.SIGINT)
    output += process.communicate(timeout=300)[0]
    assert process.returncode == INTERRUPTED and "withdrawing the request" in output, output
    assert not laptop.cloud.read()["requests"]


@pytest.mark.slow
def test_two_slices_are_told_what_megascale_needs(laptop):
    program = 'echo "$MEGASCALE_COORDINATOR_ADDRESS $MEGASCALE_PORT $MEGASCALE_NUM_SLICES $MEGASCALE_SLICE_ID."'
    output = run(laptop, program, "--slices", "2", "--tpu_type", "v5p-16")
    for i in range(4):
        assert f"[{i}] 127.0.0.2:8080 8080 2 {i // 2}." in output


@pytest.mark.nightly  # on GKE, in make slow: tests/unit/launch/test_gke.py
@pytest.mark.parametrize("backend", ["tpu-vm", "mig"])
def test_with_a_slice_less_the_same_command_goes_on_and_the_next_start_asks_for_all_again(laptop, backend):
    laptop.add_metadata_server()
    program = """
        echo "slices ${MEGASCALE_NUM_SLICES:-one}, id ${MEGASCALE_SLICE_ID:-none}, of $REQUIRE_JAX_PROCESS_COUNT"
        if [ $LOCKSTEP_RESTARTS = 0 ] && [ ! -e ~/../again ]; then sleep 600; fi
    """
    options = ["--backend", backend, "--slices", "1-2", "--tpu_type", "v5p-16", "--capacity_type", "spot",
               "--retries", "1", "--grace_s", "1", "--setup", "none"]  # fmt: skip
    process = laptop.start(*SLICE, *options, "--", "sh", "-c", program)
    output = laptop.read_until(process, "slices 2, id ", times=4)
    laptop.cloud.reply(
        "managed create pod-0 " if backend == "mig" else "resources create pod-0 ",
        "ERROR: There is no more capacity in the zone",
    )
    laptop.cloud.preempt("pod-0")
    output += process.communicate(timeout=300)[0]
    assert process.returncode == 0, output
    ordered(output, "trying again in", "going on with 1 of 2 slices, the next start asks for 2 again: the zone has no",
            "slices one, id none, of 2")  # fmt: skip
    state = laptop.cloud.read()
    assert "pod-0" not in state["requests"] and "pod-0" not in state["groups"], "it costs nothing"
    # The same command again: two.
    (Path(next(iter(state["machines"].values()))["home"]).parent / "again").touch()
    output = laptop.launch(*SLICE, *options, "--", "sh", "-c", program)
    assert output.count("slices 2, id 0, of 4") == output.count("slices 2, id 1, of 4") == 2
    laptop.launch("delete", "pod")
    assert not laptop.cloud.read()["machines"]


@pytest.mark.slow
def test_the_package_is_installed_once(laptop):
    """The script runs as on a machine; uv is a stand-in that makes an environment with a program in it."""
    tools = laptop.directory / "bin"
    (tools / "uv").write_text(UV)
    (tools / "uv").chmod(0o755)
    output = laptop.launch(*SLICE, "--tpu_type", "v5p-16", "--", "lockstep", "train")
    assert output.count("[0] trained with") == 1 and output.count("[1] trained with") == 1
    ordered(output, "[0] setup: installing 0.2.0-", "[0] setup: 0.2.0-", "is ready", "[0] trained with")
    versions = laptop.cloud.home("pod worker 0") / ".lockstep" / "versions"
    (version,) = versions.iterdir()
    assert (version / "ready").exists()
    installed = (version / "installed").read_text()
    assert "jax_lockstep-0.2.0-py3-none-any.whl[tpu,gcs,wandb,parquet]" in installed and "jax==" in installed
    again = laptop.launch(*SLICE, "--tpu_type", "v5p-16", "--", "lockstep", "train")
    assert "is there already" in again and "installing" not in again
    # An installation that was interrupted is made again; one that fails names the worker and shows why.
    (version / "ready").unlink()
    (laptop.cloud.home("pod worker 0") / "broken").touch()
    failed = laptop.launch(*SLICE, "--tpu_type", "v5p-16", "--", "lockstep", "train", code=SETUP_FAILED)
    assert "installing" in failed and "pod worker 0" in failed and "No solution found" in failed


UV = """#!/bin/sh
case "$1 $2" in
  "build --quiet") mkdir -p "$5" && echo wheel > "$5/jax_lockstep-0.2.0-py3-none-any.whl" ;;
  "venv --quiet")
    for last; do :; done
    mkdir -p "$last/bin"
    printf '#!/bin/sh\\necho trained with $0 $@\\n' > "$last/bin/lockstep"
    chmod +x "$last/bin/lockstep" ;;
  "pip install")
    if [ -e ~/broken ]; then echo "No solution found"; exit 1; fi
    for last; do :; done
    ls "${last%%[*}" >/dev/null
    { echo "$last"; cat constraints.txt; } > "$(dirname "$5")/../../installed" ;;
esac
"""


@pytest.mark.slow
def test_an_environment_that_is_there_is_used_as_it_is(laptop):
    programs = laptop.directory / "venv" / "bin"
    programs.mkdir(parents=True)
    (programs / "lockstep").write_text("#!/bin/sh\necho I was here before\n")
    (programs / "lockstep").chmod(0o755)
    output = laptop.launch(*SLICE, *TWO_HOSTS, "--venv", str(programs.parent), "--", "lockstep", "train")
    assert output.count("I was here before") == 2 and "setting up" not in output


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--tpu_type", "v6e-17"], "--tpu_type is 'v6e-17', which is not the name of a slice. Known: v6e-1, v6e-4,"),
        (["--tpu_type", "tpu8i-8"], "Google documents no slices and machine types of TPU 8i (2026-11-28). Make the"),
        (["--tpu_type", "h100-8"], "names begin with v4, v5p, v5litepod, v6e, tpu7x"),
        (["--tpu_type", "tpu7x-8"], "which the Cloud TPU API does not have. Use --backend mig"),
        (["--zone", ""], "--zone is not given; backend tpu-vm needs it. Add it: --zone us-east5-a"),
        (["--zone", "us-east5"], "--zone is 'us-east5', which is not the name of a zone such as us-east5-a"),
        (["--setup", "none", "--env", "JAX_COORDINATOR_PORT=any"], "JAX_COORDINATOR_PORT is 'any'; it must be a port"),
        (["--slices", "1-2", "--tpu_type", ""], "--slices 1-2 needs --tpu_type: a slice that was lost is asked for"),
        (["--slices", "1-2", "--require-process-count", "8"], "no one number of processes: leave --require-process"),
        (["--tpu_name", "My_Pod"], "--tpu_name is 'My_Pod'; it must begin with a lower-case letter"),
    ],
)  # fmt: skip
def test_wrong_options(words, text):
    options = parse(["--backend", "tpu-vm", *SLICE, *words, "--", "x"], BACKENDS)
    with pytest.raises(ConfigError) as caught:
        GoogleBackend(TpuVm).dry_run(options)
    assert text in str(caught.value)


MIG_SLICE = ["--backend", "mig", "--tpu_name", "pod", "--zone", "us-east5-a", "--project", "p", "--poll_s", "0.05"]


@pytest.mark.nightly  # in make slow: the slices above
def test_two_slices_find_each_other_at_the_machine_that_google_counts_first(laptop):
    """The names of a group's machines say nothing about their numbers: each machine is asked for its own."""
    laptop.add_metadata_server()
    program = 'echo "$FAKE_WORKER_NUMBER $MEGASCALE_COORDINATOR_ADDRESS $MEGASCALE_NUM_SLICES $MEGASCALE_SLICE_ID."'
    output = laptop.launch(
        *MIG_SLICE, "--tpu_type", "v5p-16", "--slices", "2", "--setup", "none", "--", "sh", "-c", program
    )
    assert "pod: 4 STAGING" in output and "pod: 4 RUNNING" in output and "4 workers" in output
    machines = laptop.cloud.read()["machines"].values()
    (first,) = (each for each in machines if (each["slice"], each["worker"]) == (0, 0))
    for slice_id in (0, 1):
        for worker in range(2):
            assert output.count(f"{worker} {first['internal']}:8080 2 {slice_id}.") == 1
    names = sorted(each["name"] for each in machines if each["slice"] == 0)
    assert names[0] != first["name"], "else the test shows nothing"
    laptop.launch("delete", "pod")
    state = laptop.cloud.read()
    assert not any(state[kind] for kind in ("policies", "templates", "groups", "instances", "machines"))


@pytest.mark.nightly
def test_slices_whose_machines_do_not_say_their_number_are_refused(laptop):
    output = laptop.launch(
        *MIG_SLICE, "--tpu_type", "v5p-16", "--slices", "2", "--setup", "none", "--", "true", code=1
    )  # fmt: skip
    assert "no machine of the first slice says that it is number 0" in output


@pytest.mark.slow
def test_what_dry_run_of_mig_prints_can_be_pasted(laptop):
    words = [*"--tpu_type v5p-16 --setup none --dry-run -- sh -c".split(), 'echo "hello $FAKE_WORKER_NUMBER"']
    printed = laptop.launch(*MIG_SLICE, *words)
    assert not laptop.cloud.calls(), "nothing was asked"
    assert sorted(laptop.paste(printed).split("\n"))[1:] == ["hello 0", "hello 1"]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--tpu_type", "v5litepod-8"], "which Compute Engine does not have. Use --backend tpu-vm"),
        (
            ["--tpu_type", "v6e-8", "--machine_type", "ct6e-standard-1t"],
            "choose from ct6e-standard-4t, ct6e-standard-8t",
        ),
        (["--tpu_type", "v6e-8", "--capacity_type", "best-effort"], "--capacity_type is best-effort, which Compute"),
        (["--tpu_type", "v6e-8", "--capacity_type", "reserved"], "--reservation NAME belong together"),
        (["--tpu_type", "v6e-8", "--reservation", "mine"], "--reservation NAME belong together"),
        (["--tpu_type", "v6e-9"], "is not the name of a slice"),
    ],
)
def test_wrong_options_of_mig(words, text):
    options = parse([*MIG_SLICE, *words, "--", "x"], BACKENDS)
    with pytest.raises(ConfigError) as caught:
        GoogleBackend(Mig).dry_run(options)
    assert text in str(caught.value)


def test_the_number_of_machines_follows_from_their_type():
    def hosts(*words):
        return GoogleBackend(Mig).hosts(parse([*MIG_SLICE, *words, "--", "x"], BACKENDS))

    assert hosts("--tpu_type", "v6e-8") == 1
    assert hosts("--tpu_type", "v6e-8", "--machine_type", "ct6e-standard-4t") == 2
    assert hosts("--tpu_type", "v5p-64", "--slices", "2") == 16
    assert hosts() == 0
