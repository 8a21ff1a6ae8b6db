"""The command line of doctor: whose key is whose, and a process whose coordinator is not there."""

import os
import re
import socket
import subprocess
import sys

import pytest

from lockstep.errors import ConfigError
from lockstep.main import cli
from lockstep.main import prepare as doctor


@pytest.fixture
def called(monkeypatch):
    calls = []
    monkeypatch.setattr(doctor, "examine", lambda *arguments: calls.append(arguments) or 0)
    return calls


def test_keys_go_to_doctor_or_to_the_run(called, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("tokenizer: data/demo/tokenizer\ntrainer: {distributed: {heartbeat_timeout_s: 50}}\n")
    arguments = ["--self-test", "--config_path", str(path), "--timeout_s", "20", "--trainer.mesh_shape=1,2,2"]
    assert doctor.run_doctor([*arguments, "--buckets", "[gs://mine]"]) == 0
    config, needs, distributed, _ = called[0]
    assert config.self_test and config.buckets == ["gs://mine"]
    assert (needs.tokenizer, needs.mesh_shape, needs.written) == ("data/demo/tokenizer", "1,2,2", ("gs://mine",))
    assert (distributed.timeout_s, distributed.initialization_timeout_s) == (20, 20)
    assert distributed.heartbeat_timeout_s == 50


def test_buckets_may_be_given_without_brackets(called):
    doctor.run_doctor(["--buckets", "gs://mine,gs://yours"])
    assert called[0][0].buckets == ["gs://mine", "gs://yours"]


def test_a_switch_may_have_a_value(called):
    doctor.run_doctor(["--self-test", "false", "--measure", "false"])
    assert not called[0][0].self_test and not called[0][0].measure


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["now"], "'now' was not expected. See lockstep doctor --help"),
        (["--calibrate"], "argument --calibrate has no value"),
        (["--config_path", "no/such.yaml"], "no/such.yaml cannot be read"),
        (["--timeout_s", "-1"], "timeout_s is -1.0; it must be more than 0"),
        (["--trainer.distributed.timeout", "3"], "unknown key 'timeout'"),
    ],
)
def test_a_wrong_command_line_says_why(arguments, text, called):
    with pytest.raises(ConfigError, match=text):
        doctor.run_doctor(arguments)


@pytest.mark.parametrize("value", ["free", "0", "-1", "inf", "nan"])
def test_a_price_is_a_number_above_0(value):
    text = f"--dollars_per_chip_hour is '{value}'; it must be a number of dollars above 0, such as 4.2."
    with pytest.raises(ConfigError, match=re.escape(text)):
        doctor._positive("--dollars_per_chip_hour", value, "a number of dollars", "4.2")


def test_help_lists_the_keys(capsys):
    assert cli.run(["doctor", "--help"]) == 0
    assert "--calibrate" in capsys.readouterr().out


@pytest.mark.slow
def test_a_coordinator_that_is_not_there_is_reported_and_the_process_ends():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    given = {"COORDINATOR_ADDRESS": address, "NUM_PROCESSES": "2", "PROCESS_ID": "1"}
    done = subprocess.run(
        [sys.executable, "-c", "from lockstep.main.cli import main; main()", "doctor", "--timeout_s", "3"],
        env={**os.environ, **{f"LOCKSTEP_{name}": value for name, value in given.items()}},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert f"were there within 3 s; the coordinator {address} does not answer" in done.stdout
    assert "ok       versions: " in done.stdout and "1 to fix" in done.stdout
