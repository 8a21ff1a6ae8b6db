"""A whole ``launch run`` on fake hosts: secrets, copied files, the preflight, what is refused before the start."""

import hashlib
import os
import socket
import subprocess
import sys

import pytest

from lockstep.exits import NOT_FOUND, PREFLIGHT
from lockstep.launch import main
from tests.fake_cloud.cloud import ROOT
from tests.fake_cloud.shellcheck import shellcheck
from tests.isolation import COMPILED_FAST
from tests.multiprocess.launcher import cache_environment

SECRET = "hf_x9Q2Kp7/w+Zt1"
OTHER = "first-half-9182/second-half-7364"


def test_secrets_reach_the_processes_and_are_in_no_byte_that_is_written_or_shown(cloud, tmp_path):
    """The command prints them whole, in two writes, and within an error; other variables of the file are secret too."""
    (tmp_path / "env").write_text(f"# mine\nexport HF_TOKEN='{SECRET}'\nOTHER={OTHER}\nSHORT=ab\n")
    program = (
        "import os, sys, time, hashlib; t = os.environ['HF_TOKEN']; w = sys.stdout.write\n"
        "w('whole ' + t + '\\n'); w('half ' + t[:7]); sys.stdout.flush(); time.sleep(.3); w(t[7:] + ' end\\n')\n"
        "w('json ' + os.environ['OTHER'] + os.environ['SHORT'] + os.environ['WANDB_API_KEY'] + '\\n')\n"
        "w(hashlib.sha256(t.encode()).hexdigest() + '\\n'); sys.stdout.flush(); sys.exit('error: no access with ' + t)"
    )
    words = ("--hosts", cloud.add("a", "b"), "--name", "job", "--env_file", tmp_path / "env", "--no-preflight")
    key = "wandb-key-5551212"
    done = cloud.launch(*map(str, words), "--env", f"WANDB_API_KEY={key}", "--", "python3", "-c", program)
    assert done.returncode == 1
    for line in (
        "whole <redacted>",
        "half <redacted> end",
        "json <redacted>ab<redacted>",
        hashlib.sha256(SECRET.encode()).hexdigest(),
    ):
        assert f"[0] {line}\n" in done.stdout and f"[1] {line}\n" in done.stdout
    assert done.stdout.count("error: no access with <redacted>") == 1
    assert "SHORT: too short to be taken out of output" in done.stderr
    for value in (SECRET, SECRET[:8], OTHER, key):
        assert cloud.bytes_anywhere(value.encode(), done.stdout, done.stderr) == []
    # The search finds what is there: the log has the digest, and the calls have the command's bootstrap.
    assert len(cloud.bytes_anywhere(hashlib.sha256(SECRET.encode()).hexdigest().encode())) == 4
    for path in [
        cloud.jobs / "job",
        *cloud.hosts_directory.rglob("*.lockstep"),
        *cloud.hosts_directory.rglob("attempt-*/*"),
    ]:
        assert path.stat().st_mode & 0o077 == 0, path


@pytest.mark.slow
def test_files_are_copied_once_and_the_command_runs_among_them(cloud, tmp_path):
    project = tmp_path / "project"
    (project / "code").mkdir(parents=True)
    (project / "code" / "main.sh").write_text("cat code/text; echo more >> written; wc -l < written\n")
    (project / "code" / "text").write_text("synced\n")
    (project / "secrets.env").write_text("TOKEN=abcdefgh\n")
    words = ("--hosts", cloud.add("a", "b"), "--name", "job", "--sync", "code", "--no-preflight")
    command = ("--", "sh", "code/main.sh")
    first = cloud.launch(*words, *command, cwd=project)
    assert (first.returncode, first.stderr.count("copying 2 file(s)")) == (0, 1)
    assert sorted(first.stdout.split()) == ["1", "1", "[0]", "[0]", "[1]", "[1]", "synced", "synced"]
    before = len(cloud.calls("a"))
    (project / "code" / "text").write_text("changed\n")
    second = cloud.launch(*words, *command, cwd=project)
    assert sorted(second.stdout.split()) == ["2", "2", "[0]", "[0]", "[1]", "[1]", "changed", "changed"]
    third = cloud.launch(*words, *command, cwd=project)
    assert "3" in third.stdout and [each["number"] for each in cloud.record("job")["attempts"]] == [1, 2, 3]
    # The third found the files there: one connection less per worker.
    assert len(cloud.calls("a")) - before == 4 + 3
    refused = cloud.launch("--hosts", "a", "--sync", ".", "--env_file", "secrets.env", "--", "true", cwd=project)
    assert refused.returncode == 1 and "is among the files of --sync ." in refused.stderr


