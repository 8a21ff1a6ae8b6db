import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import fsspec
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from safetensors.numpy import load_file

from lockstep.errors import PeerError
from lockstep.hosts import Hosts
from lockstep.models import (
    LlamaLMHeadModel,
    SavedTensor,
    export_hf,
    load_config,
    load_hf,
    read_hf_config,
    save_hf,
    skeleton,
)
from lockstep.models.hf import saved_tensor
from lockstep.models.hf.save_writer import gather_program
from lockstep.placement import PARAMETER_AXES, make_mesh
from tests import tiny
from tests.multiprocess.harness import run_threads

GOLDEN = Path(__file__).parents[3] / "golden"


def load(path: Path, shape: str = "1,1,1", dtype: Any = jnp.float32) -> LlamaLMHeadModel:
    """A model on one device, for which least is compiled, or on four."""
    return load_hf(str(path), make_mesh(shape, jax.devices()[: 1 if shape == "1,1,1" else 4]), PARAMETER_AXES, dtype)


def changed(model: LlamaLMHeadModel) -> LlamaLMHeadModel:
    return jax.tree.map(lambda x: jax.device_put(np.asarray(x) + 1, x.sharding), model)


def same(one: LlamaLMHeadModel, other: LlamaLMHeadModel) -> bool:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in pairs)


@pytest.mark.parametrize(
    "family",
    [
        "qwen2",
        pytest.param("llama_tied", marks=pytest.mark.slow),
        *(pytest.param(f, marks=pytest.mark.nightly) for f in ("llama3", "mistral", "qwen3")),
    ],
)
def test_a_checkpoint_survives_the_round_trip_exactly(family: str, tmp_path: Path) -> None:
    model = load(GOLDEN / family, "1,2,2", jnp.bfloat16)
    save_hf(model, tmp_path / "out")
    assert same(load(tmp_path / "out", "1,4,1", jnp.bfloat16), model)
    assert load_config(str(tmp_path / "out")) == load_config(str(GOLDEN / family))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]
    ours = load_file(tmp_path / "out" / "model.safetensors")
    theirs = {n: t for file in (GOLDEN / family).glob("*.safetensors") for n, t in load_file(file).items()}
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype
        np.testing.assert_array_equal(ours[name], tensor)


@pytest.mark.slow
def test_float32_weights_survive_in_several_files(tmp_path: Path) -> None:
    model = jax.tree.map(lambda x: jax.device_put(1.1 * np.asarray(x), x.sharding), load(GOLDEN / "qwen2", "1,2,2"))
    save_hf(model, tmp_path, max_shard_bytes=40_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 3 and files[0] == f"model-00001-of-{len(files):05}.safetensors"
    sizes = [sum(t.nbytes for t in load_file(tmp_path / file).values()) for file in files]
    assert max(sizes) <= 40_000 and sum(sizes) == index["metadata"]["total_size"]
    assert same(load(tmp_path), model)
    assert read_hf_config(str(tmp_path))["torch_dtype"] == "float32"


def test_dtype_casts(tmp_path: Path) -> None:
    model = load(GOLDEN / "qwen3")
    save_hf(model, tmp_path, dtype=jnp.bfloat16)
    assert read_hf_config(str(tmp_path))["torch_dtype"] == "bfloat16"
    assert same(load(tmp_path), model)


def test_a_gather_compiles_once_per_parameter_not_per_layer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = load(GOLDEN / "llama_tied", "1,2,2")
    gather_program.cache_clear()
    with jax.log_compiles(True):
        for name in ("first", "second"):
            save_hf(model, tmp_path / name)
    compiled = [r for r in caplog.records if "Finished XLA compilation of jit(lockstep_gather_rows)" in r.getMessage()]
    assert 0 < len(compiled) <= len(jax.tree.leaves(model))


@pytest.mark.slow
def test_the_tokenizer_and_its_special_tokens_are_saved(tmp_path: Path) -> None:
    class Tokenizer:
        bos_token_id, eos_token_id, pad_token_id, name_or_path = 5, 7, None, ""

        def get_vocab(self) -> dict[str, int]:
            return {"<|im_end|>": 3, "<end>": 7}

        def convert_ids_to_tokens(self, token: int) -> str:
            return {3: "<|im_end|>", 7: "<end>"}[token]

        def save_pretrained(self, directory: str) -> None:
            (Path(directory) / "tokenizer.json").write_text("{}")

    save_hf(load(GOLDEN / "llama3"), tmp_path / "out", tokenizer=Tokenizer())
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    config = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (5, 7, None)
    assert transformers.GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == [3, 7]


def test_a_checkpoint_is_replaced_whole(tmp_path: Path) -> None:
    save_hf(load(GOLDEN / "llama_tied"), tmp_path / "out", max_shard_bytes=40_000)
    save_hf(load(GOLDEN / "llama3"), tmp_path / "out")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]


