"""The key of a job: a certificate of its own that the launcher makes, and all its processes show each other (TLS)."""

import base64
import binascii
import functools
import os
import secrets
import ssl
import subprocess
import tempfile
from pathlib import Path

from lockstep.errors import ConfigError

JOB_KEY = "LOCKSTEP_JOB_KEY"
"""The secret variable that has it: private key and certificate, each DER as base64, with a dot between them."""
PEER_URI_PREFIX = "spiffe://lockstep/"
"""The beginning of the URI in the certificate, which all processes show, whatever their hosts are called."""
_CONFIGURATION = f"""\
[req]
distinguished_name = name
prompt = no
[name]
CN = lockstep
[ca]
default_ca = job
[job]
database = index
rand_serial = yes
new_certs_dir = .
default_md = sha256
policy = any_name
x509_extensions = extensions
[any_name]
commonName = supplied
[extensions]
basicConstraints = critical, CA:TRUE
subjectAltName = URI:{PEER_URI_PREFIX}JOB
"""
_COMMANDS = (
    "req -new -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout key.pem -out request.pem -config openssl.cnf",
    # Valid long before now: a worker's clock may be behind this one.
    "ca -batch -selfsign -notext -config openssl.cnf -keyfile key.pem -in request.pem -out certificate.pem "
    "-startdate 20200101000000Z -enddate 20991231235959Z",
)


def make_job_key() -> str | None:
    """Make the key of a job, the value of `JOB_KEY`; None where this machine has no ``openssl`` that can."""
    with tempfile.TemporaryDirectory(prefix="lockstep-key-") as name:
        directory = Path(name)
        (directory / "index").touch()
        (directory / "openssl.cnf").write_text(_CONFIGURATION.replace("JOB", secrets.token_hex(8)), encoding="utf-8")
        environment = {variable: text for variable, text in os.environ.items() if variable != "OPENSSL_CONF"}
        try:
            for command in _COMMANDS:
                subprocess.run(
                    ["openssl", *command.split()],
                    cwd=directory, env=environment, stdin=subprocess.DEVNULL, capture_output=True, check=True,
                    timeout=30,
                )  # fmt: skip
            key, certificate = ((directory / f"{part}.pem").read_text() for part in ("key", "certificate"))
        except (OSError, subprocess.SubprocessError):
            return None
    body = "".join(line for line in key.splitlines() if not line.startswith("-----"))
    return f"{body}.{base64.b64encode(ssl.PEM_cert_to_DER_cert(certificate)).decode()}"


@functools.cache
def job_key_file(value: str) -> str | None:
    """Return the path of a PEM file with a job's key and certificate: in memory, only while this process runs.

    Args:
        value: As `make_job_key` has made it.

    Returns:
        The path; None where the system has no such files.

    Raises:
        ConfigError: The value is something else.
    """
    try:
        key, certificate = (base64.b64decode(part, validate=True) for part in value.split("."))
    except (ValueError, binascii.Error):
        raise ConfigError(
            f"{JOB_KEY} is set, but it is no key of lockstep launch, which sets it. Remove the variable."
        ) from None
    if not hasattr(os, "memfd_create"):
        return None
    body = base64.encodebytes(key).decode()
    text = f"-----BEGIN PRIVATE KEY-----\n{body}-----END PRIVATE KEY-----\n{ssl.DER_cert_to_PEM_cert(certificate)}"
    file = os.memfd_create("lockstep-job-key")
    os.write(file, text.encode())
    return f"/proc/{os.getpid()}/fd/{file}"
