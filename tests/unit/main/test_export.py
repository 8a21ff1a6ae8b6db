"""``lockstep export`` in this process: a training checkpoint becomes a Hugging Face one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.errors import ConfigError, PeerError
from lockstep.hosts import Hosts, MemoryClient
from lockstep.main.export import ExportConfig, export
from lockstep.models import load_hf, read_hf_config
from lockstep.placement import make_mesh
from lockstep.text import load_tokenizer, tokenizer_digest
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
