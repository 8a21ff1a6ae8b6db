"""Which files encrypt the coordination service, and which are refused before JAX ends the process without a word."""

import jax
import pytest

from lockstep.errors import ConfigError
from lockstep.hosts import TlsConfig
from lockstep.hosts.tls import VARIABLES, tls_arguments, tls_is_supported
from tests.certificates import make_authority, make_certificate, openssl

needs_tls = pytest.mark.skipif(not tls_is_supported(), reason="jax 0.12 is the first with TLS")


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for variable in VARIABLES.values():
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tls")
    make_authority(directory)
    return make_certificate(directory, "job", "URI:spiffe://my-job/worker")


def test_nothing_is_passed_where_nothing_is_set():
    assert tls_arguments(None) == {}


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"cert_file": ""}, "distributed.tls.cert_file is empty; it must be the path of a PEM file"),
        ({"peer_uri_prefix": "spiffe://job"}, "peer_uri_prefix is 'spiffe://job'; it must end with '/'"),
    ],
)
def test_values_that_cannot_work(values, text):
    with pytest.raises(ConfigError, match=text):
        TlsConfig(**{"cert_file": "a", "key_file": "b", "ca_file": "c"} | values)


def test_variables_of_which_one_is_missing(monkeypatch):
    monkeypatch.setenv("JAX_MTLS_CERT_FILE", "a.pem")
    with pytest.raises(ConfigError, match="JAX_MTLS_CERT_FILE is set, but not JAX_MTLS_KEY_FILE, JAX_MTLS_CA_FILE:"):
        tls_arguments(None)


@pytest.mark.skipif(tls_is_supported(), reason="jax 0.11 is the last without TLS")
@pytest.mark.parametrize("by_variables", [False, True])
def test_a_jax_without_tls_refuses_to_talk_in_clear_text(monkeypatch, files, by_variables):
    for name, path in files.items():
        monkeypatch.setenv(VARIABLES[name], path)
    with pytest.raises(ConfigError, match=rf"is set, but jax {jax.__version__} cannot encrypt.*Install jax 0.12"):
        tls_arguments(None if by_variables else TlsConfig(**files))


@needs_tls
def test_what_jax_is_told(monkeypatch, files):
    told = {f"mtls_{name}": path for name, path in files.items()}
    assert tls_arguments(TlsConfig(**files)) == {
        **told, "mtls_peer_uri_prefix": None, "verify_secure_credentials": True,
    }  # fmt: skip
    for name, path in files.items():
        monkeypatch.setenv(VARIABLES[name], path)
    monkeypatch.setenv("JAX_MTLS_PEER_URI_PREFIX", "spiffe://my-job/")
    assert tls_arguments(None) == {
        **told, "mtls_peer_uri_prefix": "spiffe://my-job/", "verify_secure_credentials": True,
    }  # fmt: skip


@needs_tls
@pytest.mark.parametrize(
    ("field", "kind"),
    [
        *((field, kind) for field in ("cert_file", "key_file", "ca_file") for kind in ("missing", "empty")),
        ("cert_file", "of another"),
        ("key_file", "of another"),
        ("key_file", "with a password"),
    ],
)
def test_files_that_cannot_be_used_are_named(tmp_path, files, field, kind):
    wrong = tmp_path / "wrong.pem"
    if kind == "empty":
        wrong.touch()
    elif kind == "of another":
        make_authority(tmp_path, "another")
        wrong = tmp_path / ("another.pem" if field == "cert_file" else "another.key")
    elif kind == "with a password":
        openssl(tmp_path, "ec", "-aes256", "-passout", "pass:secret", "-in", files["key_file"], "-out", "wrong.pem")
    with pytest.raises(ConfigError, match=rf"distributed.tls.{field} \(.*{wrong.name}\).* cannot be used: "):
        tls_arguments(TlsConfig(**files | {field: str(wrong)}))
