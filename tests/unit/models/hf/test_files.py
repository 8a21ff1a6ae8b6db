"""Files of safetensors, on a disk and behind URLs."""

import json
from pathlib import Path
from typing import Any

import fsspec
import jax
import numpy as np
import pytest

from lockstep.errors import ConfigError
from lockstep.models import load_config, load_hf, read_hf_config
from lockstep.models.hf import row_reader
from lockstep.models.hf.files import CheckpointFiles, TensorFile, pack_heads, read_heads, unpack_heads
from tests.unit.models.hf.test_load import GOLDEN, copy_of, mesh_of, refused


def test_files_that_are_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no checkpoint directory .*nowhere\. .*hf download"):
        load_config(str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        read_hf_config(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json is not JSON"):
        read_hf_config(str(tmp_path))

    single = copy_of("llama3", tmp_path)
    (single / "model.safetensors").rename(single / "pytorch_model.bin")
    refused(single, r"neither model\.safetensors nor .*found config\.json, golden\.npz, pytorch_model\.bin")
    (single / "model.safetensors").write_bytes(b"nonsense")
    refused(single, r"model\.safetensors cannot be read as safetensors")

    sharded = copy_of("mistral", tmp_path)
    (sharded / "model-00002-of-00003.safetensors").rename(sharded / "hidden")
    refused(sharded, r"names model-00002-of-00003\.safetensors, which is not there")


def test_an_index_that_is_wrong_is_named(tmp_path: Path) -> None:
    directory = copy_of("mistral", tmp_path)
    file = directory / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"]["model.norm.weight"] = "model-00001-of-00003.safetensors"
    file.write_text(json.dumps(index))
    refused(directory, r"says tensor model\.norm\.weight is in model-00001-of-00003\.safetensors; it is not")
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


@pytest.mark.parametrize(
    ("header", "why"),
    [
        ("[]", "its header is a JSON list, not an object"),
        ("[" * 60_000, "nested too deeply"),
        ('{"a": 1}', "what its header says of 'a' cannot be read"),
        ('{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}', r"its shape is \[-1\]"),
        ('{"a": {"dtype": "F32", "shape": [1e3], "data_offsets": [0, 4]}}', "its shape is"),
        (
            '{"a": {"dtype": "F32", "shape": [4294967296, 4294967296], "data_offsets": [0, 4]}}',
            "larger than any tensor",
        ),
        ('{"a": {"dtype": [], "shape": [1], "data_offsets": [0, 4]}}', "larger than any tensor"),
    ],
)
def test_a_header_that_cannot_be_is_refused(tmp_path, header: str, why: str) -> None:
    (tmp_path / "a").write_bytes(len(header).to_bytes(8, "little") + header.encode())
    with pytest.raises(ConfigError, match=why):
        TensorFile(fsspec.filesystem("file"), str(tmp_path / "a"))


def test_heads_of_another_host_are_those_of_this_one_and_anything_else_is_refused() -> None:
    for family in ("llama3", "mistral"):
        heads = read_heads(str(GOLDEN / family))
        assert unpack_heads(pack_heads(heads)) == heads
        here, there = CheckpointFiles(GOLDEN / family), CheckpointFiles(GOLDEN / family, heads)
        assert {name: here.shape(name) for name in here.names} == {name: there.shape(name) for name in there.names}
    for text in (b"[]", b"nonsense", b'{"a": 1}', b'{"a": "\\u20ac"}'):
        with pytest.raises(ConfigError, match="what process 0 read of the checkpoint"):
            unpack_heads(text)
