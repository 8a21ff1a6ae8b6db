"""The local backend: environment, programs, and a backend of one's own beside it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep import launch
from lockstep.launch.machines import Ssh
from lockstep.launch.main import parse
from lockstep.launch.record import new_record

LAUNCHER = Path(__file__).resolve().parents[3] / "infra" / "launch.py"


def test_environment_of_a_process():
    options = launch.parse(["--processes", "4", "--devices_per_process", "3", "--env", "A=b=c", "--", "x"])
    base = {"XLA_FLAGS": "--xla_dump_to=/d --xla_force_host_platform_device_count=9", "PATH": "/bin", "HOME": "/h"}
    env = launch.local_environment(base, options, "127.0.0.1:5", 2)
    assert env["XLA_FLAGS"].split() == ["--xla_dump_to=/d", "--xla_force_host_platform_device_count=3"]
    assert (env["LOCKSTEP_COORDINATOR_ADDRESS"], env["LOCKSTEP_NUM_PROCESSES"]) == ("127.0.0.1:5", "4")
    assert (env["LOCKSTEP_PROCESS_ID"], env["JAX_PLATFORMS"], env["TPU_SKIP_MDS_QUERY"]) == ("2", "cpu", "1")
    assert env["A"] == "b=c" and env["HOME"] == "/h" and "no_proxy" not in env
    shares = {int(launch.local_environment({"NPROC": n} if n else {}, options, "", 0)["NPROC"]) for n in ("", "7")}
    assert shares == {7, max(1, len(os.sched_getaffinity(0)) // 4)}
    assert env["PATH"].split(os.pathsep) == [str(Path(sys.executable).parent), "/bin"]
    proxied = launch.local_environment({"http_proxy": "p", "NO_PROXY": "corp"}, options, "127.0.0.1:5", 0)
    assert proxied["no_proxy"] == proxied["NO_PROXY"] == "corp,127.0.0.1,localhost"


def test_programs_are_found_beside_the_interpreter():
    beside = Path(sys.executable).parent / "ruff"
    assert launch.resolve(["ruff", "check"]) == [str(beside), "check"]
    assert launch.resolve(["python", "-V"]) == [sys.executable, "-V"]
    done = subprocess.run([sys.executable, LAUNCHER, "--", "nosuchprogram"], capture_output=True, text=True)
    assert done.returncode == 127
    assert "no program 'nosuchprogram' beside" in done.stderr and "make setup" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "no command given: put it after --"),
        (["--processes", "0", "--", "x"], "--processes: 0 is too small; it must be at least 1"),
        (["--env", "A", "--", "x"], "--env: A has no '='; write NAME=VALUE"),
    ],
)
def test_wrong_options(capsys, arguments, text):
    with pytest.raises(SystemExit):
        launch.parse(arguments)
    assert text in capsys.readouterr().err


class Elsewhere:
    """A backend that runs nothing and has an option of its own."""

    def add_options(self, parser):
        parser.add_argument("--zone", required=True)

    def run(self, options):
        print(options.zone, options.command, options.env)
        return 3


def test_a_backend_of_ones_own_is_one_file(tmp_path, monkeypatch, capsys):
    (tmp_path / "my_backend.py").write_text(
        "from lockstep.launch.machines import Ssh\nfrom tests.unit.launch.test_machines import Elsewhere\n"
        "class Mine(Elsewhere): pass\nclass Machines(Ssh): pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert launch.main(["--zone", "here", "--backend", "my_backend:Mine", "--", "x", "--backend", "y"]) == 3
    assert capsys.readouterr().out == "here ['x', '--backend', 'y'] []\n"
    assert launch.main(["--backend=my_backend:Machines", "--hosts", "one,two", "--dry-run", "--", "x"]) == 0
    assert "ssh" in capsys.readouterr().out
    for name, text in (("my_backend:No", "no attribute 'No'"), ("no_module:Mine", "No module named 'no_module'")):
        assert launch.main(["--backend", name, "--", "x"]) == 1
        said = capsys.readouterr().err
        assert text in said and f"--backend is {name!r}" in said and "PYTHONPATH" in said


def test_a_backend_is_a_class_and_a_row(monkeypatch, capsys):
    monkeypatch.setitem(launch.BACKENDS, "elsewhere", Elsewhere)
    assert launch.main(["--zone", "here", "--backend", "elsewhere", "--env", "A=b", "--", "x", "--zone"]) == 3
    assert capsys.readouterr().out == "here ['x', '--zone'] [('A', 'b')]\n"
    for arguments, text in (
        (["--backend", "elsewhere"], "required: --zone"),
        (["--backend", "elsewhere", "--zone", "here", "--processes", "2"], "unrecognized arguments: --processes"),
        (["--zone", "here"], "unrecognized arguments: --zone"),
    ):
        with pytest.raises(SystemExit):
            launch.parse([*arguments, "--", "x"])
        assert text in capsys.readouterr().err


def find(*words):
    return Ssh().find(parse(["--backend", "ssh", *words, "--", "x"]))


def test_each_host_has_its_place_in_the_job():
    transport = find("--hosts", "me@one,two", "--port", "9000", "--venv", "~/venv", "--ssh_option=-p 2222")
    first, second = transport.workers
    assert first.environment["LOCKSTEP_COORDINATOR_ADDRESS"] == "one:9000"
    assert (second.environment["LOCKSTEP_NUM_PROCESSES"], second.environment["LOCKSTEP_PROCESS_ID"]) == ("2", "1")
    assert (first.ports, second.ports, second.path) == ((9000,), (), ("~/venv/bin",))
    argv = transport.argv(1, "echo 'a b'")
    assert argv[0] == "ssh" and argv[-5:] == ["-p", "2222", "--", "two", "echo 'a b'"] and "BatchMode=yes" in argv
    (alone,) = find("--hosts", "one", "--coordinator", "10.0.0.1").workers
    assert alone.environment["LOCKSTEP_COORDINATOR_ADDRESS"] == "10.0.0.1:8476"


def test_hosts_of_a_file_are_in_the_record_for_launchers_in_other_directories(tmp_path, monkeypatch):
    (tmp_path / "hosts").write_text("# the rack, once\none\n\n  me@two\n")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "one,me@two").write_text("three")
    for given in ("hosts", "./hosts", str(tmp_path / "hosts")):
        monkeypatch.chdir(tmp_path)
        options = parse(["--backend", "ssh", "--hosts", given, "--", "x"])
        monkeypatch.chdir(tmp_path / "elsewhere")
        later = new_record(options, "job").namespace()
        assert [worker.name for worker in Ssh().find(later).workers] == ["one", "me@two"]


def test_the_path_of_an_ssh_key_is_that_of_another_directory_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    words = ("--tpu_name", "pod", "--zone", "us-east5-a")
    for given, kept in (("keys/mine", f"{tmp_path}/keys/mine"), ("~/mine", "/home/me/mine"), ("/mine", "/mine")):
        assert parse([*words, "--ssh_key", given, "--", "x"]).ssh_key == kept
    assert parse([*words, "--", "x"]).ssh_key == "/home/me/.ssh/google_compute_engine"


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("a,b,a", "argument --hosts: a,b,a has a twice. Each host runs one process: name each once."),
        (",", "--hosts: , names no host."),
        ("no/such/file", "--hosts: no/such/file cannot be read"),
        ("a,-oProxyCommand=x", "'-oProxyCommand=x' is no host"),
    ],
)
def test_what_is_no_list_of_hosts(given, text, capsys):
    with pytest.raises(SystemExit):
        parse(["--backend", "ssh", f"--hosts={given}", "--", "x"])
    assert text in capsys.readouterr().err