def test_the_preflight_names_worker_fault_limit_and_fix_and_starts_nothing(cloud):
    with socket.socket() as busy:
        busy.bind(("", 0))
        busy.listen()
        port = str(busy.getsockname()[1])
        done = cloud.launch("--hosts", cloud.add("a", "b"), "--port", port, "--", "nosuchprogram")
    assert done.returncode == PREFLIGHT
    lines = done.stderr.splitlines()
    assert (
        f"error: worker a: port {port} is in use, and the job listens on it. End the process that `sudo ss" in lines[2]
    )
    assert "worker a: no program 'nosuchprogram' in " in lines[3] and "worker b: no program" in lines[4]
    assert "Nothing was started. (--no-preflight starts all the same.)" in lines[-1]
    assert not list(cloud.hosts_directory.rglob("attempt-*"))
    unchecked = cloud.launch("--hosts", "a", "--no-preflight", "--", "nosuchprogram")
    assert unchecked.returncode == NOT_FOUND and "[0] error: no program 'nosuchprogram'" in unchecked.stdout


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--retries", "1", "--no-foreground"), "--retries 1 with --no-foreground: the launcher must stay"),
        (("--require-process-count", "3"), "--require-process-count is 3, but there are 2 workers"),
        (("--name", "../up"), "--name is '../up'; it must be"),
        (("--env_file", "nowhere"), "--env_file nowhere cannot be read"),
        (("--sync", "nowhere"), "--sync nowhere: there is no such file or directory"),
        (("--sync", "/etc"), "--sync /etc is not below"),
    ],
)
def test_what_cannot_work_is_refused_before_a_worker_is_reached(cloud, monkeypatch, capsys, words, text):
    hosts = cloud.add("a", "b")
    for name in ("PATH", "FAKE_CLOUD", "LOCKSTEP_JOBS_DIR"):
        monkeypatch.setenv(name, cloud.environment[name])
    assert main(["--hosts", hosts, *words, "--", "true"]) == 1
    assert f"error: {text}" in capsys.readouterr().err
    assert not cloud.calls()


def test_dry_run_prints_commands_that_work_when_pasted(cloud, tmp_path):
    (tmp_path / "env").write_text(f"HF_TOKEN='{SECRET}'\n")
    (cloud.directory / "code.sh").write_text("echo ran $LOCKSTEP_PROCESS_ID $A $HF_TOKEN")
    words = ("--hosts", cloud.add("a", "b"), "--sync", "code.sh", "--env_file", str(tmp_path / "env"))
    done = cloud.launch(*words, "--env", "A=x y", "--env", "B_KEY=verysecret", "--dry-run", "--", "sh", "code.sh")
    assert done.returncode == 0 and not cloud.calls() and not cloud.jobs.exists()
    assert SECRET not in done.stdout and "verysecret" not in done.stdout and "'B_KEY=<redacted>'" in done.stdout
    pasted = subprocess.run(
        ["bash", "-e"], input=done.stdout, env=cloud.environment, cwd=cloud.directory, capture_output=True, text=True
    )
    # SC2029: what ssh gets is expanded here, as it is meant.
    assert shellcheck(done.stdout, "--shell=bash", "--exclude=SC2029,SC1090,SC1091") == ""
    assert (pasted.returncode, pasted.stdout) == (0, f"ran 0 x y {SECRET}\nran 1 x y {SECRET}\n"), pasted.stderr


@pytest.mark.nightly
@pytest.mark.multiprocess
def test_simpo_trains_on_two_hosts(cloud, tmp_path):
    """The tiny run as a user starts it, from files that are copied to hosts with nothing but the environment."""
    words = ("--hosts", cloud.add("a", "b"), "--coordinator", "127.0.0.1", "--venv", os.path.dirname(sys.executable))
    flags = f"--xla_force_host_platform_device_count=2 {COMPILED_FAST}"
    variables = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": str(ROOT / "src"), "TPU_SKIP_MDS_QUERY": "1"}
    variables = {**cache_environment(), **variables}
    given = [word for name, value in variables.items() for word in ("--env", f"{name}={value}")]
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = str(probe.getsockname()[1])
    synced = ("config/simpo_tiny.yaml", "data/demo/tokenizer", "data/preferences/sums.jsonl")
    command = f"lockstep train-simpo --config_path {synced[0]} --trainer.run_id run --trainer.num_train_steps 12"
    done = cloud.launch(
        *(*words, "--name", "job", "--port", port, *given),
        *(word for path in synced for word in ("--sync", path)),
        *("--", *command.split(), "--trainer.log_dir", str(tmp_path)),
        cwd=ROOT,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "done: 12 of 12 steps" in done.stdout and "process 1 of 2" in done.stdout
    assert (tmp_path / "run" / "samples.jsonl").exists()
