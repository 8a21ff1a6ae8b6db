"""``gs://`` through gcsfs itself, against a service in this process: checkpoint, tokenizer, prompts and rows."""

import json
import shutil
from pathlib import Path

import fsspec
import pytest

from lockstep.batch_inference import manifest
from lockstep.errors import ConfigError, PeerError, PromptError
from lockstep.report import read_jsonl
from lockstep.text import load_tokenizer, read_prompts, stop_ids
from tests import fake_gcs

pytest.importorskip("gcsfs", reason="gcsfs is not installed (pip install 'jax-lockstep[gcs]')")

PROMPTS = [{"prompt": f"What is {i} plus {i * i}?", "answer": str(i + i * i)} for i in range(3)]
GENERATION_CONFIG = {"eos_token_id": [3, 4]}


@pytest.fixture
def bucket(monkeypatch, checkpoint):
    with fake_gcs.serve() as bucket:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", bucket.url)
        monkeypatch.setitem(fsspec.config.conf, "gs", {"token": "anon"})
        fsspec.filesystem("gs").clear_instance_cache()
        for path in checkpoint.iterdir():
            bucket.objects[f"bucket/models/tiny/{path.name}"] = path.read_bytes()
        bucket.objects["bucket/models/tiny/generation_config.json"] = json.dumps(GENERATION_CONFIG).encode()
        lines = "".join(json.dumps(each) + "\n" for each in PROMPTS)
        bucket.objects["bucket/data/prompts.jsonl"] = lines.encode()
        yield bucket
        fsspec.filesystem("gs").clear_instance_cache()


@pytest.mark.slow
def test_a_whole_run_from_a_bucket_into_a_bucket(bucket, checkpoint, tmp_path, sample):
    values = {
        "hf_checkpoint": "gs://bucket/models/tiny",
        "prompts": "gs://bucket/data/prompts.jsonl",
        "host_data_parallel_output_dir": "gs://bucket/answers",
        "max_new_tokens": 8,
    }
    sample("first", **values)

    # The rows are those of a run that knows nothing of buckets.
    (tmp_path / "prompts.jsonl").write_bytes(bucket.objects["bucket/data/prompts.jsonl"])
    copy = Path(shutil.copytree(checkpoint, tmp_path / "copy"))
    (copy / "generation_config.json").write_text(json.dumps(GENERATION_CONFIG))
    sample("local", hf_checkpoint=str(copy), prompts=str(tmp_path / "prompts.jsonl"), max_new_tokens=8)
    merged = (tmp_path / "local" / "samples" / "samples.jsonl").read_bytes()
    assert bucket.objects["bucket/answers/samples.jsonl"] == merged

    assert not list(tmp_path.glob("first/samples/.*"))

    # Every batch is an object; the machine is lost, and with it some of them.
    parts = sorted(name for name in bucket.objects if name.startswith("bucket/answers/samples-host-000-"))
    assert len(parts) == len(PROMPTS), "max_prompts_per_batch is 1"
    assert [len(bucket.objects[name].splitlines()) for name in parts] == [2] * len(parts)
    for name in (parts[1], "bucket/answers/samples.jsonl"):
        del bucket.objects[name]
    tracker = sample("second", **values)
    assert tracker.values["sample/resumed_completions"] == 4
    assert bucket.objects["bucket/answers/samples.jsonl"] == merged
    assert len(read_jsonl(tmp_path / "second" / "samples" / "samples-host-000.jsonl")) == 2

    with pytest.raises(PeerError, match="max_new_tokens was 8 and is 9"):
        sample("third", **values | {"max_new_tokens": 9})
    del bucket.objects[f"bucket/answers/{manifest.NAME}"]
    with pytest.raises(PeerError, match=r"has rows but no job.json"):
        sample("fourth", **values)


def test_a_tokenizer_behind_a_url_is_the_one_of_its_directory(bucket, checkpoint):
    ours, theirs = load_tokenizer("gs://bucket/models/tiny"), load_tokenizer(checkpoint)
    assert ours.get_vocab() == theirs.get_vocab() and ours.chat_template == theirs.chat_template
    assert stop_ids(ours) == tuple(sorted({*stop_ids(theirs), 3, 4}))
    with pytest.raises(ConfigError, match=r"'gs://bucket/data' holds none of tokenizer\.json"):
        load_tokenizer("gs://bucket/data")
    with pytest.raises(ConfigError, match=r"'gs://bucket/nothing' holds none of tokenizer\.json"):
        load_tokenizer("gs://bucket/nothing")


def test_what_the_service_refuses_is_said_as_it_says_it(bucket):
    assert len(read_prompts(["one"])) == 1
    with pytest.raises(PromptError, match="'gs://bucket/data/none.jsonl' does not exist"):
        read_prompts("gs://bucket/data/none.jsonl")
    bucket.refuse = "you may not read this"
    with pytest.raises(PromptError, match=r"could not be read .*Forbidden.*\n?.*you may not read this"):
        read_prompts("gs://bucket/data/prompts.jsonl")
