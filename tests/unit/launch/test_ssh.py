"""A list of hosts."""

import re

import pytest

from lockstep.errors import ConfigError
from lockstep.launch.main import parse
from lockstep.launch.ssh import Ssh, read_hosts


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


def test_hosts_of_a_file(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("# the rack\none\n\n  me@two\n")
    assert read_hosts(str(path)) == ["one", "me@two"]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("a,b,a", "--hosts a,b,a has a twice. Each host runs one process: name each once."),
        (",", "--hosts , names no host."),
        ("no/such/file", "--hosts no/such/file cannot be read"),
        ("a,-oProxyCommand=x", "'-oProxyCommand=x' is no host"),
    ],
)
def test_what_is_no_list_of_hosts(given, text):
    with pytest.raises(ConfigError, match=re.escape(text)):
        read_hosts(given)
