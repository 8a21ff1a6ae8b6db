"""Files of safetensors, on a disk and behind URLs."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import fsspec
import jax
import numpy as np
import pytest

from lockstep.errors import ConfigError
from lockstep.models import fingerprint, load_config, load_hf, read_hf_config, read_vocab_size
from lockstep.models.hf import row_reader
from lockstep.models.hf.files import CheckpointFiles, pack_heads, read_heads, unpack_heads
from tests.unit.models.hf.test_load import GOLDEN, copy_of, mesh_of, refused


def test_files_that_are_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no checkpoint directory .*nowhere\. .*hf download"):
        load_config(str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        read_hf_config(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json is not JSON"):
        read_hf_config(str(tmp_path))

    (tmp_path / "config.json").write_text('{"vocab_size": null}')
    with pytest.raises(ConfigError, match=r"has vocab_size: null; lockstep needs it"):
        read_vocab_size(tmp_path)

    single = copy_of("llama3", tmp_path)
    (single / "model.safetensors").rename(single / "a.safetensors")
    refused(single, r"neither model\.safetensors nor .*found a\.safetensors, config\.json, golden\.npz")
    (single / "model.safetensors").write_bytes(b"nonsense")
    refused(single, r"model\.safetensors cannot be read as safetensors")
    (single / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    refused(single, r"model\.safetensors cannot be read as safetensors: it is a pointer of Git LFS.*git lfs pull")

    (single / "model.safetensors").unlink()
    (single / "model.safetensors").symlink_to("blob")  # of a snapshot whose blob is gone
    refused(single, r"model\.safetensors cannot be read as safetensors: .*No such file.*Download the checkpoint again")
    (single / "model.safetensors").unlink()
    for name in ("a.safetensors", "golden.npz"):
        (single / name).unlink()
    refused(single, r"neither model\.safetensors nor .*Download the checkpoint again")

    sharded = copy_of("mistral", tmp_path)
    (sharded / "model-00002-of-00003.safetensors").rename(sharded / "hidden")
    refused(sharded, r"names model-00002-of-00003\.safetensors, which is not there")
    (sharded / "model.safetensors.index.json").unlink()
    refused(sharded, r"neither model\.safetensors nor model\.safetensors\.index\.json.*Download the checkpoint again")


def test_an_index_that_is_wrong_is_named(tmp_path: Path) -> None:
    directory = copy_of("mistral", tmp_path)
    file = directory / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    right, first = index["weight_map"]["model.norm.weight"], "model-00001-of-00003.safetensors"
    index["weight_map"]["model.norm.weight"] = first
    file.write_text(json.dumps(index))
    refused(
        directory, rf"has tensor model\.norm\.weight in {right}, and in {first} by its header or model\.safetensors\.in"
    )
    index["weight_map"] |= {"model.norm.weight": right, "a": first}
    file.write_text(json.dumps(index))
    refused(directory, rf"says tensor a is in {first}; it is not")
    for text in ("[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', '{"weight_map": {"a": "../secret"}}'):
        file.write_text(text)
        refused(directory, r"index\.json (is a JSON list|cannot be read|names)")


@pytest.mark.parametrize("shape", ["1,1,1", "1,4,1", "1,2,2"])
def test_a_url_is_read_in_ranges(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = fsspec.filesystem("memory")
    memory.put(str(GOLDEN / "mistral") + "/", "/bucket/mistral/", recursive=True)
    assert load_config("memory://bucket/mistral") == load_config(str(GOLDEN / "mistral"))
    monkeypatch.setattr(row_reader, "CHUNK_BYTES", 1000)
    longest = []
    fetch, copy = type(memory).cat_file, type(memory).get_file

    def get_file(self: Any, path: str, *arguments: Any, **options: Any) -> None:
        assert path.endswith("config.json"), f"{path} was copied"
        copy(self, path, *arguments, **options)

    monkeypatch.setattr(type(memory), "get_file", get_file)

    def cat_file(self: Any, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        if path.endswith(".safetensors"):
            longest.append((end or 0) - (start or 0))
        return fetch(self, path, start, end, **options)

    monkeypatch.setattr(type(memory), "cat_file", cat_file)
    devices = int(np.prod([int(size) for size in shape.split(",")]))
    ours = load_hf("memory://bucket/mistral", mesh_of(shape, devices))
    theirs = load_hf(str(GOLDEN / "mistral"), mesh_of(shape, devices))
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_array_equal(one, other)
    smallest = min(path.stat().st_size for path in (GOLDEN / "mistral").glob("*.safetensors"))
    assert 0 < max(longest) < smallest, "a piece at a time"
    with pytest.raises(ConfigError, match=r"there are no files config\.json at memory://bucket/nothing"):
        load_config("memory://bucket/nothing")


@pytest.mark.parametrize("name", ["brackets [v2]", "a b", "[!a]*?", "{a,b}", "50 % & #1"])
def test_a_path_is_no_pattern(name: str, tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "llama_tied", tmp_path / name)
    memory = fsspec.filesystem("memory")
    memory.put(str(GOLDEN / "llama_tied") + "/", f"/bucket/{name}/", recursive=True)
    for place in (str(tmp_path / name), f"memory://bucket/{name}"):
        assert load_config(place) == load_config(GOLDEN / "llama_tied")
        assert CheckpointFiles(place).names == CheckpointFiles(GOLDEN / "llama_tied").names
        assert fingerprint(place) == fingerprint(str(GOLDEN / "llama_tied"))


def test_a_directory_of_two_models_is_refused(tmp_path: Path) -> None:
    directory = copy_of("mistral", tmp_path)
    shutil.copy(GOLDEN / "llama3" / "model.safetensors", directory)
    refused(directory, r"has model\.safetensors and model\.safetensors\.index\.json, which names other files: .*Remove")
    (directory / "model.safetensors.index.json").write_text(
        '{"weight_map": {"model.norm.weight": "model.safetensors"}}'
    )
    assert CheckpointFiles(directory).names == CheckpointFiles(GOLDEN / "llama3").names  # it names that file alone
    (directory / "adapter_config.json").write_text("{}")
    refused(directory, r"has adapter_config\.json: transformers would add its adapter .*merge_and_unload")
    with pytest.raises(ConfigError, match=r"has adapter_config\.json"):
        fingerprint(str(directory))
    (directory / "config.json").unlink()  # as PEFT saves an adapter
    with pytest.raises(ConfigError, match=r"has adapter_config\.json: .*merge_and_unload"):
        load_config(directory)


def test_tensors_that_the_index_leaves_out_are_read_and_those_of_two_files_refused(tmp_path: Path) -> None:
    directory = copy_of("mistral", tmp_path)
    file = directory / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    last = index["weight_map"].pop("model.norm.weight")
    file.write_text(json.dumps(index))
    assert CheckpointFiles(directory).file_of("model.norm.weight") == last
    shutil.copy(directory / last, directory / "model-00001-of-00003.safetensors")
    refused(directory, r"has tensor .* in model-00001-of-00003\.safetensors, and in model-0000[23].* by its header")


def test_heads_of_another_host_are_those_of_this_one_and_anything_else_is_refused() -> None:
    for family in ("llama3", "mistral"):
        heads = read_heads(str(GOLDEN / family))
        assert unpack_heads(pack_heads(heads)) == heads
        here, there = CheckpointFiles(GOLDEN / family), CheckpointFiles(GOLDEN / family, heads)
        assert {name: here.shape(name) for name in here.names} == {name: there.shape(name) for name in there.names}
    for text in (b"[]", b"nonsense", b'{"a": 1}', b'{"a": "\\u20ac"}'):
        with pytest.raises(ConfigError, match="what process 0 read of the checkpoint"):
            unpack_heads(text)


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["_CHECKPOINT_METADATA", "d/0"], r"is a checkpoint of a trainer, as Orbax .*lockstep export"),
        (["items/_METADATA"], "is a checkpoint of a trainer, as Orbax"),
        (["metadata.json", "model/x"], "is a checkpoint of a trainer, as Orbax"),
        (
            ["snapshots/abc/config.json", "refs/main"],
            r"folder of the Hugging Face cache\. Give one of those in its",
        ),
        (["params.json", "consolidated.safetensors"], r"params\.json, the format of Meta or Mistral"),
        (["notes.txt"], r"has no config\.json\. Give the directory of a Hugging Face checkpoint\."),
    ],
)
def test_a_directory_of_another_kind_is_named(names, text, tmp_path):
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text("{}")
    with pytest.raises(ConfigError, match=text):
        load_config(tmp_path)


@pytest.mark.parametrize(
    ("name", "program"),
    [("m.Q4_K_M.gguf", "llama.cpp"), ("pytorch_model.bin", "PyTorch"), ("flax_model.msgpack", "Flax")],
)
def test_a_model_of_another_program_is_named(name, program, tmp_path):
    (tmp_path / name).touch()
    text = rf"has {re.escape(name)}, a model as {program} stores it, and no safetensors\. .*save_pretrained"
    for read in (read_hf_config, fingerprint, read_heads):
        with pytest.raises(ConfigError, match=text):
            read(str(tmp_path))
