"""What a task runs: the command's code, its signals, and its output without secrets."""

import argparse
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.errors import ConfigError
from lockstep.job_key import JOB_KEY
from lockstep.launch import main
from lockstep.launch.environment import filter_files, job_environment, read_env_file, run_command
from tests.fake_cloud.commands import LOADER


def test_what_a_line_may_be(tmp_path):
    path = tmp_path / "env"
    path.write_text("# a comment\n\nA=1\nexport B='two words'\nD=\"x=y\"\nE=$HOME#no\nF=\n")
    assert read_env_file(path) == {"A": "1", "B": "two words", "D": "x=y", "E": "$HOME#no", "F": ""}


@pytest.mark.parametrize("line", ["hf_secret_without_name", "1A=hf_secret", "A B=hf_secret", "A =hf_secret"])
def test_a_wrong_line_is_named_by_its_number_alone(tmp_path, line):
    path = tmp_path / "env"
    path.write_text(f"A=1\n{line}\n")
    with pytest.raises(ConfigError, match="line 2: it must be NAME=VALUE") as error:
        read_env_file(path)
    assert "hf_secret" not in str(error.value)


def test_what_is_secret(tmp_path):
    path = tmp_path / "env"
    path.write_text("A=from-file\nB=from-file\nSHORT=abc\n")
    given = [("A", "from-line"), ("WANDB_API_KEY", "typed-here"), ("PLAIN", "1")]
    found = job_environment(argparse.Namespace(env=given, env_file=path), make_key=True)
    key = found.secret.pop(JOB_KEY)
    assert found.public == {"A": "from-line", "PLAIN": "1"}
    assert found.secret == {"B": "from-file", "SHORT": "abc", "WANDB_API_KEY": "typed-here"}
    assert found.remarks == [
        "SHORT: too short to be taken out of output, so what prints it shows it",
        f"no key for the job (no openssl here, or {JOB_KEY} is empty): it talks in clear text, on jax 0.12 too",
    ]
    for value, sent in ((key, {JOB_KEY: key}), ("", {})):
        options = argparse.Namespace(env=[(JOB_KEY, value)], env_file=None)
        assert job_environment(options, make_key=True).secret == sent
    with pytest.raises(ConfigError, match="--env_file nowhere cannot be read"):
        job_environment(argparse.Namespace(env=[], env_file=Path("nowhere")))


SECRET = "hf_0123456789abcdef"


@pytest.fixture
def run(tmp_path):
    """Start a command by the script, in a process group of its own."""
    for name, data in filter_files().items():
        (tmp_path / name).write_bytes(data)

    def start(program, *, forward=False, secrets=()):
        script = run_command(list(secrets), str(tmp_path), forward=forward) + 'echo "code $code"\nexit "$code"\n'
        return subprocess.Popen(
            ["bash", "-c", script, "task", sys.executable, "-c", program],
            env={**os.environ, "TOKEN": SECRET}, stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip

    return start


@pytest.mark.parametrize("forward", [False, True])
def test_the_code_is_the_commands(run, forward):
    process = run("import sys; print('words'); sys.exit(7)", forward=forward)
    assert process.communicate(timeout=60)[0] == "words\ncode 7\n" and process.returncode == 7


@pytest.mark.parametrize("forward", [False, True])
def test_a_signal_is_the_commands_which_ends_in_its_own_way(run, forward):
    program = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.3), print('saved'), sys.exit(85)))\n"
        "print('ready', flush=True); time.sleep(30)"
    )
    process = run(program, forward=forward)
    assert process.stdout.readline() == "ready\n"
    # Kubernetes tells the first process alone, Slurm the whole group.
    os.kill(process.pid, signal.SIGTERM) if forward else os.killpg(process.pid, signal.SIGTERM)
    assert process.communicate(timeout=60)[0] == "saved\ncode 85\n"


def test_secrets_are_replaced_to_the_last_word(run):
    program = f"import os, sys; print('it is', os.environ['TOKEN']); sys.stderr.write('end {SECRET}')"
    process = run(program.replace("sys.stderr", "sys.stdout"), secrets=["TOKEN"])
    assert process.communicate(timeout=60)[0] == "it is <redacted>\nend <redacted>code 0\n"


def test_what_the_command_leaves_behind_is_not_waited_for(run, monkeypatch, tmp_path):
    monkeypatch.setattr("lockstep.launch.environment.DRAIN_S", 0.2)
    program = (
        f"import subprocess; print(subprocess.Popen(['sleep', '600']).pid, file=open({str(tmp_path / 'pid')!r}, 'w'))"
    )
    process = run(f"{program}; exit(7)", secrets=["TOKEN"])
    assert process.wait(timeout=60) == 7
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)


def test_a_directory_of_any_name_is_one_word_of_the_workers_shell(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "home").mkdir()
    for workdir in ("~/a b; touch pwned", "$(touch pwned)", "~"):
        words = ["--backend", "ssh", "--hosts", "one", "--workdir", workdir, "--venv", "~/v; touch pwned", "--dry-run"]
        assert main([*words, "--", "pwd"]) == 0
        (line,) = [line for line in capsys.readouterr().out.splitlines() if "REQUIRE_JAX_PROCESS_COUNT" in line]
        command = shlex.split(line.removesuffix(" < /dev/null"))[-1]
        folder = tmp_path / "home" / workdir.removeprefix("~").removeprefix("/")
        folder.mkdir(exist_ok=True)
        environment = {"HOME": str(tmp_path / "home"), "PATH": "/usr/bin:/bin", **LOADER}
        done = subprocess.run(
            ["sh", "-c", command], env=environment, cwd=tmp_path / "home", capture_output=True, text=True
        )
        assert (done.stdout, done.stderr) == (f"{folder}\n".replace("/\n", "\n"), "")
        assert not list(tmp_path.rglob("pwned"))


def test_keys_are_not_packed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "code").mkdir()
    for name in (".env", "a.py"):
        (tmp_path / "code" / name).write_text("x")
    assert main(["--backend", "ssh", "--hosts", "one", "--sync", ".", "--dry-run", "--", "x"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("tar ")]
    packed = line.partition(" | ")[0]
    listed = subprocess.run(["sh", "-c", f"{packed} | tar -tzf -"], capture_output=True, text=True, check=True).stdout
    assert listed.split() == ["./", "./code/", "./code/a.py"]
