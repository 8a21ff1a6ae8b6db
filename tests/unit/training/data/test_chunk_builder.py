"""Rows that cannot be used are named by file and line, whichever part of a file they are in."""

import json

import pytest

from lockstep.errors import ConfigError
from lockstep.training.data import LmDataConfig, build, records
from tests import tiny
from tests.unit.training.data.characters import Tokenizer, columns, write


def test_too_long_is_a_bad_row_that_names_the_place(tmp_path):
    urls = write(tmp_path / "x.jsonl", [{"prompt": "a", "completion": "b"}, {"prompt": "abc", "completion": "def"}])
    config = LmDataConfig(train_urls=urls, format="prompt_completion", max_seq_len=6, on_bad_row="raise")
    with pytest.raises(ConfigError, match=r"x.jsonl:2 has 8 tokens, but a row has 6.*truncate: true"):
        config.load(Tokenizer(), 16, 0)


def lines_with_faults(tmp_path, monkeypatch):
    """60 lines with two faults and empty lines between, cut into many parts."""
    monkeypatch.setattr(records, "MIN_CHUNK_BYTES", 100)
    lines = [b'{"text": "line %d"}' % number for number in range(1, 61)]
    lines[16], lines[41] = b"{broken", b'{"text": "\xff"}'
    lines[30] = lines[40] = lines[59] = b"  "
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"\n".join(lines))
    return LmDataConfig(train_urls=(str(path),), packing=False, max_seq_len=16)


def test_bad_rows_are_counted_and_named_in_whichever_part_they_are(tmp_path, monkeypatch, caplog):
    rows = lines_with_faults(tmp_path, monkeypatch).load(Tokenizer(), 16, 0)
    metadata = rows.caches[0].metadata
    assert len(metadata.chunk_rows) > 5 and metadata.n_bad == 2 and len(rows) == 55
    assert "x.jsonl:17 is not JSON" in metadata.bad[0] and "x.jsonl:42 is not UTF-8" in metadata.bad[1]
    assert "2 records left out" in caplog.text and "x.jsonl:17 is not JSON" in caplog.text
    texts = ["".join(map(chr, row[1 : 1 + mask.sum() - 1])) for row, mask in zip(*columns(rows).values(), strict=True)]
    assert texts == [f"line {n}" for n in range(1, 61) if n not in (17, 31, 41, 42, 60)]


def test_raising_names_the_line_in_the_file(tmp_path, monkeypatch):
    config = lines_with_faults(tmp_path, monkeypatch)
    with pytest.raises(ConfigError, match="x.jsonl:17 is not JSON"):
        LmDataConfig(**{**vars(config), "on_bad_row": "raise"}).load(Tokenizer(), 16, 0)
    config.load(Tokenizer(), 16, 0)
    with pytest.raises(ConfigError, match="x.jsonl:17 is not JSON"):  # also where the cache is finished already
        LmDataConfig(**{**vars(config), "on_bad_row": "raise"}).load(Tokenizer(), 16, 0)


def test_too_many_bad_rows_stop_the_run(tmp_path, monkeypatch):
    config = lines_with_faults(tmp_path, monkeypatch)
    config = LmDataConfig(**{**vars(config), "max_bad_rows": 1, "cache_dir": str(tmp_path / "cache")})
    text = r"2 records cannot be used, but data.max_bad_rows is 1.*x.jsonl:17 is not JSON"
    with monkeypatch.context() as patch, pytest.raises(ConfigError, match=text):
        patch.setattr(build, "summarise_chunks", lambda *_: pytest.fail("the cache was finished first"))
        config.load(Tokenizer(), 16, 0)
    with pytest.raises(ConfigError, match=text):  # also where the chunks are there already
        config.load(Tokenizer(), 16, 0)


RECORDS = {
    "text": {"text": "a <image> b"},
    "prompt_completion": {"prompt": "a <image>", "completion": "b"},
    "chat": {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "<image>"}]},
    "earlier answer": {
        "messages": [
            *(
                {"role": role, "content": text}
                for role, text in (("user", "a"), ("assistant", "b"), ("user", "<image>"))
            ),
            {"role": "assistant", "content": "c"},
        ]
    },
}


@pytest.mark.parametrize("name", RECORDS)
def test_a_token_that_the_embedding_does_not_have_makes_a_bad_row_and_the_others_stay(name, tmp_path):
    tokenizer = tiny.tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    good = json.loads(json.dumps(RECORDS[name]).replace("<image>", "3"))
    urls = write(tmp_path / "x.jsonl", [good, RECORDS[name], good])
    format = "chat" if name == "earlier answer" else name
    values = {"train_urls": urls, "format": format, "cache_dir": str(tmp_path / "cache"), "packing": False}
    values |= {"train_on": "all"} if name == "earlier answer" else {}
    count = len(tokenizer)
    (cache,) = LmDataConfig(**values).load(tokenizer, 64, 0, vocab_size=count - 1).caches
    (bad,) = cache.metadata.bad
    assert f"x.jsonl:2 has the token '<image>' (id {count - 1}), and the model's embedding has the ids 0 to" in bad
    assert len(cache) == 2
    with pytest.raises(ConfigError, match=r"x\.jsonl:2 has the token '<image>'"):
        LmDataConfig(**values, on_bad_row="raise").load(tokenizer, 64, 0, vocab_size=count - 1)
    # With rows for all tokens the cache is the one without a limit, which earlier versions wrote.
    (whole,) = LmDataConfig(**values).load(tokenizer, 64, 0, vocab_size=count).caches
    (unchecked,) = LmDataConfig(**values).load(tokenizer, 64, 0).caches
    assert len(whole) == 3 and whole.path == unchecked.path != cache.path
