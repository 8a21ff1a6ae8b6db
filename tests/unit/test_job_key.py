"""The key that the launcher makes for a job, and the file in memory that a process makes of it."""

import os
import shutil
import ssl
import subprocess
import sys

import pytest

from lockstep.errors import ConfigError
from lockstep.job_key import JOB_KEY, PEER_URI_PREFIX, job_key_file, make_job_key

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")


@needs_openssl
def test_each_job_has_a_key_of_its_own_that_is_valid_on_every_clock(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENSSL_CONF", str(tmp_path / "absent"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    keys = make_job_key(), make_job_key()
    assert keys[0] != keys[1] and "\n" not in keys[0] and not list(tmp_path.iterdir())
    file = job_key_file(keys[0])
    ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(file)
    (certificate,) = _authorities(file).get_ca_certs()
    assert certificate["notBefore"] == "Jan  1 00:00:00 2020 GMT"
    ((kind, name),) = certificate["subjectAltName"]
    assert kind == "URI" and name.startswith(PEER_URI_PREFIX)


def _authorities(file):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(file)
    return context


@needs_openssl
def test_the_file_is_in_no_directory_and_ends_with_its_process():
    program = "from lockstep.job_key import job_key_file; import sys; print(job_key_file(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", program, make_job_key()], capture_output=True, text=True, check=True)
    file = done.stdout.strip()
    assert file.startswith("/proc/") and not os.path.exists(file)


def test_without_an_openssl_that_can_there_is_no_key(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert make_job_key() is None
    (tmp_path / "openssl").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "openssl").chmod(0o755)
    assert make_job_key() is None


@pytest.mark.parametrize("value", ["x", "a.b.c", "*.*", "é.é"])
def test_what_is_no_key_is_refused(value):
    with pytest.raises(ConfigError, match=f"{JOB_KEY} is set, but it is no key of lockstep launch"):
        job_key_file(value)
