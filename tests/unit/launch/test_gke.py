"""The command line of a job on GKE, and jobs run by the cluster of tests/fake_cloud as processes of this machine."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from lockstep import exits
from lockstep.errors import ConfigError
from lockstep.job_key import JOB_KEY
from lockstep.launch import main, parse
from lockstep.launch.backend import LaunchError
from lockstep.launch.environment import job_variables
from lockstep.launch.gke import GkeSpec
from lockstep.launch.gke_manifest import MAX_PARTS
from lockstep.launch.pods import PodState
from lockstep.launch.record import load_record
from lockstep.launch.setup_vm import ROOT
from tests.clock import until
from tests.fake_cloud import fake_kubectl
from tests.fake_cloud.cloud import text_of

NO_KEY = ("--env", f"{JOB_KEY}=")
"""Without secrets a pod runs its command alone, not a filter beside it."""


def plan(*words, kind="v6e-16"):
    given = ["--tpu_type", kind] if kind else []
    return GkeSpec.of(parse(["--backend", "gke", *given, "--setup", "none", *NO_KEY, *words, "--", "echo"]))


def test_pods_wait_longer_for_each_other_than_processes_of_one_machine():
    assert plan().job.environment["LOCKSTEP_INITIALIZATION_TIMEOUT_S"] == "1800"
    chosen = plan("--env", "LOCKSTEP_INITIALIZATION_TIMEOUT_S=60").job.environment
    assert chosen["LOCKSTEP_INITIALIZATION_TIMEOUT_S"] == "60"


def test_the_process_count_is_that_of_all_slices():
    assert plan("--slices", "2").job.environment == job_variables(8)
    assert plan("--require-process-count", "3").job.environment == job_variables(3)
    assert plan("--slices", "2").job.pods == plan("--slices", "1-2").job.pods == 8


@pytest.mark.parametrize(
    ("words", "kind", "text"),
    [
        ([], None, "--tpu_type is not given; backend gke needs it"),
        ([], "v6e-17", "--tpu_type is 'v6e-17', which is not the name of a slice"),
        (["--name", "My_Job"], "v6e-8", "Kubernetes makes the pods' host names of it"),
        (["--capacity_type", "reserved"], "v6e-8", "belong together"),
        (["--reservation", "mine"], "v6e-8", "belong together"),
        (["--slices", "1-2", "--no-foreground"], "v6e-8", "--slices 1-2 with --no-foreground: the launcher must stay"),
        (["--slices", "1-2", "--require-process-count", "2"], "v6e-8", "has no one number of processes"),
    ],
)
def test_what_does_not_fit_together_is_refused(words, kind, text):
    with pytest.raises(ConfigError, match=text):
        plan(*words, kind=kind)


def test_files_of_several_config_maps(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "big").write_bytes(random.Random(0).randbytes(2_500_000))
    job, maps, said = plan("--sync", "big").with_files()
    assert job.parts == len(maps) == 3 and said.startswith("3 ConfigMap(s) with sync.tar.gz 2,5")
    (tmp_path / "big").write_bytes(random.Random(0).randbytes(20_000_000))
    with pytest.raises(ConfigError, match=r"sync.tar.gz 20,.*its ConfigMaps may have 16,000,000. Leave data out of"):
        plan("--sync", "big").with_files()


def test_what_is_left_out_is_said(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "code").mkdir()
    for name in (".env", "a.py"):
        (tmp_path / "code" / name).write_text("x")
    assert "leaves out what looks like keys or passwords: code/.env." in plan("--sync", "code").with_files()[2]


@pytest.mark.nightly  # in make slow: the tests around it
def test_the_wheel_of_this_checkout_has_room_to_grow(monkeypatch, tmp_path):
    """With the repository's own configurations and data it takes less than half of what there may be."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    options = ["--backend", "gke", "--tpu_type", "v6e-16", "--sync", "config", "--sync", "data", "--", "echo"]
    job, _, said = GkeSpec.of(parse(options)).with_files()
    assert 1 <= job.parts <= MAX_PARTS // 2 and ".whl" in said and "sync.tar.gz" in said


