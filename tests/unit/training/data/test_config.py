"""Training data from files to columns."""

import dataclasses
import importlib
import sys

import numpy as np
import pytest

from lockstep.configuration import decode_config
from lockstep.errors import ConfigError
from lockstep.training.data import GrpoDataConfig, LmDataConfig, PreferenceDataConfig, SourceConfig
from tests.unit.training.data.characters import Tokenizer, chars, columns, preference, write


def test_completions_are_padded_and_their_prompts_masked(tmp_path):
    urls = write(tmp_path / "x.jsonl", [{"prompt": "ab", "completion": "cd"}, {"prompt": "e", "completion": "f"}])
    rows = LmDataConfig(train_urls=urls, format="prompt_completion", max_seq_len=7).load(Tokenizer(), 16, 0)
    found = columns(rows)
    assert set(found) == {"tokens", "loss_mask"}
    assert found["tokens"].tolist() == [[1, *chars("abcd"), 2, 0], [1, *chars("ef"), 2, 0, 0, 0]]
    assert found["loss_mask"].astype(int).tolist() == [[0, 0, 0, 1, 1, 1, 0], [0, 0, 1, 1, 0, 0, 0]]


def test_text_is_packed_and_nothing_is_lost(tmp_path):
    (tmp_path / "a.txt").write_text("abcd")
    urls = (str(tmp_path / "a.txt"), *write(tmp_path / "b.jsonl", [{"text": "ef"}, {"text": "gh"}]))
    config = LmDataConfig(train_urls=urls, max_seq_len=4)
    found = columns(config.load(Tokenizer(), 16, 0))
    assert found["tokens"].reshape(-1).tolist() == [1, *chars("abcd"), 2, 1, *chars("ef"), 2, 1, *chars("gh"), 2, 0, 0]
    assert found["segment_ids"].tolist() == [[1, 1, 1, 1], [1, 1, 2, 2], [1, 1, 2, 2], [1, 1, 0, 0]]
    # What begins a document, or a row, has nothing before it to be predicted from.
    assert found["loss_mask"].astype(int).tolist() == [[0, 1, 1, 1], [0, 1, 0, 1], [0, 1, 0, 1], [0, 1, 0, 0]]
    planned = config.columns(16)
    assert {name: (one.shape, one.dtype) for name, one in planned.items()} == {
        name: (column.shape[1:], column.dtype) for name, column in found.items()
    }


def test_text_without_packing_begins_a_row_with_each_document(tmp_path):
    urls = write(tmp_path / "b.jsonl", [{"text": "abcd"}, {"text": "e"}])
    config = LmDataConfig(train_urls=urls, max_seq_len=4, packing=False)
    found = columns(config.load(Tokenizer(), 16, 0))
    assert set(found) == set(config.columns(16)) == {"tokens", "loss_mask"}
    assert found["tokens"].tolist() == [[1, *chars("abc")], [ord("d"), 2, 0, 0], [1, ord("e"), 2, 0]]


def test_examples_are_packed_whole_when_asked(tmp_path, caplog):
    caplog.set_level("INFO")
    records = [{"prompt": "a" * n, "completion": "b"} for n in (3, 4, 1)]  # 6, 7 and 4 tokens
    urls = write(tmp_path / "x.jsonl", records)
    rows = LmDataConfig(train_urls=urls, format="prompt_completion", max_seq_len=10, packing=True).load(
        Tokenizer(), 16, 0
    )
    found = columns(rows)
    assert found["segment_ids"].tolist() == [[1] * 6 + [2] * 4, [1] * 7 + [0] * 3]
    assert found["loss_mask"].astype(int).tolist() == [[0, 0, 0, 0, 1, 1, 0, 0, 1, 1], [0] * 5 + [1, 1, 0, 0, 0]]
    assert "15.0% of it padding (43.3% without packing)" in caplog.text  # 17 tokens in 2 or 3 rows of 10


def test_chat_targets_are_the_last_answer(tmp_path):
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "ok"}]
    urls = write(tmp_path / "x.jsonl", [{"messages": messages}])
    found = columns(LmDataConfig(train_urls=urls, format="chat").load(Tokenizer(), 8, 0))
    assert found["tokens"].tolist() == [[1, 3, ord("q"), 3, *chars("ok"), 2, 0]]
    assert found["loss_mask"].astype(int).tolist() == [[0, 0, 0, 0, 1, 1, 1, 0]]


