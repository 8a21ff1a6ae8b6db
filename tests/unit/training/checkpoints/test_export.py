"""``lockstep export`` in this process, from the configuration to the files."""

import contextlib
import subprocess
import sys

import fsspec
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.errors import ConfigError, PeerError
from lockstep.hosts import Hosts, MemoryClient
from lockstep.models import load_hf, read_hf_config, save_target
from lockstep.placement import make_mesh
from lockstep.text import load_tokenizer, tokenizer_digest
from lockstep.training import ExportConfig, export
from tests import tiny
from tests.multiprocess.harness import run_threads


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "checkpoints"
    return path, jax.tree.map(np.asarray, tiny.save_checkpoint(str(path)))


def alone():
    return Hosts(MemoryClient.hub(1)[0])


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_the_model_of_a_checkpoint_is_exported(checkpoints, tmp_path, dtype, capsys):
    path, model = checkpoints
    out = str(tmp_path / "out")
    assert export(ExportConfig(checkpoint=str(path), output=out, dtype=dtype), alone()) == 0
    kept = dtype or "float32"
    hf = read_hf_config(out)
    assert (hf["vocab_size"], hf["torch_dtype"]) == (tiny.vocab_size(), kept), "without the rows that pad it"
    found = load_hf(out, make_mesh("auto"), dtype=jnp.dtype(kept))
    for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(model), strict=True):
        cut = tuple(slice(size) for size in mine.shape)
        np.testing.assert_array_equal(mine, theirs[cut].astype(kept))
    assert tokenizer_digest(load_tokenizer(out)) == tokenizer_digest(tiny.tokenizer())
    assert f"exported {path}/step-4 to {out}" in capsys.readouterr().out


def test_processes_share_the_work_and_fail_together(checkpoints, tmp_path):
    path, _ = checkpoints
    run_threads(lambda hosts: export(ExportConfig(checkpoint=str(path), output=str(tmp_path / "out")), hosts), 2)
    assert (tmp_path / "out" / "config.json").is_file()
    with pytest.raises(PeerError, match="there is no checkpoint of step 5"):
        export(ExportConfig(checkpoint=str(path), output=str(tmp_path / "no"), step=5), alone())
    assert not (tmp_path / "no").exists()


def test_values_that_cannot_work():
    with pytest.raises(ConfigError, match=r"dtype is 'int8'; it must be float32 or bfloat16"):
        ExportConfig(checkpoint="a", output="b", dtype="int8")
    with pytest.raises(ConfigError, match="output is empty"):
        ExportConfig(checkpoint="a", output="")


HOLDER = """
import sys, time
from lockstep.hosts.lease import Lease
Lease(sys.argv[1], file=sys.argv[2], renew_s=0.05).take()
print("taken", flush=True)
time.sleep(600)
"""


@contextlib.contextmanager
def held(place, file):
    """Another process that has the lease of a place."""
    other = subprocess.Popen([sys.executable, "-c", HOLDER, place, file], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout.readline() == "taken\n"
        yield other
    finally:
        other.kill()
        other.wait()


def test_an_export_is_refused_while_another_job_writes_there(checkpoints, tmp_path):
    out = str(tmp_path / "out")
    config = ExportConfig(checkpoint=str(checkpoints[0]), output=out)
    with held(out, save_target(out, "").lease) as other:
        with pytest.raises(PeerError, match=rf"out: process {other.pid} on .* choose another output"):
            export(config, alone())
        assert not (tmp_path / "out").exists()
    assert export(config, alone()) == 0  # the other one is dead
    assert [path.name for path in tmp_path.iterdir()] == ["out"] and not (tmp_path / "out" / "lease.json").exists()


def test_a_lease_of_an_export_to_a_bucket_is_beside_the_model_and_is_given_back(checkpoints):
    filesystem = fsspec.filesystem("memory")
    filesystem.store.clear()
    url = "memory://bucket/model"
    assert save_target(url, "").lease == f"{url}/lease.json"
    assert export(ExportConfig(checkpoint=str(checkpoints[0]), output=url), alone()) == 0
    names = {name.rpartition("/")[2] for name in filesystem.store}
    filesystem.store.clear()
    assert {"config.json", "model.safetensors"} <= names and "lease.json" not in names
