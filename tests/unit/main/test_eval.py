"""``lockstep eval`` in this process: its command line, and tasks on a checkpoint from one end to the other."""

import json

import pytest

from lockstep.callback.evaluation import TasksConfig
from lockstep.errors import ConfigError
from lockstep.hosts import Hosts, MemoryClient
from lockstep.main.arguments import parse_arguments
from lockstep.main.eval import EvalConfig, evaluate, named
from lockstep.report import WANDB_RUN, read_jsonl
from tests import tiny
from tests.tasks import NAMES, QUESTIONS, write_tasks


@pytest.mark.parametrize(
    "words",
    [
        ["some/run", "--tasks", "a,own/b.yaml", "--tasks.limit", "3"],
        ["--tasks=a, own/b.yaml", "some/run", "--tasks.limit=3"],
        ["some/run", "--tasks", "[a, own/b.yaml]", "--tasks.limit", "3"],
        ["--checkpoint", "some/run", "--tasks", "{names: [a, own/b.yaml]}", "--tasks.limit", "3"],
    ],
)
def test_the_command_line(words):
    config = parse_arguments(EvalConfig, named(words))
    assert config == EvalConfig(checkpoint="some/run", tasks=TasksConfig(names=["a", "own/b.yaml"], limit=3))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["some/run", "other", "--tasks", "a"], "'other' is one word too many"),
        (["some/run"], "there are no tasks. Name some: --tasks"),
        (["some/run", "--tasks"], "argument --tasks has no value"),
        (
            ["some/run", "--tasks", "a", "--tasks.every", "3"],
            "tasks.every is 3, which has no effect in eval. It is for training",
        ),
    ],
)
def test_a_command_line_that_cannot_work(words, message):
    with pytest.raises(ConfigError, match=message):
        parse_arguments(EvalConfig, named(words))


@pytest.mark.slow
def test_tasks_on_a_checkpoint(tmp_path, capsys):
    pytest.importorskip("lm_eval")
    tiny.save_checkpoint(str(tmp_path / "checkpoints"))
    config = parse_arguments(
        EvalConfig,
        named([str(tmp_path / "checkpoints"), "--tasks", ",".join(NAMES), "--tasks.limit", "2"])
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