SECRET = "hf_0123456789abcdef"
PRINT = "import os, sys, time; print('pod', os.environ['TPU_WORKER_ID'], flush=True);"


def install(tmp_path, monkeypatch):
    fake_kubectl.install(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_KUBE", str(tmp_path / "kube"))
    monkeypatch.setenv("LOCKSTEP_JOBS_DIR", str(tmp_path / "jobs"))
    monkeypatch.setattr("lockstep.launch.gke.POLL_S", 0.1)
    monkeypatch.setattr("lockstep.launch.kubectl.RECONNECT_S", 0.1)
    monkeypatch.setattr("lockstep.launch.gke_manifest.CAUSE_S", 1)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """A directory with jobs and a cluster; kubectl is on PATH."""
    install(tmp_path, monkeypatch)
    return tmp_path


def launch(*words, python="print(1)", name="job", kind="v5p-16", key=NO_KEY):
    words = ("--backend", "gke", "--tpu_type", kind, "--setup", "none", "--name", name, *key, *words)
    return main([*words, "--", sys.executable, "-c", python])


def test_every_pod_of_every_slice_runs_the_command(cluster, capfdbinary):
    names = ["REQUIRE_JAX_PROCESS_COUNT", "COLOUR", "MEGASCALE_SLICE_ID", "MEGASCALE_NUM_SLICES"]
    text = PRINT + f"print(*[os.environ[name] for name in {names} + ['MEGASCALE_COORDINATOR_ADDRESS']])"
    assert launch("--slices", "2", "--env", "COLOUR=$(deep) $$blue", python=text) == 0
    shown = capfdbinary.readouterr()
    for process in range(4):
        line = f"4 $(deep) $$blue {process // 2} 2 job-slice-0-0.job"
        assert f"[{process}] pod {process % 2}\n".encode() in shown.out
        assert f"[{process}] {line}\n".encode() in shown.out
    assert b"launch: job: Running" in shown.err or b"launch: job: exit code 0" in shown.err
    assert load_record("job").log(1, 3).read_text().startswith("pod 1") and load_record("job").attempts[-1].code == 0
    assert main(["status", "job"]) == 0
    assert b"job: Completed\n  process 0 (job-slice-0-0-a0): exit code 0, done" in capfdbinary.readouterr().out
    assert main(["logs", "job"]) == 0
    assert capfdbinary.readouterr().out.count(b"deep") == 4


@pytest.mark.slow
def test_with_a_slice_less_the_same_command_goes_on(cluster, monkeypatch, capfd):
    """The nodes of slice 1 are taken away for good; all attempts have logs of their own."""
    monkeypatch.setenv("FAKE_KUBE_DISRUPTS", "1")
    room = cluster / "kube" / "slices"
    text = PRINT + (
        "slices = os.environ.get('MEGASCALE_NUM_SLICES'); print(slices, os.environ['REQUIRE_JAX_PROCESS_COUNT']);"
        f"open('{room}', 'w').write('1'); sys.stdout.flush(); time.sleep(600 if slices else 0)"
    )
    words = ("--slices", "1-2", "--slices_wait_s", "0.3", "--retries", "1", "--grace_s", "1")
    assert launch(*words, kind="v6e-8", python=text) == 0
    shown = capfd.readouterr()
    assert "going on with 1 of 2 slices: the pods of the others have not started" in shown.err
    assert "job job: 2 x v6e-8, 2 pods" in shown.err and "job job: 1 x v6e-8, 1 pods" in shown.err
    logs = {each.parent.name: each.read_text() for each in (cluster / "jobs/job").glob("attempt-*/worker-0.log")}
    assert logs == {"attempt-1": "pod 0\n2 2\n", "attempt-2": "pod 0\n2 2\n", "attempt-3": "pod 0\nNone 1\n"}
    assert main(["status", "job"]) == 0 and "Completed" in capfd.readouterr().out
    assert main(["delete", "job"]) == 0 and not list((cluster / "kube").glob("jobset-*"))


@pytest.mark.slow
def test_a_broken_connection_to_a_log_shows_no_line_twice(cluster, monkeypatch, capfd):
    monkeypatch.setenv("FAKE_KUBE_DROPS", "1")
    text = PRINT + "[(print('line', i, flush=True), time.sleep(0.1)) for i in range(8)]"
    assert launch(kind="v6e-8", python=text) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines == ["[0] pod 0", *(f"[0] line {i}" for i in range(8))]


def test_where_the_queue_cannot_be_told_the_job_is_suspended_and_that_is_said(cluster, monkeypatch, capfd):
    def refused(self):
        raise LaunchError("kubectl patch was refused: workloads is forbidden", exits.REFUSED)

    python = PRINT + "time.sleep(60)"
    assert launch("--no-foreground", "--queue", "team", "--grace_s", "1", kind="v6e-8", python=python) == 0
    with monkeypatch.context() as patch:
        patch.setattr("lockstep.launch.kubectl.Cluster._deactivate", refused)
        assert main(["stop", "job"]) == exits.REFUSED and "workloads is forbidden" in capfd.readouterr().err
    found = json.loads((cluster / "kube/jobset-job.json").read_text())
    assert found["metadata"]["annotations"]["lockstep/stopped"] == "true"
    assert main(["delete", "job"]) == 0


def test_stop_takes_the_job_from_its_queue_which_would_start_it_again(cluster, capfd):
    python = PRINT + "time.sleep(60)"
    assert launch("--no-foreground", "--queue", "team", "--grace_s", "1", kind="v6e-8", python=python) == 0
    until(lambda: [*pods(cluster, 1)])
    assert main(["stop", "job"]) == 0 and main(["status", "job"]) == exits.TERMINATED
    assert "job: Stopped" in capfd.readouterr().out


@pytest.mark.slow
def test_stop_ends_the_pods_in_order_and_keeps_what_they_print(cluster, capfd):
    text = PRINT + (
        "import signal; signal.signal(signal.SIGTERM, lambda *_: (print('saved', flush=True), sys.exit(143)))\n"
        "print('ready', flush=True); time.sleep(600)"
    )
    assert launch("--no-foreground", python=text) == 0
    assert main(["status", "job"]) == 0
    until(lambda: all("ready" in text_of(path) for path in pods(cluster, 2)))
    assert main(["stop", "job"]) == 0
    assert text_of(cluster / "jobs/job/attempt-1/worker-1.log").splitlines()[-1] == "saved"
    for words in (["status"], ["logs", "-f"], ["stop"]):
        assert main([*words, "job"]) == (exits.TERMINATED if words == ["status"] else 0)
    shown = capfd.readouterr().out
    assert "job: Stopped\n" in shown and shown.count("saved") == 2
    assert main(["delete", "job"]) == 0 and load_record("job").deleted
    assert not (cluster / "kube/jobset-job.json").exists()


def test_a_job_that_another_launcher_stops_has_ended_for_the_one_that_follows_it(cluster, monkeypatch, capsys):
    def create(self, manifest):
        self.kubectl.run("create", "--filename=-", manifest=manifest)
        self.suspend()  # as `lockstep launch stop` does meanwhile

    monkeypatch.setattr("lockstep.launch.gke.Cluster.create", create)
    assert launch(kind="v6e-8", python="import time; time.sleep(600)") == exits.TERMINATED
    assert load_record("job").attempts[-1].code == exits.TERMINATED
    assert main(["status", "job"]) == exits.TERMINATED and "job: Stopped\n" in capsys.readouterr().out


def test_a_job_that_waits_in_a_queue_has_not_ended(cluster, capsys):
    """Kueue suspends JobSets until there is room."""
    assert launch("--no-foreground", kind="v6e-8", python="import time; time.sleep(600)") == 0
    found = json.loads((cluster / "kube/jobset-job.json").read_text())
    found["spec"]["suspend"] = True
    (cluster / "kube/jobset-job.json").write_text(json.dumps(found))
    until(lambda: json.loads(text_of(cluster / "kube/pods-job.json")) == [])
    assert main(["status", "job"]) == 0 and "job: Running\n" in capsys.readouterr().out


def test_logs_of_a_running_job_come_at_once(cluster, capfd):
    text = PRINT + f"[time.sleep(0.05) for _ in range(1200) if not os.path.exists('{cluster}/end')]"
    assert launch("--no-foreground", python=text) == 0
    until(lambda: all("pod" in text_of(path) for path in pods(cluster, 2)))
    assert main(["logs", "job"]) == 0
    assert capfd.readouterr().out == "[0] pod 0\n[1] pod 1\n"
    calls = [json.loads(line) for line in text_of(cluster / "kube/calls").splitlines()]
    assert not [words for words in calls if words[0] == "logs" and "--follow" in words]
    (cluster / "end").touch()


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_once_ends_in_order_and_twice_at_once(cluster, times):
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    words = ["--backend", "gke", "--tpu_type", "v6e-8", "--setup", "none", "--name", "job", "--grace_s", "20", "--"]
    text = PRINT + (
        "import signal; signal.signal(signal.SIGTERM, lambda *_: (print('saved', flush=True), sys.exit(143)))\n"
        f"if {times} == 2: signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('ready', flush=True); time.sleep(600)"
    )
    output = cluster / "output"
    with open(output, "w", encoding="utf-8") as file:
        command = [sys.executable, ROOT / "infra/launch.py", *words, sys.executable, "-c", text]
        child = subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)
    until(lambda: "[0] ready" in text_of(output))
    for _ in range(times):
        child.send_signal(signal.SIGINT)
        time.sleep(0.5)
    assert child.wait(timeout=300) == 130, text_of(output)
    shown = text_of(output)
    assert "SIGINT, ending the pods" in shown and ("SIGINT, killing the pods" in shown) == (times == 2)
    assert ("[0] saved" in shown) == (times == 1)


