"""``lockstep sample`` from one end to the other, in this process on its four devices."""

import json
import logging
import math
import shutil
from pathlib import Path
from unittest import mock

import jax
import pytest

from lockstep.batch_inference import SampleConfig
from lockstep.engine.sizing.cost_model import Estimate
from lockstep.errors import PeerError
from lockstep.hosts import Hosts, MemoryClient
from lockstep.models import load_hf
from lockstep.placement import make_mesh
from lockstep.report import read_jsonl
from lockstep.text import encode, load_tokenizer, read_prompts, stop_ids
from lockstep.training import ExportConfig, export
from lockstep.types import Request
from tests import tiny
from tests.oracle import oracle_completions

PROMPTS = [
    {"question": "What is 12 plus 7?", "solution": "It is #### 19"},
    {"chat": [{"role": "user", "content": "What is 3 plus 4?"}], "solution": "7"},
    {"question": "What is 8281?", "solution": "8281"},
]
METRICS = ("gsm8k", "exact_match", "perplexity", "repetition")
FIELDS = {"prompt_field": "question", "messages_field": "chat", "answer_field": "solution"}


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in PROMPTS))
    return str(path)


@pytest.mark.slow
def test_rows_go_where_they_are_wanted_with_every_metric_and_as_parquet(checkpoint, prompts, tmp_path, sample):
    parquet = pytest.importorskip("pyarrow.parquet")
    tracker = sample(
        "run",
        hf_checkpoint=str(checkpoint),
        prompts=prompts,
        **FIELDS,
        host_data_parallel_output_dir=str(tmp_path / "out"),
        write_parquet=True,
        skip_samples_table=True,
        keep_tokens=True,
        metrics=list(METRICS),
    )
    rows = read_jsonl(tmp_path / "out" / "samples.jsonl")
    assert [(row["prompt_id"], row["generation_id"]) for row in rows] == [(p, g) for p in range(3) for g in range(2)]
    assert parquet.read_table(tmp_path / "out" / "samples.parquet").to_pylist() == rows
    assert read_jsonl(tmp_path / "out" / "samples-host-000.jsonl") != [] and not (tmp_path / "run" / "samples").exists()
    assert all(len(row["token_ids"]) == len(row["logprobs"]) == row["num_tokens"] for row in rows)
    assert not tracker.tables, "skip_samples_table"
    for name in METRICS:
        assert tracker.values[f"sample/{name}"] == pytest.approx(sum(row[name] for row in rows) / len(rows)), name
    assert tracker.values["sample/progress/prompts_done"] == tracker.values["sample/progress/prompts_total"] == 3

    # Perplexity is that of the plain forward, to its four digits.
    tokenizer = load_tokenizer(checkpoint)
    asked = read_prompts([{"prompt": "What is 12 plus 7?"}, {"messages": PROMPTS[1]["chat"]}, "What is 8281?"])
    config = SampleConfig(hf_checkpoint="-", prompts=["-"], max_new_tokens=6, temperature=0.9, n_generations=2)
    params = config.sampling_params(stop_ids(tokenizer), 0)
    requests = [
        Request(prompt_id=prompt.id, prompt_tokens=tokens, params=params)
        for prompt, tokens in zip(asked, encode(tokenizer, asked), strict=True)
    ]
    model = load_hf(checkpoint, make_mesh("1,1,1", jax.devices()[:1]))
    vocab_size = max(tokenizer.get_vocab().values()) + 1
    for row, expected in zip(rows, oracle_completions(model, requests, vocab_size=vocab_size), strict=True):
        mean = sum(expected.logprobs) / len(expected.logprobs)
        assert row["perplexity"] == pytest.approx(math.exp(-mean), rel=1e-3)


