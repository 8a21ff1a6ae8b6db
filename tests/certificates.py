"""Certificates of an authority of the test's own, made by openssl."""

import shutil
import subprocess
from pathlib import Path

import pytest


def openssl(directory: Path, *arguments: str) -> None:
    """Run one command of openssl in a directory; the test is skipped where there is no openssl."""
    command = shutil.which("openssl") or pytest.skip("openssl is not installed")
    done = subprocess.run([command, *arguments], cwd=directory, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def make_authority(directory: Path, name: str = "ca") -> None:
    """Write ``NAME.pem`` and ``NAME.key``."""
    openssl(
        directory, "req", "-x509", *_key(name), "-out", f"{name}.pem", "-days", "9999", "-subj", f"/CN={name}",
        "-addext", "basicConstraints=critical,CA:TRUE",
    )  # fmt: skip


def make_certificate(directory: Path, name: str, names: str, authority: str = "ca") -> dict[str, str]:
    """Write ``NAME.pem`` and ``NAME.key``, and return the three paths by the fields of `TlsConfig`.

    Args:
        names: The certificate's subjectAltName, such as ``IP:127.0.0.1`` or ``URI:spiffe://my-job/worker``.
    """
    openssl(directory, "req", *_key(name), "-out", f"{name}.csr", "-subj", f"/CN={name}")
    (directory / f"{name}.ext").write_text(f"subjectAltName={names}\n")
    openssl(
        directory, "x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.pem", "-days", "9999",
        "-CA", f"{authority}.pem", "-CAkey", f"{authority}.key", "-CAcreateserial", "-extfile", f"{name}.ext",
    )  # fmt: skip
    files = {"cert_file": f"{name}.pem", "key_file": f"{name}.key", "ca_file": f"{authority}.pem"}
    return {field: str(directory / file) for field, file in files.items()}


def _key(name: str) -> tuple[str, ...]:
    return ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", f"{name}.key")
