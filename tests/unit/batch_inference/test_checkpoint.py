import os
import shutil
from pathlib import Path

import pytest

from lockstep.batch_inference import SampleConfig
from lockstep.batch_inference.checkpoint import HfCheckpoint, resolve_checkpoint, stored_dtype
from lockstep.errors import ConfigError
from lockstep.models import fingerprint
from lockstep.training import SavedModel
from tests import tiny

GOLDEN = Path(__file__).parents[2] / "golden"


def of_ours(path):
    return SampleConfig(prompts=["one"], checkpoint_path=str(path))


def test_a_run_directory_means_its_newest_checkpoint(tmp_path):
    for age, run in enumerate(["first", "second"]):
        shutil.copytree(GOLDEN / "llama3", tmp_path / run / "checkpoint")
        os.utime(tmp_path / run / "checkpoint" / "config.json", (1000 + age, 1000 + age))
    (tmp_path / "second" / "samples").mkdir()
    newest = str(tmp_path / "second" / "checkpoint")
    assert resolve_checkpoint(of_ours(tmp_path)).path == newest
    assert resolve_checkpoint(of_ours(tmp_path / "second")).path == newest
    given = str(tmp_path / "first" / "checkpoint")
    assert resolve_checkpoint(of_ours(given)) == HfCheckpoint(path=given)
    named = SampleConfig(prompts=["one"], hf_checkpoint="gs://bucket/model")
    assert resolve_checkpoint(named) == HfCheckpoint(path="gs://bucket/model")


def test_the_newest_of_a_run_may_be_one_that_it_goes_on_from(tmp_path):
    shutil.copytree(GOLDEN / "llama3", tmp_path / "run" / "checkpoint")
    os.utime(tmp_path / "run" / "checkpoint" / "config.json", (1000, 1000))
    checkpoints = tmp_path / "run" / "checkpoints"
    tiny.save_checkpoint(str(checkpoints), step=4)
    for path in (tmp_path, tmp_path / "run", checkpoints, checkpoints / "step-4"):
        found = resolve_checkpoint(of_ours(path))
        assert isinstance(found, SavedModel) and found.metadata.step == 4
    os.utime(checkpoints / "step-4" / "metadata.json", (500, 500))
    assert resolve_checkpoint(of_ours(tmp_path)) == HfCheckpoint(path=str(tmp_path / "run" / "checkpoint"))


def test_what_cannot_be_sampled_from_is_said_plainly(tmp_path):
    with pytest.raises(ConfigError, match="there is no such directory.*make demo"):
        resolve_checkpoint(of_ours(tmp_path / "nothing"))
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    with pytest.raises(ConfigError, match="which has no checkpoint.*Train with hf_save_path.*or with trainer.checkp"):
        resolve_checkpoint(of_ours(tmp_path / "run"))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "model.gguf").touch()
    for name, text in (("other", "has model.gguf, a model as llama.cpp"), ("other/model.gguf", "has model.gguf")):
        with pytest.raises(ConfigError, match=text):
            resolve_checkpoint(of_ours(tmp_path / name)).limits()
    (tmp_path / "other" / "model.safetensors").touch()
    with pytest.raises(ConfigError, match=r"model\.safetensors is a file; it must be a directory\. Give the one"):
        resolve_checkpoint(of_ours(tmp_path / "other" / "model.safetensors")).limits()
    shutil.copy(GOLDEN / "llama3" / "config.json", tmp_path / "other")
    (tmp_path / "other" / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="has adapter_config.json: transformers would add its adapter"):
        resolve_checkpoint(of_ours(tmp_path / "other")).limits()
    with pytest.raises(ConfigError, match="has no config.json with safetensors.*is a checkpoint_path"):
        fingerprint(str(tmp_path / "run"))


def test_a_fingerprint_tells_weights_apart_and_not_places(tmp_path):
    copy = Path(shutil.copytree(GOLDEN / "mistral", tmp_path / "copy"))
    assert fingerprint(str(copy)) == fingerprint(str(GOLDEN / "mistral"))
    file = sorted(copy.glob("*.safetensors"))[1]
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    assert fingerprint(str(copy)) != fingerprint(str(GOLDEN / "mistral"))


def test_the_stored_type_is_the_one_that_the_configuration_names():
    assert stored_dtype({"torch_dtype": "bfloat16"}) == "bfloat16"
    assert stored_dtype({"dtype": "torch.float16"}) == "float16"
    assert stored_dtype({}) == "float32"
