import logging
import os
import shutil
import sys
from pathlib import Path

import pytest

from lockstep.batch_inference import JobConfig, SampleConfig
from lockstep.batch_inference.checkpoint import LoadProgress, fingerprint, resolve_checkpoint, stored_dtype
from lockstep.batch_inference.parquet import check_pyarrow, write_parquet
from lockstep.errors import ConfigError, PromptError
from lockstep.report import read_jsonl

GOLDEN = Path(__file__).parents[2] / "golden"


def config(**values):
    return SampleConfig(prompts=["one"], **({"hf_checkpoint": "here"} | values))


def of_ours(path):
    return SampleConfig(prompts=["one"], checkpoint_path=str(path))


def test_a_run_directory_means_its_newest_checkpoint(tmp_path):
    for age, run in enumerate(["first", "second"]):
        shutil.copytree(GOLDEN / "llama3", tmp_path / run / "checkpoint")
        os.utime(tmp_path / run / "checkpoint" / "config.json", (1000 + age, 1000 + age))
    (tmp_path / "second" / "samples").mkdir()
    newest = str(tmp_path / "second" / "checkpoint")
    assert resolve_checkpoint(of_ours(tmp_path)) == newest
    assert resolve_checkpoint(of_ours(tmp_path / "second")) == newest
    assert resolve_checkpoint(of_ours(tmp_path / "first" / "checkpoint")) == str(tmp_path / "first" / "checkpoint")
    assert resolve_checkpoint(config(hf_checkpoint="gs://bucket/model")) == "gs://bucket/model"


def test_what_cannot_be_sampled_from_is_said_plainly(tmp_path):
    with pytest.raises(ConfigError, match="there is no such directory.*make demo"):
        resolve_checkpoint(of_ours(tmp_path / "nothing"))
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    with pytest.raises(
        ConfigError, match="Checkpoints for resuming a training run cannot be sampled from yet.*hf_save"
    ):
        resolve_checkpoint(of_ours(tmp_path / "run"))
    with pytest.raises(ConfigError, match="has no config.json with safetensors"):
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


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"checkpoint_path": "there"},
            "exactly one of hf_checkpoint and checkpoint_path is needed, but both are given",
        ),
        ({"hf_checkpoint": None}, "neither is given"),
        ({"n_rounds": 0}, "n_rounds is 0; it must be at least 1"),
        ({"seed": 2**32 - 1, "n_rounds": 2}, "seed must be 0 to 4294967294"),
        ({"max_prompts_per_batch": 0}, "max_prompts_per_batch is 0"),
        ({"inference_mode": "both"}, "inference_mode is 'both'; it must be global_mesh or host_data_parallel"),
        ({"host_data_parallel_output_dir": ""}, "is empty. Use a directory, a URL, or null"),
        ({"top_p": 0.5}, "top_p is 0.5 and temperature is 0.*would do nothing"),
        ({"write_parquet": True, "enable_host_rows_gather": False}, "there is no merged file to write"),
        ({"stop": "end"}, r"Use \['end'\]"),
        ({"metrics": ["bleu"]}, "metric 'bleu' is not known"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        config(**values)


def test_empty_prompts_and_wrong_names_are_refused():
    with pytest.raises(PromptError, match="prompts holds no prompts"):
        SampleConfig(hf_checkpoint="here", prompts=[])
    with pytest.raises(ConfigError, match="trainer.run_id is 'a/b'"):
        JobConfig(run_id="a/b")


def test_every_round_has_a_seed_of_its_own():
    two = config(n_rounds=2, seed=7, n_generations=3)
    assert [two.sampling_params((1,), round_).seed for round_ in (0, 1)] == [7, 8]
    assert two.sampling_params((1,), 1).stop_token_ids == (1,)


def test_parquet_holds_the_merged_rows(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    merged = tmp_path / "samples.jsonl"
    merged.write_text("".join(f'{{"round": 0, "prompt_id": {i}, "generated_text": "ü {i}"}}\n' for i in range(10_000)))
    assert parquet.read_table(write_parquet(merged)).to_pylist() == read_jsonl(merged)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["samples.jsonl", "samples.parquet"]


def test_without_pyarrow_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"pip install 'jax-lockstep\[parquet\]', or set write_parquet to false"):
        check_pyarrow()


def test_the_leader_says_how_much_it_has_read_and_how_fast(caplog):
    caplog.set_level(logging.INFO)
    for logs in (False, True):
        progress = LoadProgress(logs=logs)
        progress._start -= 2.0
        progress(1 << 20, 3 << 20)
        progress(2 << 20, 3 << 20)
        assert progress.bytes == 3 << 20
    (line,) = (record.getMessage() for record in caplog.records)
    assert line.startswith("loading: 3.00 MiB of 3.00 MiB on this host, 1.") and line.endswith(" MiB/s")
