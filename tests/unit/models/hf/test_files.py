"""Files of a checkpoint that are missing or wrong."""

import json
from pathlib import Path

import pytest

from lockstep.errors import ConfigError
from lockstep.models import load_config, read_hf_config
from tests.unit.models.hf.test_load import copy_of, refused


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
