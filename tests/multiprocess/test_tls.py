"""A job whose coordination service is encrypted, between real processes: who gets in, and who does not."""

import shutil
import socket
import ssl
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.hosts import Hosts
from lockstep.hosts._client import service_address
from lockstep.hosts.tls import VARIABLES, tls_is_supported
from lockstep.job_key import JOB_KEY
from tests.certificates import make_authority, make_certificate
from tests.multiprocess.harness import run_command, run_processes

pytestmark = pytest.mark.multiprocess

HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)
"""How a gRPC client begins; the service answers with a frame of its settings (type 4)."""
needs_tls = pytest.mark.skipif(not tls_is_supported(), reason="jax 0.12 is the first with TLS")


def is_answered(address: str, context: ssl.SSLContext | None) -> bool:
    """Whether the service at an address takes somebody for a client, who comes with or without TLS."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), 10) as plain:
        try:
            connection = plain if context is None else context.wrap_socket(plain)
            connection.sendall(HTTP2)
            answer = connection.recv(9)
        except OSError:  # ssl.SSLError among them
            return False
        return answer[3:4] == b"\x04"


def client_context(files: dict[str, str] | None) -> ssl.SSLContext:
    """A client's side of TLS, which believes any service, with a certificate or without."""
    context = ssl._create_unverified_context()
    context.set_alpn_protocols(["h2"])
    if files is not None:
        context.load_cert_chain(files["cert_file"], files["key_file"])
    return context


def body_strangers(hosts: Hosts, job: dict[str, str], stranger: dict[str, str]):
    rows = hosts.client.increment("counted")
    hosts.barrier("both")
    address = service_address()
    contexts = {
        "of the job": client_context(job),
        "of another authority": client_context(stranger),
        "without a certificate": client_context(None),
        "without TLS": None,
    }
    answered = [name for name, context in contexts.items() if is_answered(address, context)]
    hosts.barrier("asked")
    hosts.client.delete("counted")
    return [rows in (1, 2), answered]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """The files of the job, and those of a stranger with an authority of his own."""
    directory = tmp_path_factory.mktemp("tls")
    files = {}
    for name, authority in (("job", "ca"), ("stranger", "other")):
        make_authority(directory, authority)
        files[name] = make_certificate(directory, name, f"URI:spiffe://{name}/worker,IP:127.0.0.1", authority)
    return files


@pytest.mark.parametrize("prefix", [pytest.param(None, marks=pytest.mark.slow), "spiffe://job/"])
def test_only_who_has_a_certificate_of_the_jobs_authority_is_answered(certificates, prefix):
    env = {VARIABLES[name]: path for name, path in certificates["job"].items()}
    if prefix is not None:
        env[VARIABLES["peer_uri_prefix"]] = prefix
    if not tls_is_supported():
        run = run_command(["python", "-m", "tests.multiprocess.scenarios", "begin"], env=env)
        assert run.code == 1 and "cannot encrypt its coordination service" in run.logs[0], run.output
        return
    results = run_processes(
        body_strangers, args=(certificates["job"], certificates["stranger"]), processes=2, devices=1, env=env
    )
    assert results == [[True, ["of the job"]]] * 2


LAUNCHED = f"""
import os, ssl, lockstep
from lockstep.hosts._client import service_address
from lockstep.job_key import job_key_file
from tests.multiprocess.test_tls import client_context, is_answered
hosts = lockstep.start()
key = os.environ.get({JOB_KEY!r})
context = client_context(dict.fromkeys(("cert_file", "key_file"), job_key_file(key)) if key else None)
print("answered", is_answered(service_address(), None), is_answered(service_address(), context), key)
hosts.barrier("asked")
"""


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
@pytest.mark.parametrize(
    "words", [(), pytest.param(("--env", f"{JOB_KEY}="), marks=pytest.mark.slow)], ids=["key", "none"]
)
def test_a_launched_job_is_encrypted_without_a_setting_and_shows_its_key_to_nobody(words):
    root = Path(__file__).parents[2]
    launched = [sys.executable, "infra/launch.py", "--devices_per_process", "1", *words, "--", "python", "-c", LAUNCHED]
    done = subprocess.run(launched, cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    encrypted = tls_is_supported() and not words
    said = f"answered {not encrypted} {encrypted} {'' if words else '<redacted>'}"
    assert [f"[{index}] {said}" in done.stdout for index in (0, 1)] == [True, True], done.stdout


@needs_tls
@pytest.mark.slow
@pytest.mark.parametrize("wrong", ["a stranger's certificate", "another prefix"])
def test_a_job_that_does_not_believe_itself_ends_with_a_text(certificates, wrong):
    env = {VARIABLES[name]: path for name, path in certificates["job"].items()}
    if wrong == "another prefix":
        env[VARIABLES["peer_uri_prefix"]] = "spiffe://stranger/"
    else:
        env[VARIABLES["ca_file"]] = certificates["stranger"]["ca_file"]
    run = run_command(["python", "-m", "tests.multiprocess.scenarios", "begin", "3"], env=env, devices=1)
    assert run.code == 85 and "not all of the 2 processes of the job" in run.output, run.output
    assert "the certificates of distributed.tls" in run.output
