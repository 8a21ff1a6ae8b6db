"""Mutual TLS for the coordination service: certificates that the processes of a job show each other (jax 0.12)."""

import dataclasses
import inspect
import os
import ssl
from typing import Any

import jax

from lockstep.config_fields import FilePath, check_fields
from lockstep.errors import ConfigError
from lockstep.job_key import JOB_KEY, PEER_URI_PREFIX, job_key_file

VARIABLES = {
    "cert_file": "JAX_MTLS_CERT_FILE",
    "key_file": "JAX_MTLS_KEY_FILE",
    "ca_file": "JAX_MTLS_CA_FILE",
    "peer_uri_prefix": "JAX_MTLS_PEER_URI_PREFIX",
}
"""JAX's own variables, which also hold for a program that calls ``jax.distributed.initialize`` itself."""

type TlsArguments = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TlsConfig:
    """PEM files with which a process proves that it belongs to the job (``trainer.distributed.tls`` in YAML).

    The service and every process refuse a peer without a certificate of ``ca_file``.

    Raises:
        ConfigError: A path is empty, or the prefix does not end with a slash.

    Example:
        >>> tls = lockstep.hosts.TlsConfig(cert_file="job.pem", key_file="job.key", ca_file="ca.pem")
        >>> lockstep.DistributedConfig(tls=tls).tls.ca_file
        'ca.pem'
    """

    cert_file: FilePath
    """The certificate of this process, with those between it and the authority."""
    key_file: FilePath
    """The private key of ``cert_file``, without a password."""
    ca_file: FilePath
    """The authorities whose certificates are believed: one of the job's own."""
    peer_uri_prefix: str | None = None
    """With what a URI of the peer's certificate must begin, such as ``spiffe://my-job/``; null compares the host of
    ``coordinator_address`` with the names in the certificate of process 0."""

    def __post_init__(self) -> None:
        check_fields(self, "distributed.tls.")
        for name in ("cert_file", "key_file", "ca_file"):
            if not getattr(self, name):
                raise ConfigError(f"distributed.tls.{name} is empty; it must be the path of a PEM file.")
        if self.peer_uri_prefix is not None and not self.peer_uri_prefix.endswith("/"):
            raise ConfigError(
                f"distributed.tls.peer_uri_prefix is {self.peer_uri_prefix!r}; it must end with '/', since "
                "'spiffe://my-job' is also how 'spiffe://my-job.evil' begins."
            )


def tls_is_supported() -> bool:
    """Return whether this JAX can encrypt its coordination service."""
    return "mtls_cert_file" in inspect.signature(jax.distributed.initialize).parameters


def tls_arguments(config: TlsConfig | None) -> TlsArguments:
    """Return what ``jax.distributed.initialize`` takes for a job with TLS; nothing for one without.

    Args:
        config: The files; None: those of JAX's own variables (`VARIABLES`), where they are set, else the key that the
            launcher has given to every process (`JOB_KEY`), where this JAX has TLS.

    Raises:
        ConfigError: The files do not belong together or cannot be read, only some of the variables are set, or this
            JAX has no TLS.
    """
    source = "distributed.tls"
    if config is None:
        values = {name: os.environ[variable] for name, variable in VARIABLES.items() if os.environ.get(variable)}
        if not values and (key := os.environ.get(JOB_KEY)) and tls_is_supported() and (file := job_key_file(key)):
            values = {"cert_file": file, "key_file": file, "ca_file": file, "peer_uri_prefix": PEER_URI_PREFIX}
        if not values:
            return {}
        source = ", ".join(VARIABLES[name] for name in values)
        absent = [VARIABLES[name] for name in ("cert_file", "key_file", "ca_file") if name not in values]
        if absent:
            raise ConfigError(f"{source} is set, but not {', '.join(absent)}: TLS needs all three. Set them, or none.")
        config = TlsConfig(**values)
    if not tls_is_supported():
        raise ConfigError(
            f"{source} is set, but jax {jax.__version__} cannot encrypt its coordination service. Install jax 0.12 or "
            "newer on every host, or remove the setting: the job then talks in clear text."
        )
    _check_files(config)
    return {
        **{f"mtls_{name}": value for name, value in dataclasses.asdict(config).items()},
        "verify_secure_credentials": True,
    }


def _check_files(config: TlsConfig) -> None:
    """Refuse files that JAX would end the process for, without saying which."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        fields = {"cert_file": config.cert_file, "key_file": config.key_file}
        context.load_cert_chain(config.cert_file, config.key_file, password="")
        fields = {"ca_file": config.ca_file}
        context.load_verify_locations(config.ca_file)
    except (OSError, ValueError) as error:  # OSError: that of ssl too
        files = " and ".join(f"distributed.tls.{name} ({path})" for name, path in fields.items())
        raise ConfigError(
            f"{files} cannot be used: {error}. Each must be a readable PEM file, the key that of the certificate and "
            "without a password."
        ) from None