def test_what_is_not_a_checkpoint_is_not_replaced(tmp_path: Path) -> None:
    model = load(GOLDEN / "llama3")
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(PeerError, match=r"is not a checkpoint \(no config\.json\).*Choose another path"):
        save_hf(model, tmp_path)
    with pytest.raises(PeerError, match=r"thesis\.tex is a file"):
        save_hf(model, tmp_path / "thesis.tex")
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_a_failure_leaves_the_old_checkpoint_and_nothing_else(tmp_path: Path) -> None:
    class Broken:
        def get_vocab(self) -> dict[str, int]:
            return {}

        def save_pretrained(self, directory: str) -> None:
            raise OSError("no space left on device")

    old = load(GOLDEN / "llama3")
    save_hf(old, tmp_path / "out")
    with pytest.raises(PeerError, match="no space left on device"):
        save_hf(changed(old), tmp_path / "out", tokenizer=Broken())
    assert same(load(tmp_path / "out"), old)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]


def test_a_bucket_gets_the_same_files(tmp_path: Path) -> None:
    filesystem = fsspec.filesystem("memory")
    filesystem.store.clear()
    model = load(GOLDEN / "qwen2")
    for path in (tmp_path / "out", "memory://bucket/out"):
        assert save_hf(model, path, max_shard_bytes=40_000, dtype=jnp.bfloat16)
    stored = {name.rsplit("/", 1)[-1]: filesystem.cat_file(name) for name in filesystem.store}
    filesystem.store.clear()
    assert stored == {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}


def test_rows_that_pad_the_vocabulary_are_left_out(tmp_path: Path) -> None:
    model = load(GOLDEN / "llama3")
    save_hf(model, tmp_path / "out", vocab_size=model.Vocab.size - 3)
    assert read_hf_config(str(tmp_path / "out"))["vocab_size"] == model.Vocab.size - 3
    found = load(tmp_path / "out", "1,4,1")
    np.testing.assert_array_equal(found.embed.array, np.asarray(model.embed.array)[:-3])


def test_a_save_that_is_interrupted_leaves_the_old_checkpoint_and_nothing_else(tmp_path: Path) -> None:
    old = load(GOLDEN / "llama3")
    save_hf(old, tmp_path / "out")
    assert not save_hf(changed(old), tmp_path / "out", interrupted=lambda: True)
    assert same(load(tmp_path / "out"), old)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]


