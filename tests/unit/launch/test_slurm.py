"""Jobs of the backend ``slurm``, run by Slurm's commands of tests/fake_cloud as processes of this machine."""

import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep import exits
from lockstep.job_key import JOB_KEY
from lockstep.launch import main
from lockstep.launch.backend import Console
from lockstep.launch.environment import filter_files
from lockstep.launch.record import load_record
from lockstep.launch.slurm import FollowedFiles
from tests.clock import until
from tests.fake_cloud import fake_slurm
from tests.fake_cloud.cloud import text_of


def test_whole_lines_are_shown_once_by_attempt_and_worker(tmp_path, capfdbinary):
    files = FollowedFiles(tmp_path, Console())
    files.read(last=False)
    for name, text in {"attempt-1/worker-10.log": "ten\n", "attempt-1/worker-2.log": "two\npart"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    files.read(last=False)
    assert capfdbinary.readouterr().out == b"[2] two\n[10] ten\n"
    with (tmp_path / "attempt-1/worker-2.log").open("a") as log:
        log.write("ly\nno end")
    files.read(last=False)
    assert capfdbinary.readouterr().out == b"[2] partly\n"
    files.read(last=True)
    files.read(last=True)
    assert capfdbinary.readouterr().out == b"[2] no end\n"


ROOT = Path(__file__).parents[3]
SECRET = "hf_0123456789abcdef"
PRINT = "import os, sys; print('task', os.environ['SLURM_PROCID'], *sys.argv[1:], flush=True);"


def install(tmp_path, monkeypatch):
    fake_slurm.install(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_SLURM", str(tmp_path / "slurm"))
    monkeypatch.setenv("LOCKSTEP_JOBS_DIR", str(tmp_path / "jobs"))
    monkeypatch.setattr("lockstep.launch.slurm.POLL_S", 0.1)
    monkeypatch.setattr("lockstep.launch.slurm.READ_S", 0.05)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """A directory with jobs and the state of Slurm; its commands are on PATH."""
    install(tmp_path, monkeypatch)
    return tmp_path


def launch(*words, python="print(1)", name="job"):
    command = [sys.executable, "-c", python]
    key = () if "--env_file" in words else ("--env", f"{JOB_KEY}=")  # which would bring a filter beside every command
    return main(["--backend", "slurm", "--name", name, *key, *words, "--", *command])


def test_every_task_runs_the_command_and_is_shown_with_its_number(cluster, capfdbinary):
    # However slow the launcher is, the job runs until it has seen it run.
    running = "glob.glob(os.environ['FAKE_SLURM'] + '/*/shown-RUNNING')"
    seen = f"import glob, os, time\nwhile not {running}: time.sleep(0.02)\n"
    text = seen + PRINT + "print(os.environ['REQUIRE_JAX_PROCESS_COUNT'], os.environ['COLOUR'], os.getcwd())"
    assert launch("--nodes", "2", "--tasks_per_node", "2", "--env", "COLOUR=deep blue", python=text) == 0
    shown = capfdbinary.readouterr()
    for task in range(4):
        assert f"[{task}] task {task}\n[{task}] 4 deep blue {cluster}\n".encode() in shown.out
    assert b"launch: job: RUNNING" in shown.err
    job = load_record("job")
    assert job.log(1, 3).read_text().startswith("task 3") and job.attempts[-1].code == 0
    assert main(["status", "job"]) == 0
    assert b"job: exit code 0, done" in capfdbinary.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(("nodes", "each", "gpus"), [(2, 1, ["all", "all"]), (1, 2, ["0", "1"])])
def test_a_task_has_its_gpu_or_all_of_its_node(nodes, each, gpus, cluster, capfdbinary, monkeypatch):
    """Two processes join by Slurm's variables; what JAX would show them of two GPUs."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("FAKE_SLURM_FIRST", str(os.getpid()))  # by which JAX chooses a port of this machine
    text = "import jax, lockstep; hosts = lockstep.start()\n"
    text += "print('process', hosts.index, 'of', hosts.count, 'sees', jax.config.values['jax_cuda_visible_devices'])"
    assert launch("--nodes", str(nodes), "--tasks_per_node", str(each), python=text) == 0
    shown = capfdbinary.readouterr().out.decode()
    for process in (0, 1):
        assert f"[{process}] process {process} of 2 sees {gpus[process]}\n" in shown


def test_a_noted_code_that_is_none_is_a_failure_and_no_stack(cluster, capfd):
    """Whatever a task, or somebody else who can write there, puts into the files of codes."""
    assert launch(python="print(1)") == 0
    attempt = cluster / "jobs/job/attempt-1"
    for content in (b"", b"-1", b"256", b"9" * 400, b"0x0", b"0 0", b"\xff\xfe", "\u0663".encode(), b"nan", b"\x1b[2J"):
        (attempt / "code").write_bytes(content)
        (attempt / "code-0").write_bytes(content + b" 1.5")
        assert main(["status", "job"]) == exits.FAILED, content
        shown = capfd.readouterr()
        assert "job: exit code 1" in shown.out and "\x1b" not in shown.out, content
    (attempt / "code").write_bytes(b"85\n")
    assert main(["status", "job"]) == exits.PEER_FAILED


def test_the_task_with_an_error_of_its_own_is_named_not_one_that_was_told_and_ended_before(cluster, capfd):
    text = PRINT + (
        "import pathlib, signal, time; ended, deaf = pathlib.Path('ended'), pathlib.Path('deaf')\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "if os.environ['SLURM_PROCID'] == '1':\n"
        "    while not deaf.exists(): time.sleep(0.02)\n"  # the other one would end by Slurm's signal before its error
        "    ended.touch(); sys.exit(1)\n"
        "deaf.touch()\n"
        "while not ended.exists(): time.sleep(0.02)\n"
        "time.sleep(0.1); raise KeyError('question')"
    )
    assert launch("--nodes", "2", python=text) == 1
    assert "process 0 failed first" in capfd.readouterr().err


def test_a_signal_to_the_task_is_the_commands_and_ends_it_in_order(cluster):
    text = (
        PRINT + "import signal, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(143));"
        "print('ready', flush=True); time.sleep(600)"
    )
    assert launch("--no-foreground", python=text) == 0
    until(lambda: "ready" in text_of(cluster / "jobs/job/attempt-1/worker-0.log"))
    assert main(["stop", "job"]) == 0
    assert text_of(cluster / "jobs/job/attempt-1/code-0").startswith("143 ")
    assert main(["delete", "job"]) == 0 and load_record("job").deleted
    assert main(["status", "job"]) == 0


@pytest.mark.slow
def test_the_name_of_a_job_in_the_queue_is_taken(cluster, capsys):
    assert launch("--no-foreground", python="import time; time.sleep(600)") == 0
    assert launch(python="print(1)") == exits.REFUSED
    assert "is in Slurm's queue (job 1000). Give another --name" in capsys.readouterr().err
    assert main(["delete", "job"]) == 0
    assert launch(python="print(1)") == 0


def test_a_code_that_the_file_system_does_not_show_yet_is_that_of_the_accounting(cluster, capfd):
    assert launch(python="print(1)") == 0
    for code in cluster.glob("jobs/job/attempt-1/code*"):
        code.unlink()
    capfd.readouterr()
    assert main(["status", "job"]) == 0
    assert capfd.readouterr().out == "job: ended\n"


@pytest.mark.parametrize("half", ["", "3 \n"])
def test_a_task_that_was_killed_while_it_noted_its_end_has_none(cluster, capfd, half):
    assert launch(python="exit(3)") == 3
    (cluster / "jobs/job/attempt-1/code-0").write_text(half)
    capfd.readouterr()
    assert main(["status", "job"]) == 3
    assert capfd.readouterr().out == f"job: {exits.describe_code(3)}\n"


@pytest.mark.slow
def test_ctrl_c_cancels_the_job(cluster):
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    words = ["infra/launch.py", "--backend", "slurm", "--name", "job", "--", sys.executable, "-c"]
    text = "import time; print('ready', flush=True); time.sleep(600)"
    child = subprocess.Popen(
        [sys.executable, *words, text],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    until(lambda: "ready" in text_of(cluster / "jobs/job/attempt-1/worker-0.log"))
    child.send_signal(signal.SIGINT)
    _, shown = child.communicate(timeout=60)
    assert child.returncode == 130, shown
    assert "SIGINT, ending the job" in shown
    assert (cluster / "slurm/1000/state").read_text() == "CANCELLED"


def test_what_sbatch_refuses_is_explained(cluster, monkeypatch, capsys):
    refusal, advice = "Batch job submission failed: Invalid partition name specified", "sinfo lists the partitions"
    monkeypatch.setenv("FAKE_SLURM_REFUSES", refusal)
    assert launch(python="print(1)") == exits.REFUSED
    shown = capsys.readouterr().err
    assert "error: sbatch refused.\n  $ sbatch " in shown and refusal in shown and advice in shown
    assert not list((cluster / "jobs/job").glob("secrets*"))


def test_secrets_are_in_one_private_file_and_in_nothing_else(cluster, capfdbinary):
    (cluster / "env").write_text(f"HF_TOKEN={SECRET}\n")
    text = (
        PRINT + f"import time; token = os.environ['HF_TOKEN']; print('key', os.environ['{JOB_KEY}'], end=' ');"
        "print('token', token, flush=True); time.sleep(1); assert len(token) == 19"
    )
    assert launch("--env_file", "env", "--no-foreground", python=text) == 0
    until(lambda: "token" in text_of(cluster / "jobs/job/attempt-1/worker-0.log"))
    assert main(["logs", "-f", "job"]) == 0
    assert main(["status", "job"]) == 0 and main(["logs", "job"]) == 0
    shown = capfdbinary.readouterr()
    assert b"[0] key <redacted> token <redacted>" in shown.out
    assert SECRET.encode() not in shown.out + shown.err
    written = [path for path in cluster.rglob("*") if path.is_file() and path.name != "env"]
    assert len(written) > 8 and not [path for path in written if SECRET.encode() in path.read_bytes()]


def test_the_file_of_secrets_is_gone_while_the_last_attempt_runs(cluster, capfd):
    """So it goes whatever ends the job: its batch script may be killed, with the node that it runs on."""
    file = cluster / "jobs/job/secrets.sh"
    text = PRINT + (
        f"print(oct(os.stat({str(file)!r}).st_mode) if os.path.exists({str(file)!r}) else 'gone',"
        "len(os.environ['HF_TOKEN']));"
        f"sys.exit(0 if 'SLURM_RESTART_COUNT' in os.environ else {exits.WORKER_LOST})"
    )
    (cluster / "env").write_text(f"HF_TOKEN={SECRET}\n")
    assert launch("--env_file", "env", "--retries", "1", python=text) == 0
    assert text_of(cluster / "jobs/job/attempt-1/worker-0.log").splitlines()[1] == "0o100600 19"
    assert text_of(cluster / "jobs/job/attempt-2/worker-0.log").splitlines()[1] == "gone 19"
    capfd.readouterr()


def test_the_file_of_secrets_of_a_job_that_never_ran_is_gone_with_the_next_look(cluster, monkeypatch):
    monkeypatch.setattr("lockstep.launch.slurm._submit", lambda directory: ["sh", "-c", "echo 1; mkdir -p slurm/1"])
    (cluster / "env").write_text(f"HF_TOKEN={SECRET}\n")
    assert launch("--env_file", "env", "--no-foreground", python="print(1)") == 0
    file = cluster / "jobs/job/secrets.sh"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and SECRET in file.read_text()
    (cluster / "slurm/1/state").write_text("PENDING")
    assert main(["status", "job"]) == 0 and file.exists()
    (cluster / "slurm/1/state").write_text("CANCELLED")
    assert main(["status", "job"]) != 0 and not file.exists()


def test_nothing_is_left_where_the_launcher_dies_before_the_job_is_taken(cluster, monkeypatch):
    def interrupted(tool, words):
        raise KeyboardInterrupt

    (cluster / "env").write_text(f"HF_TOKEN={SECRET}\n")
    monkeypatch.setattr("lockstep.launch.tool.Tool.run", interrupted)
    assert launch("--env_file", "env", python="print(1)") == exits.INTERRUPTED
    assert not (cluster / "jobs/job/secrets.sh").exists()


@pytest.mark.slow
def test_a_dry_run_prints_what_can_be_pasted_and_does_nothing(cluster, capsys):
    (cluster / "env").write_text(f"HF_TOKEN={SECRET}\n")
    assert (
        launch("--dry-run", "--nodes", "2", "--env_file", "env", "--partition", "tpu", python="print('it is me')") == 0
    )
    shown = capsys.readouterr().out
    assert SECRET not in shown and "#SBATCH --partition=tpu" in shown and not (cluster / "slurm").exists()
    assert not (cluster / "jobs").exists()
    (cluster / "jobs/job").mkdir(parents=True)
    for name, data in filter_files().items():
        (cluster / "jobs/job" / name).write_bytes(data)
    (cluster / "jobs/job/secrets.sh").write_text(f"export HF_TOKEN={SECRET}\n")
    done = subprocess.run(["bash", "-e"], input=shown, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    until(lambda: text_of(cluster / "jobs/job/attempt-1/code") == "0\n")
    assert text_of(cluster / "jobs/job/attempt-1/worker-1.log") == "it is me\n"


def test_the_record_can_be_read_without_the_launcher(cluster):
    assert launch("--no-foreground", python="print(1)") == 0
    record = json.loads((cluster / "jobs/job/job.json").read_text())
    assert record["backend"] == "slurm" and record["notes"] == {"job": "1000"}


def test_files_that_the_nodes_have_anyway_are_not_sent(cluster, capsys):
    assert launch("--sync", "config", python="print(1)") == 1
    assert "the nodes of a Slurm job share this file system" in capsys.readouterr().err


def test_a_dry_run_writes_no_more_than_the_script_whatever_a_variable_has(cluster, capsys):
    assert launch("--dry-run", "--env", "A=x\nEND_OF_FILE\ntouch pwned\n", python="print(1)") == 0
    subprocess.run(["bash"], input=capsys.readouterr().out.replace("sbatch", "true"), text=True, check=True)
    assert not (cluster / "pwned").exists()
