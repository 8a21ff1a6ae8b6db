"""A run from its configuration: what is refused before a file of data is read or a weight is made."""

import json
from pathlib import Path

import pytest

from lockstep.errors import PeerError
from lockstep.hosts import Hosts, MemoryClient
from lockstep.main.arguments import parse_arguments
from lockstep.testing import run_threads
from lockstep.text import load_tokenizer
from lockstep.training import TrainLmConfig, train
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