@pytest.mark.slow
def test_without_gathering_the_figures_remain_and_the_log_says_what_to_set(
    checkpoint, prompts, tmp_path, sample, caplog
):
    tracker = sample(
        "run",
        hf_checkpoint=str(checkpoint),
        prompts=prompts,
        **FIELDS,
        inference_mode="host_data_parallel",
        enable_host_rows_gather=False,
    )
    assert not tracker.tables and tracker.values["sample/total_completions"] == 6
    assert [path.name for path in (tmp_path / "run" / "samples").glob("*.jsonl")] == ["samples-host-000.jsonl"]
    (warning,) = (record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
    assert "no merged file and no table of samples" in warning and "Set enable_host_rows_gather: true" in warning


@pytest.mark.nightly  # in make slow: unit/training/rl/test_rollouts.py
def test_drafts_leave_the_rows_as_they_are_and_say_what_they_saved(checkpoint, prompts, tmp_path, sample, monkeypatch):
    monkeypatch.setattr(Estimate, "verify_cost", lambda self, width: 1.0)
    values = {"hf_checkpoint": str(checkpoint), "prompts": prompts, **FIELDS, "max_new_tokens": 24, "n_rounds": 2}
    values |= {"temperature": 0.01, "frequency_penalty": -2.0}  # answers repeat themselves, so guesses are right
    for mode in ("global_mesh", "host_data_parallel"):
        for drafts in ("none", "ngram"):
            tracker = sample(f"{mode}-{drafts}", **values, inference_mode=mode, drafts=drafts)
            said = {name: value for name, value in tracker.values.items() if "drafts" in name}
            if drafts == "none":
                assert not said
                continue
            for prefix in ("sample", "sample/progress"):
                saved, per_step = (said[f"{prefix}/drafts/{name}"] for name in ("steps_saved", "tokens_per_step"))
                assert 0 < said[f"{prefix}/drafts/accepted_share"] <= 1 and saved > 0 and per_step > 1
            assert tracker.values["sample/total_generated_tokens"] * (1 - 1 / per_step) == pytest.approx(saved)
        one, other = (read_jsonl(tmp_path / f"{mode}-{name}/samples/samples.jsonl") for name in ("none", "ngram"))
        assert [row["generated_text"] for row in one] == [row["generated_text"] for row in other] != []


def test_what_changed_is_refused_by_name_unless_forced(checkpoint, prompts, tmp_path, sample):
    values = {"hf_checkpoint": str(checkpoint), "prompts": prompts}
    tracker = sample("run", **FIELDS, **values)
    ((name, table),) = tracker.tables
    merged = tmp_path / "run" / "samples" / "samples.jsonl"
    rows = merged.read_bytes()
    assert name == "sample/samples" and [each.to_dict() for each in table] == read_jsonl(merged)

    other = Path(shutil.copytree(checkpoint, tmp_path / "other"))
    file = sorted(other.glob("*.safetensors"))[-1]
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    changed = {**values, "hf_checkpoint": str(other), "seed": 1}
    with pytest.raises(PeerError, match=r'checkpoint was ".*" and is ".*"; seed was 0 and is 1.*--resume force'):
        sample("run", **FIELDS, **changed)
    tracker = sample("run", **FIELDS, **changed, resume="force")
    assert tracker.values["sample/resumed_completions"] == 6 and merged.read_bytes() == rows
    # What was forced is what the rows are now said to come from.
    sample("run", **FIELDS, **changed)


@pytest.mark.slow
def test_a_training_checkpoint_answers_as_the_one_that_is_exported_from_it(prompts, tmp_path, sample):
    trained, exported = tmp_path / "trained" / "checkpoints", tmp_path / "exported"
    tiny.save_checkpoint(str(trained))
    assert export(ExportConfig(checkpoint=str(trained), output=str(exported)), Hosts(MemoryClient.hub(1)[0])) == 0
    for name, values in {
        "a": {"checkpoint_path": str(trained)},
        "b": {"hf_checkpoint": str(exported)},
        "c": {"checkpoint_path": str(trained.parent), "inference_mode": "host_data_parallel"},
    }.items():
        sample(name, prompts=prompts, **FIELDS, **values)
    rows = [read_jsonl(tmp_path / name / "samples" / "samples.jsonl") for name in ("a", "b", "c")]
    assert len(rows[0]) == 6 and rows[0] == rows[1] == rows[2]
    identities = [json.loads((tmp_path / name / "samples" / "job.json").read_text())["checkpoint"] for name in "abc"]
    assert identities[0] == identities[2] != identities[1]


@pytest.mark.slow
def test_a_tracker_that_fails_costs_no_row(checkpoint, prompts, tmp_path, sample, caplog):
    tracker = mock.Mock()
    tracker.log.side_effect = OSError("the tracker is down")
    values = {"hf_checkpoint": str(checkpoint), "prompts": prompts, "defer_tracker_logs_until_end": False}
    sample("run", tracker=tracker, **values, **FIELDS)
    assert len(read_jsonl(tmp_path / "run" / "samples" / "samples.jsonl")) == 6
    assert "the tracker is down" in caplog.text and tracker.finish.called


@pytest.mark.slow
def test_rows_here_are_of_the_job_behind_the_url_and_go_there(checkpoint, tmp_path, sample):
    there = tmp_path / "there"
    there.mkdir()
    (tmp_path / "new").mkdir()
    values = {"hf_checkpoint": str(checkpoint), "prompts": ["one", "two"], "max_new_tokens": 4, "n_generations": 1}
    sample("here", **values)
    sample("elsewhere", **values, seed=1, host_data_parallel_output_dir=f"file://{there}")
    with pytest.raises(PeerError, match="here/samples has rows of a job that differs.*seed was 0 and is 1"):
        sample("here", **values, seed=1, host_data_parallel_output_dir=f"file://{there}")
    assert json.loads((tmp_path / "here" / "samples" / "job.json").read_text())["seed"] == 0

    sample("here", **values, host_data_parallel_output_dir=f"file://{tmp_path}/new", enable_host_rows_gather=False)
    rows = [each for path in (tmp_path / "new").glob("samples-host-*") for each in read_jsonl(path)]
    assert len(rows) == 2 and rows == read_jsonl(tmp_path / "here" / "samples" / "samples-host-000.jsonl")


def test_tokens_beyond_the_embedding_are_refused_only_in_prompts_and_end_nothing(checkpoint, tmp_path, sample, caplog):
    other = Path(shutil.copytree(checkpoint, tmp_path / "other"))
    tokenizer, rows = load_tokenizer(checkpoint), json.loads((other / "config.json").read_text())["vocab_size"]
    tokenizer.add_tokens([f"<soft {number}>" for number in range(rows + 1 - len(tokenizer))], special_tokens=True)
    tokenizer.save_pretrained(other)
    (other / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, rows]}))
    sample("run", hf_checkpoint=str(other), prompts=["What is 12 plus 7?"])
    assert len(read_jsonl(tmp_path / "run" / "samples" / "samples.jsonl")) == 2
    last = f"<soft {rows - len(load_tokenizer(checkpoint))}>"
    assert f"{last!r} ends an answer as {other}/generation_config.json says, and the model can never" in caplog.text
    asked = tmp_path / "asked.txt"
    asked.write_text(f"one\n\nWhat is {last}?\n")
    with pytest.raises(PeerError, match=rf"prompt 1 \({asked}:3\) has the token '{last}' \(id {rows}\)"):
        sample("refused", hf_checkpoint=str(other), prompts=str(asked))
    asked.write_text("12 " * 70)
    with pytest.raises(PeerError, match=rf"prompt 0 \({asked}:1\) has \d+ tokens .* but the model allows 64\. Shorten"):
        sample("long", hf_checkpoint=str(other), prompts=str(asked))