def test_hosts_that_share_the_place_write_files_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without devices: what each reads is its own."""
    monkeypatch.setattr(saved_tensor, "MIN_PART_BYTES", 1)
    model = skeleton(64, tiny.CONFIG)

    def body(hosts: Hosts, shared: bool) -> set[str]:
        mine: set[str] = set()

        def rows(tensor: SavedTensor, start: int, stop: int) -> np.ndarray:
            mine.add(tensor.name)
            return np.full((tensor.shape[0] * (stop - start) // tensor.rows, *tensor.shape[1:]), 1.0, np.float32)

        export_hf(model, rows, tmp_path / ("out" if shared or hosts.is_leader else f"other{hosts.index}"), hosts=hosts)
        return mine

    for shared in (True, False):
        read = run_threads(body, 3, shared)
        names = set(load_file_names(tmp_path / "out"))
        assert set.union(*read) == names and sum(map(len, read)) == len(names), "each tensor is read by one host"
        assert all(read) if shared else read[1:] == [set(), set()], "who does not see the directory writes nothing"


def load_file_names(directory: Path) -> list[str]:
    return [name for file in directory.glob("*.safetensors") for name in load_file(file)]


def test_a_model_on_one_device_without_a_mesh_is_saved(tmp_path: Path) -> None:
    model = load(GOLDEN / "llama_tied")
    alone = jax.tree.map(lambda x: jax.device_put(np.asarray(x), jax.devices()[1]), model)
    save_hf(alone, tmp_path / "out")
    assert same(load(tmp_path / "out"), model)


def test_a_model_is_saved_by_a_loop_that_computes_in_64_bits(tmp_path: Path) -> None:
    model = load(GOLDEN / "llama_tied")
    with jax.enable_x64(True):
        save_hf(model, tmp_path / "out")
    assert same(load(tmp_path / "out"), model)


SAVING = """
import sys, time
from pathlib import Path

import jax
from lockstep.models import load_hf, save_hf
from lockstep.placement import PARAMETER_AXES, make_mesh

source, path, go = sys.argv[1:]

def interrupted():  # asked for while files are written
    print("saving", flush=True)
    while not Path(go).exists():
        time.sleep(0.05)
    return False

save_hf(load_hf(source, make_mesh("1,1,1", jax.devices()[:1]), PARAMETER_AXES), path, interrupted=interrupted)
"""


@pytest.mark.slow
@pytest.mark.parametrize("killed", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_two_jobs_that_save_to_a_path_do_not_spoil_each_other(killed: bool, tmp_path: Path) -> None:
    path, go = tmp_path / "deeper" / "out", tmp_path / "go"
    arguments = [str(GOLDEN / "qwen2"), str(path), str(go)]
    other = subprocess.Popen([sys.executable, "-c", SAVING, *arguments], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None and other.stdout.readline() == "saving\n"
        mine = changed(load(GOLDEN / "qwen2"))
        if killed:
            other.kill()
            other.wait()
        else:
            with pytest.raises(PeerError, match=f"process {other.pid} on .* has its lease.* choose another path"):
                save_hf(mine, path)
            go.touch()
            assert other.wait(timeout=120) == 0
            assert same(load(path), load(GOLDEN / "qwen2")), "what the other saved is whole"
        save_hf(mine, path)
        assert same(load(path), mine) and [file.name for file in path.parent.iterdir()] == ["out"]
    finally:
        other.kill()
        other.wait()


@pytest.mark.nightly
def test_transformers_computes_every_saved_family(tmp_path: Path) -> None:
    """With the Python of make_goldens.py: ``LOCKSTEP_TEST_KEEP=TORCH_PYTHON TORCH_PYTHON=PATH``."""
    if (python := os.environ.get("TORCH_PYTHON")) is None:
        # No extra of ours has torch, and transformers computes no model without it.
        pytest.skip("TORCH_PYTHON names no Python with torch and transformers 5.24")
    families = [file.parent.name for file in GOLDEN.glob("*/golden.npz") if file.parent.name != "reward_model"]
    for family in families:
        save_hf(load(GOLDEN / family), tmp_path / family)
    script = GOLDEN / "read_saved.py"
    run = subprocess.run([python, script, tmp_path], stdout=subprocess.PIPE, text=True, check=True, timeout=1500)
    gaps = json.loads(run.stdout)
    assert gaps.keys() == set(families) and max(gaps.values()) < 5e-5, gaps
