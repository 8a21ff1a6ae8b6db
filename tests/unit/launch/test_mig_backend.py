"""`lockstep launch --backend mig`: options, and a job on two slices, on the machines of a fake Google Cloud."""

import pytest

from lockstep.errors import ConfigError
from lockstep.exits import REFUSED
from lockstep.launch import BACKENDS, parse
from lockstep.launch.mig_backend import MigBackend
from tests.fake_cloud.laptop import Laptop

SLICE = ["--backend", "mig", "--tpu_name", "pod", "--zone", "us-east5-a", "--project", "p", "--poll_s", "0.05"]


@pytest.fixture
def laptop(tmp_path):
    found = Laptop(tmp_path)
    yield found
    found.close()


@pytest.mark.slow
def test_two_slices_find_each_other_at_the_machine_that_google_counts_first(laptop):
    """The names of a group's machines say nothing about their numbers: each machine is asked for its own."""
    laptop.add_metadata_server()
    program = 'echo "$FAKE_WORKER_NUMBER $MEGASCALE_COORDINATOR_ADDRESS $MEGASCALE_NUM_SLICES $MEGASCALE_SLICE_ID."'
    output = laptop.launch(
        *SLICE, "--tpu_type", "v6e-16", "--slices", "2", "--setup", "none", "--", "sh", "-c", program
    )
    assert "pod: 8 STAGING" in output and "pod: 8 RUNNING" in output and "8 workers" in output
    machines = laptop.cloud.read()["machines"].values()
    (first,) = (each for each in machines if (each["slice"], each["worker"]) == (0, 0))
    for slice_id in (0, 1):
        for worker in range(4):
            assert output.count(f"{worker} {first['internal']}:8080 2 {slice_id}.") == 1
    names = sorted(each["name"] for each in machines if each["slice"] == 0)
    assert names[0] != first["name"], "else the test shows nothing"
    laptop.launch("delete", "pod")
    state = laptop.cloud.read()
    assert not any(state[kind] for kind in ("policies", "templates", "groups", "instances", "machines"))


@pytest.mark.nightly
def test_slices_whose_machines_do_not_say_their_number_are_refused(laptop):
    output = laptop.launch(
        *SLICE, "--tpu_type", "v5p-16", "--slices", "2", "--setup", "none", "--", "true", code=1
    )  # fmt: skip
    assert "no machine of the first slice says that it is number 0" in output


@pytest.mark.nightly
def test_what_was_preempted_is_made_again(laptop):
    program = """
        file=~/../starts$FAKE_WORKER_NUMBER; echo start >> $file; echo "start $(wc -l < $file)"
        if [ "$(wc -l < $file)" = 1 ]; then sleep 60; fi
    """
    options = ["--tpu_type", "v5p-16", "--capacity_type", "spot", "--retries", "1", "--setup", "none"]
    process = laptop.start(*SLICE, *options, "--", "sh", "-c", program)
    output = laptop.read_until(process, "start 1", times=2)
    laptop.cloud.preempt("pod")
    output += process.communicate(timeout=60)[0]
    assert process.returncode == 0 and output.count("start 2") == 2, output
    assert "is TERMINATED" in output and output.count("pod: asking for v5p-16") == 2


def test_quota_refused(laptop):
    laptop.cloud.reply("instance-templates create", " - Quota 'TPUS_PER_TPU_FAMILY' exceeded. Limit: 0.0 in region x.")
    output = laptop.launch(*SLICE, "--tpu_type", "v6e-16", "--setup", "none", "--", "true", code=REFUSED)
    assert "iam-admin/quotas?project=p" in output and "Traceback" not in output
    assert not laptop.cloud.read()["policies"], "what was made before is deleted"


@pytest.mark.slow
def test_what_dry_run_prints_can_be_pasted(laptop):
    words = [
        *SLICE,
        "--tpu_type",
        "v5p-16",
        "--setup",
        "none",
        "--dry-run",
        "--",
        "sh",
        "-c",
        'echo "hello $FAKE_WORKER_NUMBER"',
    ]
    printed = laptop.launch(*words)
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
def test_wrong_options(words, text):
    options = parse([*SLICE, *words, "--", "x"], BACKENDS)
    with pytest.raises(ConfigError) as caught:
        MigBackend().plan(options)
    assert text in str(caught.value)


def test_the_number_of_machines_follows_from_their_type():
    def hosts(*words):
        return MigBackend().hosts(parse([*SLICE, *words, "--", "x"], BACKENDS))

    assert hosts("--tpu_type", "v6e-8") == 1
    assert hosts("--tpu_type", "v6e-8", "--machine_type", "ct6e-standard-4t") == 2
    assert hosts("--tpu_type", "v5p-64", "--slices", "2") == 16
    assert hosts() == 0
