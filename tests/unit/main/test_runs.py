"""``lockstep eval`` and ``export`` in this process, from the command line to the files."""

import contextlib
import json
import subprocess
import sys
import time

import fsspec
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.callback.evaluation import TasksConfig
from lockstep.callback.evaluation.scoring import TaskResults
from lockstep.errors import ConfigError, PeerError
from lockstep.hosts import Hosts, MemoryClient
from lockstep.main.arguments import parse_arguments
from lockstep.main.runs import EvalConfig, ExportConfig, _Output, evaluate, export, name_tasks
from lockstep.models import load_hf, read_hf_config, save_target
from lockstep.placement import make_mesh
from lockstep.report import WANDB_RUN, read_jsonl
from lockstep.text import TEMPLATE_DATE, load_tokenizer, tokenizer_digest
from tests import tiny
from tests.multiprocess.harness import run_threads
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
    config = parse_arguments(EvalConfig, name_tasks(words))
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
        parse_arguments(EvalConfig, name_tasks(words))


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


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "checkpoints"
    return path, jax.tree.map(np.asarray, tiny.save_checkpoint(str(path)))


def alone():
    return Hosts(MemoryClient.hub(1)[0])


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_the_model_of_a_checkpoint_is_exported(checkpoints, tmp_path, dtype, capsys):
    path, model = checkpoints
    out = str(tmp_path / "out")
    assert export(ExportConfig(checkpoint=str(path), output=out, dtype=dtype), alone()) == 0
    kept = dtype or "float32"
    hf = read_hf_config(out)
    assert (hf["vocab_size"], hf["torch_dtype"]) == (tiny.vocab_size(), kept), "without the rows that pad it"
    found = load_hf(out, make_mesh("auto"), dtype=jnp.dtype(kept))
    for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(model), strict=True):
        cut = tuple(slice(size) for size in mine.shape)
        np.testing.assert_array_equal(mine, theirs[cut].astype(kept))
    assert tokenizer_digest(load_tokenizer(out)) == tokenizer_digest(tiny.tokenizer())
    assert f"exported {path}/step-4 to {out}" in capsys.readouterr().out


def test_processes_share_the_work_and_fail_together(checkpoints, tmp_path):
    path, _ = checkpoints
    run_threads(lambda hosts: export(ExportConfig(checkpoint=str(path), output=str(tmp_path / "out")), hosts), 2)
    assert (tmp_path / "out" / "config.json").is_file()
    with pytest.raises(PeerError, match="there is no checkpoint of step 5"):
        export(ExportConfig(checkpoint=str(path), output=str(tmp_path / "no"), step=5), alone())
    assert not (tmp_path / "no").exists()


def test_values_that_cannot_work():
    with pytest.raises(ConfigError, match=r"dtype is 'int8'; it must be float32 or bfloat16"):
        ExportConfig(checkpoint="a", output="b", dtype="int8")
    with pytest.raises(ConfigError, match="output is empty"):
        ExportConfig(checkpoint="a", output="")


HOLDER = """
import sys, time
from lockstep.hosts.lease import Lease
Lease(sys.argv[1], file=sys.argv[2]).take()
print("taken", flush=True)
time.sleep(600)
"""


@contextlib.contextmanager
def held(place, file):
    """Another process that has the lease of a place."""
    other = subprocess.Popen([sys.executable, "-c", HOLDER, place, file], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout.readline() == "taken\n"
        yield other
    finally:
        other.kill()
        other.wait()


def test_an_export_is_refused_while_another_job_writes_there(checkpoints, tmp_path):
    out = str(tmp_path / "out")
    config = ExportConfig(checkpoint=str(checkpoints[0]), output=out)
    with held(out, save_target(out, "").lease) as other:
        with pytest.raises(PeerError, match=rf"out: process {other.pid} on .* choose another output"):
            export(config, alone())
        assert not (tmp_path / "out").exists()
    assert export(config, alone()) == 0  # the other one is dead
    assert [path.name for path in tmp_path.iterdir()] == ["out"] and not (tmp_path / "out" / "lease.json").exists()


def test_a_lease_of_an_export_to_a_bucket_is_beside_the_model_and_is_given_back(checkpoints):
    filesystem = fsspec.filesystem("memory")
    filesystem.store.clear()
    url = "memory://bucket/model"
    assert save_target(url, "").lease == f"{url}/lease.json"
    assert export(ExportConfig(checkpoint=str(checkpoints[0]), output=url), alone()) == 0
    names = {name.rpartition("/")[2] for name in filesystem.store}
    filesystem.store.clear()
    assert {"config.json", "model.safetensors"} <= names and "lease.json" not in names


@pytest.mark.slow
def test_an_evaluation_is_refused_while_another_job_writes_there(checkpoints, tmp_path, monkeypatch):
    pytest.importorskip("lm_eval")
    (tmp_path / "run").mkdir()
    rows = tmp_path / "run" / "tasks.jsonl"
    rows.write_text("{}\n")
    words = [str(checkpoints[0]), "--tasks", NAMES[0], "--tasks.task_dir", write_tasks(tmp_path / "tasks")]
    words += ["--trainer.log_dir", str(tmp_path), "--trainer.run_id", "run"]
    monkeypatch.setattr("lockstep.main.runs.load", lambda *_: pytest.fail("the model was read"))
    with held(str(tmp_path / "run"), str(tmp_path / "run" / "lease.json")) as other:
        with pytest.raises(PeerError, match=rf"run: process {other.pid} on .* choose another trainer.run_id"):
            evaluate(parse_arguments(EvalConfig, name_tasks(words)), alone())
    assert rows.read_text() == "{}\n"
