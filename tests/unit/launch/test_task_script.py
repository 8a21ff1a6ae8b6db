"""What a task runs: the command's code, its signals, and its output without secrets."""

import os
import signal
import subprocess
import sys

import pytest

from lockstep.launch.task_script import filter_files, run_command

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
