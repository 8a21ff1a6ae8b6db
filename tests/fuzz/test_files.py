"""Files that others wrote: whatever is in them, they are read, or refused by an error of ours."""

import contextlib
import gzip
import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import yaml
from hypothesis import strategies as st

from lockstep.batch_inference.checkpoint import checkpoint_at, stored_dtype
from lockstep.batch_inference.prompt_store import JobShape
from lockstep.batch_inference.row_files import RowIndex, check_manifest
from lockstep.batch_inference.summary import Totals
from lockstep.engine import EarlierAnswers
from lockstep.errors import LockstepError
from lockstep.launch.record import load_record
from lockstep.main.arguments import parse_arguments
from lockstep.main.commands import find_command
from lockstep.models import LlamaConfig, LoraConfig, config_from_hf, read_hf_config, skeleton
from lockstep.models.hf.files import CheckpointFiles
from lockstep.placement.device.calibration import _read as read_calibration
from lockstep.report import Tail, drop_later, find_run, make_payload, read_jsonl, render_page, write_parquet
from lockstep.text import read_prompts
from lockstep.training import SavedModel, model_spec
from lockstep.training.checkpoints.checkpoint import (
    CheckpointDirectory,
    CheckpointMetadata,
    _hooks_file,
    _sealed,
    named_arrays,
    shape_texts,
    without_arrays,
)
from lockstep.training.checkpoints.saved_model import SavedAdapters
from lockstep.training.data.chunk_builder import read_chunk
from lockstep.training.data.records import BadRow, list_files, read_piece
from lockstep.training.data.token_cache import read_metadata
from lockstep.training.loop.hooks import Hooks
from lockstep.training.loop.stopping import LossSpikeConfig, LossWatch
from lockstep.training.rl.rollout import Rollout
from lockstep.training.rl.sampled import completions_of
from lockstep.urls import url_to_fs
from tests.fuzz.hostile import damaged, documents, forged, fuzz, lines, watched, with_secrets


def read_beside(directory):
    return (directory / "../secret").read_bytes()


def write_beside(directory):
    (directory.parent / "new").touch()


def run_something(directory):
    subprocess.run(["true"])


@pytest.mark.parametrize("misdeed", [read_beside, write_beside, run_something, lambda directory: os.listdir("..")])
def test_what_is_done_while_an_example_is_read_is_seen(tmp_path, misdeed):
    with watched(with_secrets(tmp_path)) as directory:
        (directory / "own").write_bytes(b"")
    with pytest.raises(AssertionError, match="done while it was read|beside"), watched(tmp_path) as directory:
        misdeed(directory)


CONFIGS = Path(__file__).parents[2] / "config"
YAML_OF = {
    "train-lm": ["demo.yaml"],
    "train-grpo": ["grpo_demo.yaml", "grpo_gsm8k_qwen25_3b_v6e_8.yaml"],
    "train-simpo": ["simpo_tiny.yaml"],
    "sample": ["sampler/demo.yaml", "sampler/gsm8k_qwen25_3b_v6e_8.yaml"],
}
TEXT_OF = {name: [(CONFIGS / file).read_bytes() for file in files] for name, files in YAML_OF.items()}
CONFIG = st.sampled_from(sorted(YAML_OF)).flatmap(
    lambda name: st.tuples(
        st.just(name), damaged(*TEXT_OF[name]) | documents(*[yaml.safe_load(each) for each in TEXT_OF[name]])
    )
)


@pytest.mark.slow
@fuzz(CONFIG)
def test_configuration(directory, example):
    name, text = example
    (directory / "a.yaml").write_bytes(text)
    parse_arguments(find_command(name).config(), ["--config_path", "a.yaml"])


CHAT = {"messages": [{"role": "user", "content": "a"}], "answer": "b"}


@fuzz(lines({"prompt": "a", "answer": "b"}, CHAT, "text"), st.sampled_from(("a.jsonl", "a.txt")))
def test_prompts(directory, text, name):
    (directory / name).write_bytes(text)
    read_prompts(name, max_line_bytes=100_000)


ROW = {
    **{"step": 1, "prompt_id": 0, "generation_id": 0, "prompt": "a", "generated_text": "b", "num_tokens": 1},
    **{"finish_reason": "stop", "mean_logprob": -0.5, "exact_match": 1.0, "health": "loop", "loop_from": 0},
    **{"tokens": ["b"], "token_logprobs": [-0.5], "token_ids": [3], "logprobs": [-0.5]},
}
SAMPLE_ROW = {"round": 0, **{name: value for name, value in ROW.items() if name != "step"}}