def test_preference_pairs(tmp_path):
    urls = write(tmp_path / "x.jsonl", [preference("good", "no")])
    found = columns(PreferenceDataConfig(train_urls=urls, max_seq_len=9).load(Tokenizer(), 16, 0))
    prompt = [1, 3, ord("q"), 3]
    assert found["tokens"].tolist() == [[[*prompt, *chars("good"), 2], [*prompt, *chars("no"), 2, 0, 0]]]
    assert found["loss_mask"].sum(-1).tolist() == [[5, 3]]


def test_truncation_is_explicit_and_counts_what_it_drops(tmp_path, caplog):
    records = [{"prompt": "abc", "completion": "def"}, {"prompt": "abcdefgh", "completion": "i"}]
    config = LmDataConfig(
        train_urls=write(tmp_path / "x.jsonl", records), format="prompt_completion", max_seq_len=6, truncate=True
    )
    assert columns(config.load(Tokenizer(), 16, 0))["tokens"].tolist() == [[1, *chars("abcde")]]
    assert "1 of 2 examples dropped" in caplog.text
    with pytest.raises(ConfigError, match=r"0 rows.*all 2 examples fill a row of 2 tokens\. Raise data\.max_seq_len\."):
        dataclasses.replace(config, max_seq_len=2).load(Tokenizer(), 16, 0)


def test_truncated_pairs_stay_pairs(tmp_path):
    pairs = [preference("a", "b", question="x" * 20), preference("c" * 20, "d")]
    config = PreferenceDataConfig(train_urls=write(tmp_path / "x.jsonl", pairs), max_seq_len=8, truncate=True)
    assert columns(config.load(Tokenizer(), 16, 0))["loss_mask"].sum(-1).tolist() == [[4, 2]]


def test_rows_longer_than_the_model():
    with pytest.raises(ConfigError, match="data.max_seq_len is 32, but the model's max_seq_len is 16"):
        LmDataConfig(max_seq_len=32).row_length(16)


def test_a_mixture_is_read_from_yaml_and_draws_by_weight(tmp_path):
    (a,), (b,) = (write(tmp_path / f"{name}.jsonl", [{"text": name * 2}] * 3) for name in "ab")
    values = {"train_urls": [{"url": a, "weight": 3}, b], "packing": False, "max_seq_len": 4}
    config = decode_config(LmDataConfig, values, "here")
    assert config.train_urls == (SourceConfig(url=a, weight=3), b)
    rows = config.load(Tokenizer(), 16, 0)
    drawn = rows.batch(0, 4096, slice(0, 4096))["tokens"][:, 1].tolist()
    assert drawn.count(ord("a")) == 3072 and drawn.count(ord("b")) == 1024


def test_validation_sources_have_names(tmp_path):
    (a,), (b,) = (write(tmp_path / f"{name}.jsonl", [{"text": "xy"}]) for name in "ab")
    config = LmDataConfig(validation_urls=(a, SourceConfig(url=b, name="hard")))
    assert list(config.load_validation(Tokenizer(), 16)) == ["a", "hard"]
    assert LmDataConfig().load_validation(Tokenizer(), 16) == {}


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"validation_urls": ("a/x.jsonl", "b/x.jsonl")}, "name 'x' twice"),
        ({"validation_urls": (SourceConfig(url="x", weight=2.0),)}, "has a weight, which has no effect"),
        ({"max_bad_rows": -1}, "must be at least 0"),
        ({"length_buckets": (8, 4)}, "at least 2 and ascend"),
        ({"length_buckets": (8,)}, "rows are packed"),
    ],
)
def test_values_that_cannot_work(values, text):
    with pytest.raises(ConfigError, match=text):
        LmDataConfig(**values)
    with pytest.raises(ConfigError, match="weight of source x is 0.*above 0"):
        SourceConfig(url="x", weight=0)


def test_buckets_are_for_rows_that_are_shorter_than_the_longest():
    config = decode_config(PreferenceDataConfig, {"length_buckets": [4, 8], "max_seq_len": 12}, "here")
    assert config.row_lengths(16) == (4, 8, 12) and config.columns(16)["tokens"].shape == (2, 12)
    config = PreferenceDataConfig(length_buckets=(4, 16))
    with pytest.raises(ConfigError, match=r"length_buckets is \[4, 16\], but the longest rows have 16 tokens"):
        config.columns(16)
    with pytest.raises(ConfigError, match="no effect in train-grpo"):
        GrpoDataConfig(length_buckets=(4,))


