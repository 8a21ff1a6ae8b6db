"""``lockstep eval`` in this process, from the command line to the files."""

import json
import time

import pytest

from lockstep.batch_inference import EvalConfig, evaluate
from lockstep.batch_inference.evaluation import _Output
from lockstep.callback.evaluation.scoring import TaskResults
from lockstep.errors import PeerError
from lockstep.hosts import Hosts, MemoryClient
from lockstep.main.arguments import parse_arguments
from lockstep.main.runs import name_tasks
from lockstep.report import WANDB_RUN, read_jsonl
from lockstep.text import TEMPLATE_DATE, load_tokenizer
from tests import tiny
from tests.tasks import NAMES, QUESTIONS, write_tasks
from tests.unit.training.checkpoints.test_export import alone, held


@pytest.mark.parametrize("url", ["s3://me:hunter2@host/run", "https://host/run?sig=hunter2"])
def test_passwords_of_the_checkpoint_are_in_no_file_of_an_evaluation(tmp_path, url, capsys):
    words = [url, "--tasks", "a", "--base_model", url, "--trainer.log_dir", str(tmp_path), "--trainer.run_id", "run"]
    output = _Output(parse_arguments(EvalConfig, name_tasks(words)), {})
    output.write(TaskResults(scores={"a": {"acc": 0.5}}, rows=[]))
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert json.loads((tmp_path / "run/scores.json").read_text())["checkpoint"].startswith(url[:5])
    assert len(files) >= 2 and not [path for path in files if b"hunter2" in path.read_bytes()]
    shown = capsys.readouterr()
    assert "hunter2" not in shown.out + shown.err


@pytest.mark.slow
def test_tasks_on_a_checkpoint(tmp_path, capsys):
    pytest.importorskip("lm_eval")
    tiny.save_checkpoint(str(tmp_path / "checkpoints"))
    config = parse_arguments(
        EvalConfig,
        name_tasks([str(tmp_path / "checkpoints"), "--tasks", ",".join(NAMES), "--tasks.limit", "2"])
        + ["--tasks.task_dir", write_tasks(tmp_path / "tasks"), "--trainer.log_dir", str(tmp_path)]
        + ["--trainer.run_id", "run", "--engine.page_size", "8"],
    )
    (tmp_path / "run").mkdir()
    for name in (WANDB_RUN, "tasks.jsonl"):
        (tmp_path / "run" / name).write_text('{"of": "the evaluation before"}\n')
    assert evaluate(config, Hosts(MemoryClient.hub(1)[0])) == 0
    assert not (tmp_path / "run" / WANDB_RUN).exists(), "this is another W&B run"
    scores = json.loads((tmp_path / "run" / "scores.json").read_text())["scores"]
    assert list(scores) == NAMES
    rows = read_jsonl(tmp_path / "run" / "tasks.jsonl")
    assert [(row["task"], row["prompt"]) for row in rows if row["task"] != "own_text"] == [
        (name, each["question"]) for name in NAMES[:2] for each in QUESTIONS[:2]
    ]
    assert scores["own_choice"]["acc"] == sum(row["acc"] for row in rows if row["task"] == "own_choice") / 2
    (line,) = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert line["eval/own_choice/acc"] == scores["own_choice"]["acc"] and line["eval/requests"] == 8
    printed = capsys.readouterr().out
    assert "own_words" in printed and str(tmp_path / "run" / "scores.json")[-20:] in printed.replace("\n", "")


@pytest.mark.slow
def test_scores_say_the_date_of_the_chat_template_and_a_later_evaluation_keeps_it(tmp_path, monkeypatch):
    pytest.importorskip("lm_eval")
    tiny.save_checkpoint(str(tmp_path / "undated"))
    tiny.save_checkpoint(str(tmp_path / "dated"), facts={TEMPLATE_DATE: "2024-02-29"})

    def date(zone, run_id, checkpoint="undated"):
        """That of an evaluation in a zone."""
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        tokenizer = load_tokenizer(str(tmp_path / checkpoint / "tokenizer"))
        tokenizer.chat_template = "{{ strftime_now('%d %b %Y') }}{{ messages[0].content }}"
        tokenizer.save_pretrained(tmp_path / checkpoint / "tokenizer")
        words = name_tasks([str(tmp_path / checkpoint), "--tasks", NAMES[1], "--tasks.limit", "1"])
        words += ["--tasks.task_dir", write_tasks(tmp_path / "tasks"), "--trainer.log_dir", str(tmp_path)]
        config = parse_arguments(EvalConfig, [*words, "--trainer.run_id", run_id, "--engine.page_size", "8"])
        assert evaluate(config, alone()) == 0
        return json.loads((tmp_path / run_id / "scores.json").read_text())[TEMPLATE_DATE]

    try:
        first, other = date("UTC+12", "first"), date("UTC-14", "other")
        assert first != other, "there is no hour at which these zones have the same date"
        assert date("UTC-14", "first") == first
        assert date("UTC-14", "trained", "dated") == "2024-02-29"
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.slow
def test_an_evaluation_is_refused_while_another_job_writes_there(tmp_path, monkeypatch):
    pytest.importorskip("lm_eval")
    tiny.save_checkpoint(str(tmp_path / "checkpoints"))
    (tmp_path / "run").mkdir()
    rows = tmp_path / "run" / "tasks.jsonl"
    rows.write_text("{}\n")
    words = [str(tmp_path / "checkpoints"), "--tasks", NAMES[0], "--tasks.task_dir", write_tasks(tmp_path / "tasks")]
    words += ["--trainer.log_dir", str(tmp_path), "--trainer.run_id", "run"]
    monkeypatch.setattr("lockstep.batch_inference.evaluation.load", lambda *_: pytest.fail("the model was read"))
    with held(str(tmp_path / "run"), str(tmp_path / "run" / "lease.json")) as other:
        with pytest.raises(PeerError, match=rf"run: process {other.pid} on .* choose another trainer.run_id"):
            evaluate(parse_arguments(EvalConfig, name_tasks(words)), alone())
    assert rows.read_text() == "{}\n"
