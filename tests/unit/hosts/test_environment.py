"""What every host must have the same of, so that its programs are the same."""

import importlib.metadata

import jax
import pytest

from lockstep.hosts import environment


@pytest.fixture(autouse=True)
def no_flags(monkeypatch):
    for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS"):
        monkeypatch.delenv(name, raising=False)


def test_versions_and_source_are_named():
    found = environment()
    assert found["jax version"] == jax.__version__
    assert len(found["code of lockstep"]) == 64 and {"jaxlib version", "libtpu version"} <= found.keys()


def test_versions_of_what_finds_tokens_are_named():
    found = environment()
    for name in ("numpy", "transformers", "tokenizers"):
        assert found[f"{name} version"] == importlib.metadata.version(name)


def test_each_flag_has_an_entry_of_its_own(monkeypatch):
    before = environment()
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1 --xla_b")
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_a=2")
    new = dict(environment().items() - before.items())
    assert new == {"XLA_FLAGS --xla_a": "1", "XLA_FLAGS --xla_b": "set", "LIBTPU_INIT_ARGS --xla_a": "2"}


def test_a_directory_for_dumps_may_differ(monkeypatch):
    before = environment()
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/tmp/process-3")
    assert environment() == before


def test_an_option_that_changes_programs_is_seen():
    before = environment()
    with jax.default_matmul_precision("highest"):
        assert environment()["compile option jax_default_matmul_precision"] == "highest"
    assert environment() == before