def test_what_the_cluster_refuses_is_explained_and_nothing_is_left(cluster, monkeypatch, capsys):
    refusal = 'no matches for kind "JobSet" in version "jobset.x-k8s.io/v1alpha2"'
    monkeypatch.setenv("FAKE_KUBE_REFUSES", refusal)
    (cluster / "env").write_text(f"HF_TOKEN={SECRET}\n")
    assert launch("--env_file", "env") == exits.REFUSED
    shown = capsys.readouterr().err
    assert "error: kubectl create was refused.\n  $ kubectl " in shown and f"\n  {refusal}\n" in shown
    assert "The cluster has no JobSet" in shown
    assert not list((cluster / "kube").glob("*-job.json"))


@pytest.mark.parametrize(("kind", "labels"), [("secret", {}), ("configmap", {"lockstep/job-id": "of-another"})])
def test_what_is_not_ours_is_neither_replaced_nor_deleted(cluster, capsys, kind, labels):
    (cluster / "kube").mkdir()
    (cluster / "env").write_text(f"HF_TOKEN={SECRET}\n")
    name = "job" if kind == "secret" else "job-files-00"
    file = cluster / f"kube/{kind}-{name}.json"
    file.write_text(json.dumps({"metadata": {"name": name, "labels": labels}, "data": {"password": "dmFsdWU="}}))
    before = file.read_text()
    assert launch("--env_file", "env") == exits.REFUSED
    shown = capsys.readouterr().err
    assert f'{kind}s "{name}" already exists' in shown and "It is not of this job, so it stays as it is." in shown
    assert [path.name for path in (cluster / "kube").glob("*-job*.json")] == [file.name]
    assert file.read_text() == before
    assert main(["delete", "job"]) == 0 and file.read_text() == before