READ = {
    "tail": lambda: Tail(".").look(at_end=True),
    "page": lambda: render_page(make_payload([find_run(".")]), "a"),
    "rows": lambda: read_jsonl("samples.jsonl"),
    "parquet": lambda: write_parquet(Path("samples.jsonl")),
    "resume": lambda: [drop_later(name, 3) for name in ("samples.jsonl", "metrics.jsonl")],
    "sample": lambda: RowIndex(JobShape(rounds=2, prompts=2, generations=2)).scan(Path(".")),
    "summary": lambda: Totals().add(Path("samples.jsonl").read_bytes().splitlines(keepends=True)),
    "manifest": lambda: check_manifest(Path("."), {"a": 1}, force=False),
}
METRICS = {"step": 1, "time": 2.0, "train/loss": 0.5, "name": "x"}


@fuzz(lines(ROW, SAMPLE_ROW), lines(METRICS), documents({"a": 1}), st.sampled_from(sorted(READ)))
def test_run_directory(directory, rows, metrics, manifest, reader):
    for name, text in (("samples.jsonl", rows), ("metrics.jsonl", metrics), ("job.json", manifest)):
        (directory / name).write_bytes(text)
    (directory / "samples-host-000.jsonl").write_bytes(rows)
    READ[reader]()


SMALL = LlamaConfig(max_seq_len=32, hidden_dim=8, intermediate_dim=16, num_layers=1, num_heads=2, num_kv_heads=1)
LORA = LoraConfig(r=2, base_dtype="float32")
WHOLE = {
    **{"format": 3, "step": 3, "loss": 1.0, "arrays": "arrays-0", "facts": {}, "config": {"tokenizer": "../secret"}},
    **{"hooks": {}, "hooks_called": True, "tree_digest": "0", "hook_arrays": None},
    "shapes": shape_texts(named_arrays({"model": skeleton(16, SMALL)})),
    "model": model_spec(SMALL, 16),
}
ADAPTERS = {
    **WHOLE,
    "shapes": shape_texts(named_arrays({"model": LORA.shapes(SMALL)})),
    "model": model_spec(SMALL, 16, SavedAdapters(lora=LORA, base="../secret", fingerprint="0")),
}
SAVED = (WHOLE, ADAPTERS, {**WHOLE, "model": None})
SEALED = forged(*SAVED).filter(lambda value: isinstance(value, dict)).map(_sealed).map(str.encode)


@fuzz(SEALED | documents(WHOLE), documents({"base_path": "checkpoints"}), st.booleans())
def test_checkpoint(directory, metadata, marker, resumable):
    step = directory / "checkpoints" / "step-3"
    step.mkdir(parents=True)
    (step / "metadata.json").write_bytes(metadata)
    if resumable:
        (directory / "resumable.json").write_bytes(marker)
    found = checkpoint_at(".")
    assert isinstance(found, SavedModel)
    found.skeleton()
    with contextlib.suppress(LockstepError):
        assert "secret" not in found.tokenizer
    with contextlib.suppress(LockstepError):
        assert found.adapters is None or "secret" not in found.checked_base()


