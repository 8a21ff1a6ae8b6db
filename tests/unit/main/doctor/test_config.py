"""Settings of doctor that cannot work say why."""

from pathlib import Path

import pytest
import yaml

from lockstep.errors import ConfigError
from lockstep.main.doctor.config import DoctorConfig, RunNeeds, read_needs


def test_seconds_are_positive():
    with pytest.raises(ConfigError, match=r"reach_s is 0; it must be more than 0 seconds"):
        DoctorConfig(reach_s=0)


def test_a_calibration_needs_a_measurement():
    with pytest.raises(ConfigError, match="calibrate is given and measure is false"):
        DoctorConfig(calibrate="chip.json", measure=False)


VALUES = {
    "trainer": {
        "tracker": [{"type": "jsonl"}, {"type": "wandb", "project": "p", "mode": "offline"}],
        "checkpointer": {"base_path": "gs://out/checkpoints"},
        "mesh_shape": "1,-1,2",
        "log_dir": "/logs",
        "distributed": {"timeout_s": 60, "process_id": 1},
    },
    "data": {"train_urls": ["gs://in/train-*.jsonl.gz", "data/local.jsonl"], "validation_urls": ["gs://in/val.jsonl"]},
    "initialize_from_hf": "gs://models/llama",
    "tokenizer": "gs://models/llama",
    "hf_save_path": "gs://out/hf",
    "inference_eval": {"prompts": "gs://in/prompts.jsonl"},
}


def test_urls_go_where_they_are_used():
    needs = read_needs(DoctorConfig(buckets=["gs://mine"]), VALUES)
    assert needs.written == ("gs://mine", "gs://out/checkpoints", "gs://out/hf")
    assert needs.read == ("gs://in/train-*.jsonl.gz", "gs://in/val.jsonl", "gs://in/prompts.jsonl")
    assert needs.tokenizer == needs.checkpoint == "gs://models/llama"
    assert needs.wandb is not None and needs.wandb["project"] == "p"
    assert (needs.mesh_shape, needs.log_dir) == ("1,-1,2", "/logs")


def test_the_digest_leaves_out_what_each_process_is_told():
    other = {**VALUES, "trainer": {**VALUES["trainer"], "distributed": {"process_id": 2}}}
    changed = {**VALUES, "tokenizer": "other"}
    first, second, third = (read_needs(DoctorConfig(), one).config_digest for one in (VALUES, other, changed))
    assert first == second != third


def test_nothing_is_asked_without_a_configuration():
    assert read_needs(DoctorConfig(), {}) == RunNeeds()


@pytest.mark.parametrize("path", sorted(Path("config").rglob("*.yaml")), ids=lambda path: path.name)
def test_the_shipped_configurations_are_read(path):
    values = yaml.safe_load(path.read_text())
    needs = read_needs(DoctorConfig(), values)
    assert needs.tokenizer is not None or "checkpoint_path" in values
    assert all("://" in url for url in (*needs.written, *needs.read))