@pytest.mark.slow
def test_what_a_launcher_that_was_killed_has_left_is_replaced(cluster, monkeypatch):
    (cluster / "env").write_text(f"HF_TOKEN={SECRET}\n")

    def killed(job):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("lockstep.launch.gke.job_set", killed)
        patch.setattr("lockstep.launch.gke.Cluster.delete", lambda self: None)
        assert launch("--env_file", "env") == exits.INTERRUPTED
    first = json.loads((cluster / "kube/secret-job.json").read_text())["metadata"]["labels"]
    assert launch("--env_file", "env", "--no-foreground") == 0
    assert json.loads((cluster / "kube/secret-job.json").read_text())["metadata"]["labels"] != first
    assert main(["delete", "job"]) == 0 and not list((cluster / "kube").glob("secret-*"))


def test_a_job_set_of_somebody_else_is_not_this_job(cluster, capsys):
    """Deleted by hand and made again by another launcher: it is not stopped, not deleted and not shown as ours."""
    assert launch() == 0
    file = cluster / "kube/jobset-job.json"
    found = json.loads(file.read_text())
    found["metadata"]["labels"]["lockstep/job-id"] = "of-another"
    del found["status"]
    file.write_text(json.dumps(found))
    capsys.readouterr()
    main(["status", "job"])
    assert "there is no such JobSet any more" in capsys.readouterr().out
    assert main(["stop", "job"]) == 0 and main(["delete", "job"]) == 0
    assert json.loads(file.read_text()) == found