def test_grpo_has_no_rows_to_load(tmp_path):
    with pytest.raises(ConfigError, match="sampled while it trains"):
        GrpoDataConfig(train_urls=("x.jsonl",)).load(Tokenizer(), 16, 0)


OWN = """
from lockstep.training import DataFormat

def as_pair(record):
    return {"prompt": record["question"] + "?", "completion": record["answers"][0]}

FORMAT = DataFormat.find("prompt_completion").converted(as_pair, fields=("question", "answers"))
"""


def test_a_format_of_a_users_own_is_a_file_and_a_change_of_it_another_cache(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    records = [{"question": "ab", "answers": ["cd"]}, {"question": "ab", "answers": []}]
    urls = write(tmp_path / "x.jsonl", records)
    found = []
    for source in (OWN, OWN.replace('"?"', '""')):
        (tmp_path / "my_format.py").write_text(source)
        monkeypatch.delitem(sys.modules, "my_format", raising=False)
        config = LmDataConfig(train_urls=urls, format="my_format:FORMAT", max_seq_len=8, cache_dir=str(tmp_path / "c"))
        assert not config.packs
        rows = config.load(Tokenizer(), 8, 0)
        assert len(rows) == 1 and "cannot be converted: IndexError" in rows.caches[0].metadata.bad[0]
        found.append((rows.batch(0, 1, slice(0, 1)), rows.caches[0].path))
        importlib.invalidate_caches()
    monkeypatch.delitem(sys.modules, "my_format")
    (first, path), (second, other) = found
    assert first["loss_mask"].tolist() == [[False] * 4 + [True] * 3 + [False]]
    assert second["loss_mask"].tolist() == [[False] * 3 + [True] * 3 + [False] * 2]
    assert path != other


def test_log_probabilities_of_a_reference_are_read_with_their_pairs(tmp_path):
    def chat(answer):
        return [{"role": "user", "content": "q"}, {"role": "assistant", "content": answer}]

    records = [
        {"chosen": chat("a" * n), "rejected": chat("b"), "ref_chosen_logps": -1.1 * n, "ref_rejected_logps": -n}
        for n in range(1, 6)
    ]
    bad = [{**records[0], "ref_chosen_logps": value} for value in (float("nan"), "x")] + [{"chosen": chat("a")}]
    config = PreferenceDataConfig(
        train_urls=write(tmp_path / "x.jsonl", [*records, *bad]), format="preference_with_reference", shuffle=False
    )
    rows = config.load(Tokenizer(), 32, 0)
    batch = rows.batch(0, 5, slice(0, 5))
    struct = config.columns(32)["reference_logprobs"]
    assert batch["reference_logprobs"].dtype == struct.dtype and struct.shape == (2,)
    np.testing.assert_array_equal(batch["reference_logprobs"], np.array([[-1.1 * n, -n] for n in range(1, 6)], "f4"))
    assert batch["loss_mask"][:, 0].sum(1).tolist() == [2, 3, 4, 5, 6], "beside the right pairs"
    texts = "\n".join(rows.caches[0].metadata.bad)
    assert "both must be finite" in texts and "it must be a number. Correct" in texts and "no field 'rejected'" in texts


@pytest.mark.parametrize(
    ("cls", "values", "text"),
    [
        (
            LmDataConfig,
            {"format": "txt"},
            "data.format is 'txt'; it must be text, prompt_completion, chat, or module:name",
        ),
        (LmDataConfig, {"format": "preference"}, "data.format is 'preference'; it must be text"),
        (LmDataConfig, {"format": "math:sqrt"}, "module 'math' has no DataFormat 'sqrt'"),
        (GrpoDataConfig, {"format": "math:no_such"}, "module 'math' has no function 'no_such'"),
        (PreferenceDataConfig, {"format": "chat"}, "data.format is 'chat'; it must be preference, preference_with_ref"),
        (
            PreferenceDataConfig,
            {"format": "preference_with_reference", "truncate": True},
            "log-probabilities are those of whole answers",
        ),
    ],
)
def test_formats_that_cannot_be_used_here(cls, values, text):
    with pytest.raises(ConfigError, match=text):
        cls(**values)
