"""``lockstep data --check``: the same examples as a run has, and whether it would be refused."""

import json
import shutil
from pathlib import Path

import pytest

from lockstep.errors import ConfigError
from lockstep.main.data import run_data
from lockstep.training.data import LmDataConfig
from lockstep.training.data.examples import DataFormat
from tests import tiny

FILES = ["--tokenizer", tiny.TOKENIZER]
QUESTIONS = ["--config_path", "config/grpo_demo.yaml", "--initialize_from_hf=null", "--model.type=llama"]
RUN = ["--config_path", "config/demo.yaml"]


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.mark.parametrize(
    ("words", "counted", "shown"),
    [
        (["data/preferences/sums.jsonl", *FILES], "400 examples of all records; the end of answers: <eos>", "chosen"),
        (["data/demo/train.jsonl", *FILES, "--rows", "600"], "looked at 600 examples of the first 600 records", "⟦"),
        (["--rows=40", *RUN], "looked at 40 examples", "What is"),
        (["data/preferences/as_asked.jsonl", "--config_path", "config/dpo_tiny.yaml"], "looked at 600", "rejected"),
        (
            ["--config_path", "config/grpo_demo.yaml", "--initialize_from_hf=null", "--model.type=llama"],
            "64 ex",
            "<bos>",
        ),
    ],
    ids=["files", "rows", "run", "files of a run", "questions"],
)
def test_examples_are_counted_and_shown(words, counted, shown, capsys):
    assert run_data(["--check", *words]) == 0
    printed = capsys.readouterr().out
    assert counted in printed and shown in printed and "refused" not in printed


def test_a_run_that_would_be_refused_ends_with_1(tmp_path, capsys):
    place = tmp_path / "tokenizer"
    shutil.copytree(tiny.TOKENIZER, place)
    template = place / "chat_template.jinja"
    template.write_text(template.read_text().replace("{{ eos_token }}", "."))
    chats = [[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b" * n}] for n in range(1, 5)]
    path = write(tmp_path / "x.jsonl", [*({"messages": messages} for messages in chats), {"messages": []}])
    assert run_data(["--check", path, "--tokenizer", str(place)]) == 1
    printed = capsys.readouterr().out
    assert "4 of 4 examples (100.0%) have an answer without an end token (<eos> (2))" in printed
    assert f"The first: {path}:1, …" in printed and f"  {path}:5 has 0 messages" in printed
    assert "a run is refused: none of the 4 examples looked at" in printed
    keys = ["--config_path", "config/demo.yaml", "--data.format", "chat", "--tokenizer", str(place), path]
    assert run_data(["--check", *keys]) == 1
    assert run_data(["--check", *keys, "--data.require_end_token", "false"]) == 0
    assert run_data(["--check", *keys, "--data.require_end_token=false", "--data.max_bad_rows=0"]) == 1
    assert "1 records cannot be used" in capsys.readouterr().out.splitlines()[-1]


def test_examples_are_those_of_the_cache(tmp_path, capsys):
    records = [{"prompt": "What is " + "1" * n, "completion": " one" * n} for n in range(1, 40)]
    path = write(tmp_path / "x.jsonl", records)
    keys = ["--data.train_urls", f"[{path}]", "--data.max_seq_len", "20", "--data.truncate", "true"]
    assert run_data(["--check", *RUN, *keys]) == 0
    printed = capsys.readouterr().out
    data = LmDataConfig(
        train_urls=(path,), format="prompt_completion", max_seq_len=20, truncate=True, cache_dir=str(tmp_path / "cache")
    )
    rows = data.load(tiny.tokenizer(), 32, 0)
    metadata = rows.caches[0].metadata
    whole = [sequence for (sequence,) in DataFormat.find("prompt_completion").tokenize(tiny.tokenizer(), records)]
    cut = sum(len(sequence.tokens) > 20 > sequence.n_prompt for sequence in whole)
    assert f"looked at {metadata.examples} examples" in printed and metadata.dropped > 0 < cut
    assert f"{metadata.dropped} examples are left out: their prompts fill 20 tokens" in printed
    assert f"{cut} of {metadata.examples} examples" in printed and "are cut" in printed
    assert list(rows.examples(1000))[0][1][0].tokens.tolist() == list(whole[0].tokens)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"\n\n", "x.json has no records. Write it again, or take it out of the data."),
        (b'[{"text": "a"}]', "x.json:1 is a JSON list, not an object. Write one object per line, in UTF-8."),
        (b"\x1f\x8b\x08", "x.json:1 is not UTF-8, it begins as gzip does"),
    ],
    ids=["empty", "an array", "gzip"],
)
def test_a_file_whose_format_is_not_known_says_what_it_is(content, text, tmp_path):
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(ConfigError, match=text):
        run_data(["--check", str(tmp_path / "x.json"), *FILES])


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "lockstep data does nothing without --check"),
        (["--check"], "needs --config_path, or files and their tokenizer"),
        (["--check", "a.jsonl"], "needs --config_path, or files and their tokenizer"),
        (["--check", "data/grpo/sums.jsonl", *FILES], "has the fields .*answer.*question.*--format"),
        (["--check", "no/such.jsonl", *FILES], "training file no/such.jsonl matches nothing"),
        (["--check", "data/demo/train.jsonl", *FILES, "--data.truncate", "true"], "--data.truncate is a key of a conf"),
        (["--check", "--tokenizer"], "argument --tokenizer has no value"),
        (["--check", "--config_path", "config/sampler/demo.yaml"], "is one of sample, which trains on no data"),
    ],
)
def test_a_command_line_that_cannot_work(words, text):
    with pytest.raises(ConfigError, match=text):
        run_data(words)


def test_no_cache_is_made(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert run_data(["--check", "--rows", "3", *RUN]) == 0 and not list(Path(tmp_path).iterdir())