def test_no_secret_is_in_a_command_line_of_the_dry_run(cluster, monkeypatch, capsys):
    (cluster / "env").write_text(f"HF_TOKEN={SECRET}\n")
    assert launch("--dry-run", "--env_file", "env", "--env", "A_KEY=x9x9x9x9") == 0
    shown = capsys.readouterr().out
    (cluster / "bin/kubectl").write_text(
        f'#!/bin/bash\necho "$@" >> {cluster}/argv\n[ "$1" != create ] || [ "$2" != secret ] || {{ while read -r name; '
        f'do echo "$name ${{!name}}"; done < /dev/stdin > {cluster}/made; }}\n'
    )
    monkeypatch.setenv("A_KEY", "x9x9x9x9")
    subprocess.run(["bash", "-e"], input=shown, text=True, check=True)
    assert (cluster / "made").read_text() == f"HF_TOKEN {SECRET}\nA_KEY x9x9x9x9\n"
    argv = (cluster / "argv").read_text()
    assert argv.count("create") == 2 and SECRET not in argv and "x9x9x9x9" not in argv + shown


def test_a_dry_run_refuses_what_the_run_would_refuse(cluster, monkeypatch, capsys):
    (cluster / "big").write_bytes(os.urandom(20_000))
    monkeypatch.setattr("lockstep.launch.gke.MAX_PARTS", 0)
    assert launch("--dry-run", "--sync", "big") == 1
    assert "sync.tar.gz" in capsys.readouterr().err


def test_processes_that_the_others_wait_for_are_named_once_a_minute(cluster, monkeypatch, capsys):
    waits = PodState(name="job-0", uid="0", process=0, attempt=1, phase="Pending", waits="Unschedulable")
    looks = [({"spec": {}}, []), ({"spec": {}}, [waits]), ({"status": {"terminalState": "Completed"}}, [])]
    monkeypatch.setattr("lockstep.launch.gke.Cluster.look", lambda self: looks.pop(0))
    monkeypatch.setattr("lockstep.launch.gke.SAY_S", 0.0)
    monkeypatch.setattr("lockstep.launch.gke.POLL_S", 0.0)
    assert launch() == 0
    said = [line for line in capsys.readouterr().err.splitlines() if "have not started after" in line]
    assert [line.partition(" s: ")[2] for line in said] == [
        "process 0 (no pod yet), process 1 (no pod yet)",
        "process 0 (job-0: Pending (Unschedulable)), process 1 (no pod yet)",
    ]
    assert said[0].startswith("launch: job: 2 of 2 processes have not started after 0")


