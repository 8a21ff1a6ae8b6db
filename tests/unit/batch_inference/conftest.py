"""A checkpoint, and a way to sample from it in this process."""

import pytest

from lockstep.batch_inference import JobConfig, SampleConfig
from lockstep.batch_inference import run as running
from lockstep.hosts import Hosts, MemoryClient
from lockstep.models import save_hf
from lockstep.report.trackers import NoopTracker
from tests import tiny


class Recorder(NoopTracker):
    """Keeps what it is given."""

    def __init__(self):
        self.tables, self.values = [], {}

    def log_rows(self, name, rows, *, step):
        self.tables.append((name, rows))

    def log(self, metrics, *, step):
        self.values |= metrics


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """A directory with several files of weights, and a tokenizer."""
    path = tmp_path_factory.mktemp("model") / "checkpoint"
    model = tiny.init_model(tiny.make_trainer("auto", 1))
    save_hf(model, path, tokenizer=tiny.tokenizer(), max_shard_bytes=20_000)
    assert len(list(path.glob("*.safetensors"))) > 2
    return path


@pytest.fixture
def sample(tmp_path, monkeypatch):
    """Runs a configuration under a name and returns what its tracker was given."""

    def run(name, *, tracker=None, **values):
        tracker = Recorder() if tracker is None else tracker
        monkeypatch.setattr(running, "build_tracker", lambda *_: tracker)
        defaults = {"max_new_tokens": 6, "temperature": 0.9, "n_generations": 2, "max_prompts_per_batch": 1}
        config = SampleConfig(trainer=JobConfig(log_dir=str(tmp_path), run_id=name), **defaults | values)
        assert running.sample(config, Hosts(MemoryClient.hub(1)[0], 60.0)) == 0
        return tracker

    return run
