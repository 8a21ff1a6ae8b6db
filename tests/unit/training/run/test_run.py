"""A run from its configuration: what is refused before a file of data is read or a weight is made."""

import pytest

from lockstep.errors import PeerError
from lockstep.hosts import Hosts, MemoryClient
from lockstep.main.arguments import parse_arguments
from lockstep.training import TrainLmConfig, train
from tests import tiny


@pytest.mark.parametrize("key", ["steps_per_eval", "per_device_eval_parallelism"])
def test_a_validation_without_files_is_refused(key, tmp_path):
    given = ["--tokenizer", tiny.TOKENIZER, "--model.type", "llama", "--data.train_urls", "[a.jsonl]"]
    given += [f"--trainer.{key}", "3", "--trainer.log_dir", str(tmp_path)]
    config = parse_arguments(TrainLmConfig, given)
    with pytest.raises(PeerError, match=rf"trainer\.{key} is 3, but data\.validation_urls is empty"):
        train(config, Hosts(MemoryClient.hub(1)[0]))
    assert not list(tmp_path.iterdir())
