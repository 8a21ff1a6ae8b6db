"""A run from its configuration: what is refused before a file of data is read or a weight is made."""

import json
import logging
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from lockstep.errors import PeerError
from lockstep.hosts import Hosts, MemoryClient
from lockstep.main.arguments import parse_arguments
from lockstep.models import load_hf, read_hf_config
from lockstep.placement import make_mesh
from lockstep.testing import run_threads
from lockstep.text import load_tokenizer
from lockstep.training import StepInfo, TrainerConfig, TrainLmConfig, train
from lockstep.training.run.run import HfSaves
from tests import tiny
from tests.counted_files import CountedFiles


@pytest.mark.parametrize("key", ["steps_per_eval", "per_device_eval_parallelism"])
def test_a_validation_without_files_is_refused(key, tmp_path):
    given = ["--tokenizer", tiny.TOKENIZER, "--model.type", "llama", "--data.train_urls", "[a.jsonl]"]
    given += [f"--trainer.{key}", "3", "--trainer.log_dir", str(tmp_path)]
    config = parse_arguments(TrainLmConfig, given)
    with pytest.raises(PeerError, match=rf"trainer\.{key} is 3, but data\.validation_urls is empty"):
        train(config, Hosts(MemoryClient.hub(1)[0]))
    assert not list(tmp_path.iterdir())


def test_a_tracker_that_is_not_installed_is_found_before_anything_is_read(tmp_path, monkeypatch):
    given = ["--tokenizer", "no/such/tokenizer", "--model.type", "llama", "--data.train_urls", "[a.jsonl]"]
    config = parse_arguments(TrainLmConfig, [*given, "--trainer.tracker.type", "wandb"])
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(PeerError, match=r"wandb") as caught:
        train(config, Hosts(MemoryClient.hub(1)[0]))
    assert "no/such/tokenizer" not in str(caught.value)


def test_the_leader_alone_reads_a_tokenizer_at_a_url(tmp_path):
    given = ["--tokenizer", f"counted://{Path(tiny.TOKENIZER).absolute()}", "--data.train_urls", "[a.jsonl]"]
    given += ["--initialize_from_hf", str(tmp_path), "--trainer.log_dir", str(tmp_path)]
    golden = Path(__file__).parents[3] / "golden" / "llama3" / "config.json"
    (tmp_path / "config.json").write_text(json.dumps(json.loads(golden.read_text()) | {"vocab_size": 3}))
    config = parse_arguments(TrainLmConfig, given)

    def refused(hosts):
        with pytest.raises(PeerError, match=r"the model's vocabulary has 3 entries") as caught:
            train(config, hosts)
        return str(caught.value)

    load_tokenizer(tiny.TOKENIZER)  # transformers is not imported by several threads at once
    CountedFiles.bytes_read()
    first, *others = run_threads(refused, 3)
    assert others == [first] * 2 and first.startswith("3 of 3 processes failed"), "each had the tokenizer"
    files = [Path(path).name for path, _ in CountedFiles.reads]
    assert "tokenizer.json" in files and len(files) == len(set(files)), "each file was read once"


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