TENSOR = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
REST = st.sampled_from((bytes(16), bytes(16), bytes(20), bytes(8), b"", b"\xff" * 8)) | st.binary(max_size=20)
INDEX = {"metadata": {"total_size": 16}, "weight_map": {"a": "model-1.safetensors"}}
HF = {
    **{"architectures": ["LlamaForCausalLM"], "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32, "dtype": "float32"},
    **{"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}},
}
HF["rope_parameters"] |= {"original_max_position_embeddings": 16, "rope_theta": 10000.0}


@fuzz(documents(INDEX), documents({"a": TENSOR, "__metadata__": {"format": "pt"}}), REST, st.booleans())
def test_safetensors(directory, index, header, rest, one_file):
    length = len(header).to_bytes(8, "little") if rest[:1] != b"\xff" else rest[:8]
    (directory / ("model.safetensors" if one_file else "model-1.safetensors")).write_bytes(length + header + rest)
    if not one_file:
        (directory / "model.safetensors.index.json").write_bytes(index)
    files = CheckpointFiles(".")
    for name in files.names:
        files.shape(name), files.row_bytes(name), files.file_of(name), files.read(name, 0, 1)


@fuzz(documents(HF), documents({"eos_token_id": [1, 2]}))
def test_hugging_face_configuration(directory, config, generation):
    (directory / "config.json").write_bytes(config)
    (directory / "generation_config.json").write_bytes(generation)
    hf = read_hf_config(".")
    stored_dtype(hf)
    skeleton(16, config_from_hf(hf))


RECORDS = ({"text": "a"}, {"prompt": "a", "completion": "b"}, {"messages": CHAT["messages"]})
PREFERENCE = {"chosen": [{"role": "user", "content": "a"}], "rejected": [{"role": "user", "content": "a"}]}


@fuzz(
    lines(*RECORDS, PREFERENCE),
    st.sampled_from(("a.jsonl", "a.txt", "a.jsonl.gz", "a.jsonl.zst", "a.parquet", "a.arrow")),
)
def test_training_records(directory, text, name):
    (directory / name).write_bytes(gzip.compress(text, 1) if name.endswith(".gz") else text)
    for file in list_files(name, "data.train_urls"):
        for _, _, record in read_piece(file, 0, 1, ("text",), max_line_bytes=100_000):
            assert record is None or isinstance(record, dict | BadRow)


STATE = {"_data_files": [{"filename": "data-0.arrow"}], "_split": "train"}


@fuzz(documents(STATE, {"splits": ["train"]}), st.sampled_from(("state.json", "dataset_dict.json")))
def test_data_set(directory, text, name):
    (directory / name).write_bytes(text)
    (directory / "data-0.arrow").write_bytes(b"")
    list_files(".", "data.train_urls")


CACHE = {
    **{"layout": "single", "lengths": [8], "chunk_rows": [1], "digests": ["0"], "tokens": 8, "bad": [], "examples": 1},
    **{"unpacked_rows": 1, "dropped": 0, "n_bad": 0},
}


@fuzz(documents(CACHE), documents({"rows": 1, "n_bad": 0}))
def test_data_cache(directory, metadata, chunk):
    fs, _ = url_to_fs(".")
    (directory / "metadata.json").write_bytes(metadata)
    (directory / "chunk-00000.json").write_bytes(chunk)
    read_chunk(fs, str(directory), 0)
    read_metadata(fs, str(directory))


JOB = {
    **{"name": "job", "backend": "ssh", "command": ["a"], "options": {"hosts": "a"}, "notes": {}, "deleted": False},
    "attempts": [{"number": 1, "id": "a", "started": 1.0, "launched": True, "ended": 2.0, "code": 3, "cause": "c"}],
}


@fuzz(documents(JOB))
def test_launch_record(directory, text):
    (directory / "job").mkdir()
    (directory / "job" / "job.json").write_bytes(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCKSTEP_JOBS_DIR", str(directory))
        load_record("job").namespace()


CALIBRATION = {"lockstep_calibration": 1, "chip": "TPU v5e", "measured": "a", "bandwidth": 0.8, "flops": 0.5}


@fuzz(documents(CALIBRATION))
def test_calibration(directory, text):
    (directory / "a.json").write_bytes(text)
    read_calibration("a.json")


ONES = np.ones(2, np.int64)
COMPLETIONS = {"ids": np.zeros((2, 2), np.int64), "lengths": ONES, "tokens": ONES}
COMPLETIONS |= {"logprobs": np.ones(2), "sampled": np.ones(2)}
KEPT = EarlierAnswers("auto", 100)
KEPT.keep((0, (1, 2)), [(5, 6)])


class Restored:
    """A hook of a run that goes on: what a checkpoint has of the library's hooks."""

    def load_state(self, state):
        LossWatch("skip", LossSpikeConfig()).load_state(state["loss"])
        EarlierAnswers("auto", 100).load_state(state["drafts"])
        Rollout.from_state(state["rollout"])
        completions_of(state["sampled"])

    def state(self):
        return {}

    def __call__(self, info):
        return None


ARRAYS: dict[str, np.ndarray] = {}
STATES = without_arrays(
    {
        "loss": {"losses": [1.0], "skipped": 0, "in_a_row": 0},
        "drafts": KEPT.state(),
        "rollout": {"number": 1, "lengths": ONES, "columns": {"tokens": np.ones((2, 3), np.int32)}},
        "sampled": {"number": 1, "questions": [0], "finish_reasons": ["stop", "length"], "completions": COMPLETIONS},
    },
    ARRAYS,
)


@fuzz(forged(STATES), damaged(safetensors.numpy.save(ARRAYS)), documents(json.loads(KEPT.state()["kept"])))
def test_states_of_hooks(directory, state, arrays, kept):
    if isinstance(state, dict) and isinstance(state.get("drafts"), dict) and len(kept) % 2:
        state["drafts"]["kept"] = kept.decode(errors="replace")
    checkpoints, file = CheckpointDirectory("checkpoints"), _hooks_file(arrays)
    checkpoints.of(3).mkdir(parents=True)
    (checkpoints.of(3) / file).write_bytes(arrays)
    values = {name: value for name, value in WHOLE.items() if name != "format"}
    metadata = CheckpointMetadata(**{**values, "hooks": {"a": state}, "hook_arrays": file})
    state = checkpoints.hooks(metadata)["a"]
    hooks = Hooks()
    hooks.add(Restored(), 1)
    hooks.load_state(dict.fromkeys(hooks.state(), state))
