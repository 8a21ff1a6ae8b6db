"""`lockstep demo` but for its run, which tests/package has: what it writes, starts and says at the end."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lockstep.callback.round import read_round_prompts
from lockstep.errors import ConfigError
from lockstep.main import demo
from lockstep.main.arguments import parse_arguments
from lockstep.main.demo import words
from lockstep.report import append_jsonl
from lockstep.text import check_vocab, decode, encode, load_tokenizer, read_prompts
from lockstep.training import TrainLmConfig

ROOT = Path(__file__).parents[3]
DEMO = ROOT / "data" / "demo"
FILES = (
    "train.jsonl",
    "prompts.jsonl",
    "tokenizer/tokenizer.json",
    "tokenizer/tokenizer_config.json",
    "tokenizer/chat_template.jinja",
)


def rows(name):
    return [json.loads(line) for line in (DEMO / name).read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(DEMO / "tokenizer")


def test_the_script_writes_the_same_bytes(tmp_path):
    subprocess.run([sys.executable, str(DEMO / "make.py"), "--output", str(tmp_path)], check=True)
    for name in FILES:
        assert (tmp_path / name).read_bytes() == (DEMO / name).read_bytes(), name


def test_the_questions_of_the_reinforcement_demo_are_sums_that_are_not_held_out(tmp_path):
    grpo = ROOT / "data" / "grpo"
    subprocess.run([sys.executable, str(grpo / "make.py"), "--output", str(tmp_path)], check=True)
    sums, tested = ((grpo / name).read_text(encoding="utf-8") for name in ("sums.jsonl", "held_out.jsonl"))
    assert (tmp_path / "sums.jsonl").read_text(encoding="utf-8") == sums
    assert (tmp_path / "held_out.jsonl").read_text(encoding="utf-8") == tested
    prompts = rows("prompts.jsonl")
    assert [json.loads(line) for line in tested.splitlines()] == [row for row in prompts if "plus" in row["prompt"]]
    held_out = {tuple(sorted(re.findall(r"\d+", row["prompt"]))) for row in prompts}
    for question in map(json.loads, sums.splitlines()):
        numbers = re.findall(r"\d+", question["question"])
        assert tuple(sorted(numbers)) not in held_out
        assert question["answer"].endswith(f"\n#### {words(sum(map(int, numbers)))}")


def test_no_preference_that_is_held_out_is_trained_on_and_each_sum_is_wanted_in_both_ways(tmp_path):
    preferences = ROOT / "data" / "preferences"
    subprocess.run([sys.executable, str(preferences / "make.py"), "--output", str(tmp_path)], check=True)
    pairs = {}
    for path in preferences.glob("*.jsonl"):
        assert (tmp_path / path.name).read_bytes() == path.read_bytes(), path.name
        pairs[path.stem] = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]

    def numbers(pair):
        return tuple(sorted(re.findall(r"\d+", pair["prompt"])))

    train, held_out = pairs["as_asked"], pairs["as_asked_held_out"]
    assert not {numbers(pair) for pair in train} & {numbers(pair) for pair in held_out}
    assert len({numbers(pair) for pair in held_out}) == 100
    for spelled, digits in zip(held_out[::2], held_out[1::2], strict=True):
        assert spelled["prompt"].replace("words", "digits") == digits["prompt"]
        liked, other = (spelled[side][-1]["content"] for side in ("chosen", "rejected"))
        assert [digits[side][-1]["content"] for side in ("rejected", "chosen")] == [liked, other]
        assert other.isdigit() and not any(sign.isdigit() for sign in liked)


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (7, "seven"),
        (13, "thirteen"),
        (20, "twenty"),
        (42, "forty-two"),
        (100, "one hundred"),
        (198, "one hundred ninety-eight"),
        (4000, "four thousand"),
        (7015, "seven thousand fifteen"),
        (9999, "nine thousand nine hundred ninety-nine"),
    ],
)
def test_number_words(number, text):
    assert words(number) == text


def test_nothing_held_out_is_trained_on():
    def numbers(row):
        return tuple(sorted(map(int, re.findall(r"\d+", row["prompt"]))))

    train = {numbers(row) for row in rows("train.jsonl")}
    held_out = [numbers(row) for row in rows("prompts.jsonl")]
    assert len(set(held_out)) == len(held_out) == 32
    assert not train & set(held_out)


def test_held_out_answers_are_right():
    for row in rows("prompts.jsonl"):
        assert row["answer"] == words(sum(map(int, re.findall(r"\d+", row["prompt"]))))


def test_the_tokenizer_gives_every_text_back(tokenizer):
    for row in rows("train.jsonl")[:500]:
        assert (
            decode(tokenizer, tokenizer.encode(row["prompt"] + row["completion"])) == row["prompt"] + row["completion"]
        )
    odd = "Ünïcode 12.5% ↵"
    assert decode(tokenizer, tokenizer.encode(odd)) == odd
    assert [tokenizer.decode([token]) for token in tokenizer.encode("8281", add_special_tokens=False)] == list("8281")
    assert None not in (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    check_vocab(tokenizer, 352)


def test_prompt_and_completion_are_the_tokens_of_the_whole(tokenizer):
    for row in rows("train.jsonl")[:500]:
        parts = tokenizer.encode(row["prompt"]) + tokenizer.encode(row["completion"], add_special_tokens=False)
        assert parts == tokenizer.encode(row["prompt"] + row["completion"])


def test_the_longest_row_fits_the_demos_model(tokenizer):
    longest = max(len(tokenizer.encode(row["prompt"] + row["completion"])) + 1 for row in rows("train.jsonl"))
    assert longest <= 20
    assert len(encode(tokenizer, read_prompts(str(DEMO / "prompts.jsonl")), max_seq_len=32, max_new_tokens=12)) == 32


def start(monkeypatch, tmp_path, *arguments, code=0, exact_match=1.0):
    """Run it with a launcher that writes what a run does; the words that the launcher was given, and the exit code."""
    given = []

    def launch(words):
        given.extend(words)
        run = tmp_path / "a demo" / "runs" / words[words.index("--trainer.run_id") + 1]
        for step, right in ((0, 0.0), (50, exact_match)):
            append_jsonl(run / "samples.jsonl", [{"step": step, "exact_match": right} for _ in range(8)])
        return code

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "launch", launch)
    return demo.main(["--directory", "a demo", *arguments]), given


def test_it_starts_what_its_configuration_says_on_several_processes(monkeypatch, tmp_path):
    code, given = start(monkeypatch, tmp_path, "--processes", "4", "--steps", "7")
    cut = given.index("--")
    assert code == 0 and given[:cut][-4:] == ["--processes", "4", "--devices_per_process", "1"]
    assert given[cut + 1 : cut + 3] == ["lockstep", "train-lm"]
    config = parse_arguments(TrainLmConfig, given[cut + 3 :])
    assert config.trainer.num_train_steps == 7 and config.trainer.log_dir == "a demo/runs"
    assert config.trainer.train_batch_size % 4 == 0
    tokenizer = load_tokenizer(config.tokenizer)
    (train,) = config.data.train_urls
    longest = max(
        len(tokenizer.encode(row["prompt"] + row["completion"])) + 1
        for row in map(json.loads, open(train, encoding="utf-8"))
    )
    assert longest <= config.data.max_seq_len
    asked = read_round_prompts(config.inference_eval, tokenizer).requests
    assert len(asked) == 8
    assert max(len(one.prompt_tokens) + config.inference_eval.max_new_tokens for one in asked) <= 32


def test_what_was_changed_stays(monkeypatch, tmp_path, capsys):
    start(monkeypatch, tmp_path)
    file = tmp_path / "a demo" / "demo.yaml"
    file.write_text(file.read_text().replace("num_train_steps: 100", "num_train_steps: 300"))
    monkeypatch.setattr(demo.time, "strftime", lambda _: "later")
    _, given = start(monkeypatch, tmp_path)
    assert parse_arguments(TrainLmConfig, given[given.index("--") + 3 :]).trainer.num_train_steps == 300
    assert "data are already in a demo" in capsys.readouterr().out


def test_the_configuration_names_the_command_that_runs_it(monkeypatch, tmp_path):
    _, given = start(monkeypatch, tmp_path)
    text = (tmp_path / "a demo" / "demo.yaml").read_text()
    assert "lockstep launch --backend local --processes 2" in text and "--config_path 'a demo/demo.yaml'" in text
    assert "$" not in text and yaml.safe_load(text)["tokenizer"] == "a demo/tokenizer"


def test_it_ends_by_saying_what_was_learnt_and_what_to_do_next(monkeypatch, tmp_path, capsys):
    start(monkeypatch, tmp_path)
    shown = capsys.readouterr().out
    assert "0 of 8 answers were right before the first step, 8 of 8 after step 50" in shown
    assert re.search(r"lockstep report 'a demo/runs/\d{8}-\d{6}'\n", shown)
    assert "lockstep sample" in shown and "SampleCallback" in shown


def test_a_run_that_fails_has_its_own_words(monkeypatch, tmp_path, capsys):
    code, _ = start(monkeypatch, tmp_path, code=137)
    assert code == 137 and "next:" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--steps", "0"], "--steps is 0; it must be at least 1"), (["--processes", "3"], "invalid choice: '?3")],
)
def test_what_cannot_work_is_refused(monkeypatch, tmp_path, arguments, message):
    with pytest.raises(ConfigError, match=message):
        start(monkeypatch, tmp_path, *arguments)
    assert not list(tmp_path.iterdir())


def test_a_directory_that_cannot_be_written_is_a_mistake(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="--directory PATH"):
        demo.main(["--directory", str(tmp_path / "file")])
