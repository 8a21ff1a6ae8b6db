"""Hugging Face checkpoints while a run trains."""

import logging
import signal
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from lockstep.hosts import Hosts, MemoryClient
from lockstep.models import load_hf, read_hf_config
from lockstep.placement import make_mesh
from lockstep.training import StepInfo, TrainerConfig
from lockstep.training.run.hf_saves import HfSaves
from tests import tiny


@pytest.fixture(scope="module")
def model():
    return tiny.init_model(tiny.make_trainer("auto", 1))


HOSTS = Hosts(MemoryClient.hub(1)[0])
"""One for all tests here, so that programs are compiled once."""


def make(tmp_path, **values):
    fields = {"hf_save_path": "hf", "hf_save_dtype": None, "trainer": TrainerConfig(num_train_steps=9)}
    return HfSaves(SimpleNamespace(**fields | values), tmp_path, tiny.tokenizer(), tiny.vocab_size() - 2, HOSTS), HOSTS


def info(model, step):
    return StepInfo(step=step - 1, model=model, loss=1.0, step_duration=1.0)


def names(tmp_path):
    return sorted(path.name for path in tmp_path.iterdir())


def test_models_are_saved_by_their_steps_and_the_last_one_under_the_name_alone(tmp_path, model):
    saves, _ = make(tmp_path, hf_save_dtype="bfloat16")
    for step in (0, 3, 9):
        saves.on_step(info(model, step))
    saves.on_step(info(model, 9), force=True)
    assert names(tmp_path) == ["hf-step-3"], "not before the first step, and the last model is saved at the end"
    assert saves.save_last(model, None) == str(tmp_path / "hf")
    assert saves.save_last(model, 5) == str(tmp_path / "hf-step-5")
    hf = read_hf_config(str(tmp_path / "hf-step-3"))
    assert (hf["vocab_size"], hf["torch_dtype"]) == (tiny.vocab_size() - 2, "bfloat16")
    found = load_hf(str(tmp_path / "hf"), make_mesh("auto"), dtype="bfloat16")
    np.testing.assert_array_equal(found.embed.array, np.asarray(model.embed.array).astype("bfloat16")[:-2])
    assert len(jax.tree.leaves(found)) == len(jax.tree.leaves(model))


def test_a_save_that_fails_costs_a_model_and_nothing_else(tmp_path, model, caplog):
    (tmp_path / "hf-step-3").write_text("in the way")
    saves, _ = make(tmp_path)
    saves.on_step(info(model, 3))
    assert (saves.errors, saves.interrupted, names(tmp_path)) == (1, False, ["hf-step-3"])
    assert "the model of step 3 was not saved, training goes on" in caplog.text


def test_a_job_that_is_asked_to_end_gives_up_the_save_for_the_checkpoint(tmp_path, model, caplog):
    saves, hosts = make(tmp_path)
    hosts.preemption.note(signal.SIGTERM)
    with caplog.at_level(logging.INFO):
        saves.on_step(info(model, 3))
    assert saves.interrupted and names(tmp_path) == [] and "model saved" not in caplog.text
    hosts.preemption.clear()
    saves.on_step(info(model, 3))
    assert not saves.interrupted and names(tmp_path) == ["hf-step-3"]
