"""The demo's data: what make.py writes, nothing held out is trained on, everything fits the demo's model."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.main.demo_data import words
from lockstep.text import check_vocab, decode, encode, load_tokenizer, read_prompts

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
