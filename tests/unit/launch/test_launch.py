"""What a job is on every cluster, which a back end's own tests do not say again; commands are tiny programs."""

from typing import Any, NamedTuple

import pytest

from lockstep import exits
from lockstep.launch import main
from lockstep.launch.record import JobRecord, load_record
from tests.fake_cloud.cloud import text_of
from tests.unit.launch import test_gke, test_slurm


class Cluster(NamedTuple):
    """A fake cluster of this machine, in a directory with the jobs."""

    backend: Any  # the module of its own tests
    one: tuple[str, ...]
    two: tuple[str, ...]  # the words for a job of so many processes
    number: str  # the variable with the number of a process
    loses_node: str
    state: str  # the directory of the fake
    tool: str
    how_to_get_it: str


CLUSTERS = {
    "gke": Cluster(
        test_gke, ("--tpu_type", "v6e-8"), (), "TPU_WORKER_ID", "FAKE_KUBE_DISRUPTS", "kube", "kubectl", "Install it"
    ),
    "slurm": Cluster(
        test_slurm, (), ("--nodes", "2"), "SLURM_PROCID", "FAKE_SLURM_LOSES_NODE", "slurm", "sbatch", "Run this on a"
    ),
}


@pytest.fixture(params=CLUSTERS)
def cluster(request):
    return CLUSTERS[request.param]


@pytest.fixture
def place(cluster, tmp_path, monkeypatch):
    """The directory; the tools of the cluster are on PATH."""
    cluster.backend.install(tmp_path, monkeypatch)
    return tmp_path


def test_the_error_of_a_user_is_the_code_of_the_job_ends_all_processes_and_is_not_tried_again(cluster, place, capfd):
    """Process 1 fails; process 0 ends because of it with 85, as one of lockstep does."""
    text = (
        "import os, pathlib, signal, sys, time\n"
        f"ready = pathlib.Path('{place}/ready')\n"
        f"if os.environ['{cluster.number}'] == '1':\n"
        "    while not ready.exists(): time.sleep(0.02)\n"
        "    sys.exit(3)\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(85)); ready.touch(); time.sleep(600)"
    )
    assert cluster.backend.launch(*cluster.two, "--retries", "2", python=text) == 3
    shown = capfd.readouterr().err
    assert "failed: exit code 3" in shown and "process 1 failed first" in shown
    assert load_record("job").attempts[-1].code == 3 and not (place / "jobs/job/attempt-2").exists()
    assert main(["status", "job"]) == 3


def test_a_fault_is_tried_again_and_a_second_one_without_a_checkpoint_is_not(cluster, place):
    """The commands end as processes of lockstep do (lockstep.hosts.fault)."""
    # An error of the user on another process, a moment later, would count before it.
    text = "import os, sys; sys.exit(93 + min(1, int(os.environ['LOCKSTEP_RESTARTS'])))"
    assert cluster.backend.launch("--retries", "5", python=text) == 94
    assert sorted(path.name for path in (place / "jobs/job").glob("attempt-*")) == ["attempt-1", "attempt-2"]


def test_a_lost_node_starts_all_processes_again_and_both_logs_are_kept(cluster, place, monkeypatch, capfd):
    monkeypatch.setenv(cluster.loses_node, "1")
    text = (
        f"import os, time; number = os.environ['{cluster.number}']; mark = '{place}/mark-' + number;"
        "print('process', number, flush=True); again = os.path.exists(mark);"
        "open(mark, 'w').close(); time.sleep(0 if again else 600)"
    )
    assert cluster.backend.launch(*cluster.two, "--retries", "1", python=text) == 0
    assert capfd.readouterr().out.count("[1] process 1") == 2
    for attempt in (1, 2):
        assert (place / f"jobs/job/attempt-{attempt}/worker-1.log").read_text() == "process 1\n"
    assert main(["logs", "job"]) == 0
    assert capfd.readouterr().out.count("[1] process 1") == 2


@pytest.mark.slow
def test_a_cluster_that_is_away_for_a_moment_is_asked_again(cluster, place, capfd):
    away = place / cluster.state / "away"
    text = f"print('ran', flush=True); open('{away}', 'w').close(); import time; time.sleep(1)"
    assert cluster.backend.launch(*cluster.one, python=text) == 0
    shown = capfd.readouterr()
    assert "[0] ran" in shown.out and not away.exists()
    assert ("TLS handshake timeout" in shown.err) != ("Unable to contact slurm controller" in shown.err)
    assert "launch: it answers again" in shown.err


def test_a_name_that_is_used_again_has_no_logs_of_the_earlier_job(cluster, place, capfd):
    """Its logs, of more attempts and processes, are kept beside."""
    for name in ("attempt-1/worker-1.log", "attempt-2/worker-0.log"):
        (place / "jobs/job" / name).parent.mkdir(parents=True)
        (place / "jobs/job" / name).write_text("first\n")
    assert cluster.backend.launch(*cluster.one, python="print('second')") == 0
    capfd.readouterr()
    assert main(["logs", "job"]) == 0 and capfd.readouterr().out == "[0] second\n"
    assert text_of(place / "jobs/job/earlier-1/attempt-2/worker-0.log") == "first\n"


def test_a_name_that_a_job_of_another_backend_has_is_refused(cluster, place, capsys):
    JobRecord(name="job", backend="ssh", command=("true",), options={}).save()
    assert cluster.backend.launch() == 1
    shown = capsys.readouterr().err
    assert "there is a job 'job' with backend 'ssh'" in shown and "Give this one another --name." in shown
    assert load_record("job").backend == "ssh" and not (place / cluster.state).exists()


def test_without_its_tool_it_says_how_to_get_it(cluster, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("LOCKSTEP_JOBS_DIR", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cluster.backend.launch() == exits.NOT_FOUND
    first, _, advice = capsys.readouterr().err.splitlines()[-3:]
    assert f"{cluster.tool} was not found." in first and advice.startswith(cluster.how_to_get_it)