def test_an_image_that_is_not_there_ends_the_job(cluster, monkeypatch, capsys):
    monkeypatch.setenv("FAKE_KUBE_WAITS", "ImagePullBackOff")
    monkeypatch.setattr("lockstep.launch.gke.PULL_S", 0.2)
    assert launch() == exits.SETUP_FAILED
    shown = capsys.readouterr().err
    assert "job: Pending (ImagePullBackOff: as the test wants it)" in shown
    assert "process 0 can never start. Mend it (--image)" in shown


def test_a_job_that_another_cluster_has_is_not_deleted_for_one_of_its_name(cluster, capsys):
    assert launch("--context", "one", "--no-foreground", kind="v6e-8", python="import time; time.sleep(600)") == 0
    assert launch("--context", "two", "--no-foreground", kind="v6e-8") == exits.REFUSED
    shown = capsys.readouterr().err
    assert "there is a JobSet job of this launcher elsewhere (--context 'one', --namespace '')" in shown
    assert (cluster / "kube/one/jobset-job.json").exists() and not (cluster / "kube/two/jobset-job.json").exists()
    assert main(["delete", "job"]) == 0
    assert launch("--context", "two", "--no-foreground", kind="v6e-8") == 0


@pytest.mark.slow
def test_a_name_is_taken_until_it_is_deleted(cluster, capsys):
    assert launch() == 0
    assert launch() == exits.REFUSED
    assert "there is a JobSet job already. Give another --name, or delete it: lockstep launch delete job" in (
        capsys.readouterr().err
    )
    assert main(["delete", "job"]) == 0 and launch() == 0


def test_secrets_are_in_the_secret_and_in_nothing_else(cluster, capfdbinary):
    (cluster / "env").write_text(f"HF_TOKEN={SECRET}\n")
    text = PRINT + "token = os.environ['HF_TOKEN']; print('token', token); assert len(token) == 19\n"
    text += f"print('key', os.environ['{JOB_KEY}']); assert len(os.environ['{JOB_KEY}']) > 600"
    words = ("--env_file", "env", "--env", "WANDB_API_KEY=0123456789abcdef", "--slices", "2")
    assert launch("--dry-run", *words, python=text) == 0
    assert launch(*words, python=text, key=()) == 0
    assert main(["logs", "job"]) == 0 and main(["status", "job"]) == 0
    shown = capfdbinary.readouterr()
    assert b"[3] token <redacted>\n[3] key <redacted>\n" in shown.out
    allowed = {cluster / "env", cluster / "kube/secret-job.json"}
    written = [path for path in cluster.rglob("*") if path.is_file() and path not in allowed]
    for secret in (SECRET, "0123456789abcdef"):
        assert secret.encode() not in shown.out + shown.err
        assert len(written) > 10 and not [path for path in written if secret.encode() in path.read_bytes()]
    names = {"HF_TOKEN", "WANDB_API_KEY", JOB_KEY}
    assert set(json.loads((cluster / "kube/secret-job.json").read_text())["data"]) == names
    assert main(["delete", "job"]) == 0 and not (cluster / "kube/secret-job.json").exists()


def test_a_dry_run_prints_the_manifest_and_asks_nobody(cluster, capsys):
    assert launch("--dry-run", "--context", "my cluster", "--namespace", "team") == 0
    shown = capsys.readouterr().out
    assert "kubectl '--context=my cluster' --namespace=team create --filename=- << 'END_OF_FILE'" in shown
    manifest = json.loads(shown.partition("'END_OF_FILE'\n")[2].partition("END_OF_FILE")[0])
    assert manifest["kind"] == "JobSet" and not (cluster / "kube").exists() and not (cluster / "jobs").exists()


@pytest.mark.slow
def test_files_are_unpacked_where_the_command_runs(cluster, capfd):
    (cluster / "config").mkdir()
    (cluster / "config/run.yaml").write_text("seed: 7\n")
    assert launch("--sync", "config", kind="v6e-8", python="print(open('config/run.yaml').read())") == 0
    assert "[0] seed: 7" in capfd.readouterr().out


def pods(cluster, number):
    until(lambda: len(list((cluster / "kube/pods").glob("*/log"))) == number)
    return list((cluster / "kube/pods").glob("*/log"))
