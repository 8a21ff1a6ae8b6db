"""`lockstep demo` but for its run, which tests/package has: what it writes, starts and says at the end."""

import json
import re

import pytest
import yaml

from lockstep.callback.round import read_round_prompts
from lockstep.errors import ConfigError
from lockstep.main import demo
from lockstep.main.arguments import parse_arguments
from lockstep.report import append_jsonl
from lockstep.text import load_tokenizer
from lockstep.training import TrainLmConfig


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
    [(["--steps", "0"], "--steps is 0; it must be at least 1"), (["--processes", "3"], "invalid choice: 3")],
)
def test_what_cannot_work_is_refused(monkeypatch, tmp_path, arguments, message):
    with pytest.raises(ConfigError, match=message):
        start(monkeypatch, tmp_path, *arguments)
    assert not list(tmp_path.iterdir())
