import json

import pytest

from lockstep.errors import ConfigError
from lockstep.training import LmDataConfig, PreferenceDataConfig


class Tokenizer:
    """Characters as tokens: BOS is 1, EOS is 2, a role is 3."""

    eos_token_id = 2
    chat_template = "characters"
    name_or_path = "characters"

    def encode(self, text, add_special_tokens=True):
        special = {"<": 1, ">": 2, "|": 3}
        return [1] * add_special_tokens + [special.get(c, ord(c)) for c in text]

    def apply_chat_template(self, messages, tokenize, add_generation_prompt=False):
        assert not tokenize
        turns = "".join(f"|{m['content']}" + (">" if m["role"] == "assistant" else "") for m in messages)
        return "<" + turns + ("|" if add_generation_prompt else "")


def write(path, records):
    path.write_text("\n".join(json.dumps(record) for record in records) + "\n")
    return (str(path),)


def chars(text):
    return [ord(c) for c in text]


def test_completions_are_padded_and_their_prompts_masked(tmp_path):
    urls = write(tmp_path / "x.jsonl", [{"prompt": "ab", "completion": "cd"}, {"prompt": "e", "completion": "f"}])
    rows = LmDataConfig(train_urls=urls, format="prompt_completion", max_seq_len=7).load(Tokenizer(), 16, 0)
    assert rows.columns["tokens"].tolist() == [[1, *chars("abcd"), 2, 0], [1, *chars("ef"), 2, 0, 0, 0]]
    assert rows.columns["loss_mask"].astype(int).tolist() == [[0, 0, 0, 1, 1, 1, 0], [0, 0, 1, 1, 0, 0, 0]]


def test_text_is_packed_and_nothing_is_lost(tmp_path):
    (tmp_path / "a.txt").write_text("abcd")
    urls = (str(tmp_path / "a.txt"), *write(tmp_path / "b.jsonl", [{"text": "ef"}, {"text": "gh"}]))
    rows = LmDataConfig(train_urls=urls, max_seq_len=4).load(Tokenizer(), 16, 0)
    stream = rows.columns["tokens"].reshape(-1)[rows.columns["loss_mask"].reshape(-1)]
    assert stream.tolist() == [1, *chars("abcd"), 2, 1, *chars("ef"), 2, 1, *chars("gh"), 2]
    assert rows.columns["tokens"].shape == (4, 4) and rows.columns["loss_mask"].sum() == 14


def test_chat_targets_are_the_last_answer(tmp_path):
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "ok"}]
    urls = write(tmp_path / "x.jsonl", [{"messages": messages}])
    rows = LmDataConfig(train_urls=urls, format="chat").load(Tokenizer(), 8, 0)
    assert rows.columns["tokens"].tolist() == [[1, 3, ord("q"), 3, *chars("ok"), 2, 0]]
    assert rows.columns["loss_mask"].astype(int).tolist() == [[0, 0, 0, 0, 1, 1, 1, 0]]


def preference(chosen, rejected, question="q"):
    prompt = {"role": "user", "content": question}
    return {
        "prompt": question,
        "chosen": [prompt, {"role": "assistant", "content": chosen}],
        "rejected": [prompt, {"role": "assistant", "content": rejected}],
    }


def test_preference_pairs(tmp_path):
    urls = write(tmp_path / "x.jsonl", [preference("good", "no")])
    rows = PreferenceDataConfig(train_urls=urls, max_seq_len=9).load(Tokenizer(), 16, 0)
    prompt = [1, 3, ord("q"), 3]
    assert rows.columns["tokens"].tolist() == [[[*prompt, *chars("good"), 2], [*prompt, *chars("no"), 2, 0, 0]]]
    assert rows.columns["loss_mask"].sum(-1).tolist() == [[5, 3]]


def test_a_pair_must_answer_one_prompt(tmp_path):
    pair = preference("good", "no") | {"rejected": preference("x", "no", question="other")["rejected"]}
    with pytest.raises(ConfigError, match=r"x.jsonl:1: 'chosen' and 'rejected' differ"):
        PreferenceDataConfig(train_urls=write(tmp_path / "x.jsonl", [pair])).load(Tokenizer(), 16, 0)


def test_too_long_is_an_error_that_names_the_place(tmp_path):
    urls = write(tmp_path / "x.jsonl", [{"prompt": "a", "completion": "b"}, {"prompt": "abc", "completion": "def"}])
    with pytest.raises(ConfigError, match=r"x.jsonl:2 has 8 tokens, but a row has 6.*truncate: true"):
        LmDataConfig(train_urls=urls, format="prompt_completion", max_seq_len=6).load(Tokenizer(), 16, 0)


def test_truncation_is_explicit_and_counts_what_it_drops(tmp_path, caplog):
    records = [{"prompt": "abc", "completion": "def"}, {"prompt": "abcdefgh", "completion": "i"}]
    config = LmDataConfig(
        train_urls=write(tmp_path / "x.jsonl", records), format="prompt_completion", max_seq_len=6, truncate=True
    )
    rows = config.load(Tokenizer(), 16, 0)
    assert rows.columns["tokens"].tolist() == [[1, *chars("abcde")]]
    assert "1 of 2 examples dropped" in caplog.text


def test_truncated_pairs_stay_pairs(tmp_path):
    pairs = [preference("a", "b", question="x" * 20), preference("c" * 20, "d")]
    config = PreferenceDataConfig(train_urls=write(tmp_path / "x.jsonl", pairs), max_seq_len=8, truncate=True)
    rows = config.load(Tokenizer(), 16, 0)
    assert rows.columns["loss_mask"].sum(-1).tolist() == [[4, 2]]


def test_rows_longer_than_the_model():
    with pytest.raises(ConfigError, match="data.max_seq_len is 32, but the model's max_seq_len is 16"):
        LmDataConfig(max_seq_len=32).row_length(16)
