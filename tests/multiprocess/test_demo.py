"""The demo as `make demo` runs it: noise at first, right answers to questions never trained on in the end.

In `make slow` its beginning, with a smaller model.
"""

import dataclasses
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from lockstep.callback import InferenceEvalConfig
from lockstep.callback.round import read_round_prompts
from lockstep.engine import Engine, EngineConfig
from lockstep.models import read_decoder
from lockstep.models.hf.load import load_hf
from lockstep.placement import make_mesh
from lockstep.report import read_jsonl
from lockstep.report.rows import COLUMNS
from lockstep.text import load_tokenizer
from lockstep.types import Completion, FinishReason
from tests import wandb_run
from tests.multiprocess.harness import run_command, run_processes
from tests.multiprocess.launcher import OPTIMISED
from tests.oracle import assert_same_tokens, oracle_completions

ROOT = Path(__file__).parents[2]
PROMPTS = 32


def mean(values):
    values = list(values)
    return sum(values) / len(values)


def all_requests(checkpoint):
    """The demo's questions, greedy and sampled."""
    requests = []
    for temperature in (0.0, 0.8):
        config = InferenceEvalConfig(
            prompts=str(ROOT / "data/demo/prompts.jsonl"), max_new_tokens=12, temperature=temperature
        )
        read = read_round_prompts(config, load_tokenizer(checkpoint)).requests
        requests += [dataclasses.replace(request, prompt_id=len(requests) + i) for i, request in enumerate(read)]
    return requests


def body_generate(hosts, checkpoint, mesh_shape, layout):
    mesh = make_mesh(mesh_shape)
    engine = Engine(EngineConfig(layout=layout), mesh)
    completions = engine.generate(load_hf(checkpoint, mesh), all_requests(checkpoint), hosts=hosts)
    return [dataclasses.asdict(completion) for completion in completions]


def check_the_checkpoint(checkpoint, shown):
    """Every layout and number of processes gives the tokens of one process without a cache, without a single tie."""
    requests = all_requests(checkpoint)
    expected = oracle_completions(load_hf(checkpoint, make_mesh("1,1,1", jax.devices()[:1])), requests)
    tokenizer = load_tokenizer(checkpoint)
    texts = [tokenizer.decode(answer.tokens, skip_special_tokens=True) for answer in expected[:PROMPTS]]
    assert texts == shown, "the trainer's last samples are those of the checkpoint it saved"
    for processes, mesh_shape, layout in [(2, "1,2,2", {"tensor": 2}), (4, "auto", "training")]:
        for result in run_processes(
            body_generate, processes=processes, timeout_s=300, args=(str(checkpoint), mesh_shape, layout)
        ):
            got = [
                Completion(**c | {"tokens": tuple(c["tokens"]), "finish_reason": FinishReason(c["finish_reason"])})
                for c in result
            ]
            assert assert_same_tokens(expected, got) == 0


def body_exact(hosts, checkpoint, mesh_shape, devices, layout):
    """Four drawn answers to each question by the checkpoint in bfloat16, exact, with their log-probabilities as hex."""
    mesh = make_mesh(mesh_shape, jax.devices()[:devices])
    config, weights = read_decoder(load_hf(checkpoint, mesh))
    exact = dataclasses.replace(config, numerics="exact")
    halves = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), weights)
    drawn = [
        dataclasses.replace(each, params=dataclasses.replace(each.params, n_generations=4))
        for each in all_requests(checkpoint)[PROMPTS:]
    ]
    answers = Engine(EngineConfig(layout=layout), mesh).generate((exact, halves), drawn, hosts=hosts)
    return [[list(one.tokens), [float(value).hex() for value in one.logprobs]] for one in answers]


def check_exact(checkpoint):
    """Every layout has the same 128 answers, to the last bit of their log-probabilities, in bfloat16."""
    want = body_exact(None, checkpoint, "1,1,1", 1, {"tensor": 1})
    assert len(want) == 4 * PROMPTS
    for mesh_shape, layout in [("1,1,2", {"tensor": 2}), ("1,2,2", {"tensor": 4}), ("2,2,1", "training")]:
        devices = math.prod(map(int, mesh_shape.split(",")))
        assert body_exact(None, checkpoint, mesh_shape, devices, layout) == want, layout
    for got in run_processes(body_exact, processes=2, timeout_s=300, args=(checkpoint, "1,2,2", 4, {"tensor": 4})):
        assert got == want


BEGINNING = (
    "--model.hidden_dim 64 --model.intermediate_dim 192 --optimizer.learning_rate 4e-3 "
    "--trainer.num_train_steps 120 --inference_eval.eval_every 15"
)
EXPERTS = "--model.type qwen3_moe --model.experts.num_experts 8 --model.experts.intermediate_dim 192"


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("model", "exact"),
    [
        (BEGINNING, False),
        pytest.param("", True, id="llama, exact", marks=pytest.mark.nightly),
        pytest.param(EXPERTS, False, id="experts", marks=pytest.mark.nightly),
    ],
)
def test_the_demo_learns_and_leaves_everything_it_promises(model, exact, tmp_path):
    run = run_command(
        ["lockstep", "train-lm", "--config_path", "config/demo.yaml", *model.split()]
        + ["--trainer.log_dir", str(tmp_path), "--trainer.run_id", "demo"],
        timeout_s=1800,
        cwd=ROOT,
        env=None if model == BEGINNING else OPTIMISED,
    )
    assert run.code == 0, run.output
    run_dir = tmp_path / "demo"

    rows = read_jsonl(run_dir / "samples.jsonl")
    steps = sorted({row["step"] for row in rows})
    assert steps[0] == 0
    assert len(steps) >= 8
    for step in steps:
        assert [row["prompt_id"] for row in rows if row["step"] == step] == list(range(PROMPTS))
    for row in rows:
        assert list(row) == [*COLUMNS, "exact_match"]
        assert row["num_tokens"] >= 1
        assert row["mean_logprob"] <= 0
        assert row["finish_reason"] in ("stop", "length")
    curve = {step: mean(row["exact_match"] for row in rows if row["step"] == step) for step in steps}
    print(curve)
    assert curve[steps[0]] < 0.1
    if model != BEGINNING:
        assert curve[steps[-1]] > 0.8
        assert all(row["finish_reason"] == "stop" for row in rows if row["step"] == steps[-1])
        assert not [row for row in rows if row["step"] == steps[-1] and row["health"]], (
            "a model that has learned is healthy"
        )

    metrics = read_jsonl(run_dir / "metrics.jsonl")
    logged = {record["step"]: record["inference_eval/exact_match"] for record in metrics if "train/loss" not in record}
    assert logged == curve
    losses = [record["train/loss"] for record in metrics if "train/loss" in record]
    assert len(losses) == steps[-1]
    assert mean(losses[-20:]) < (0.5 if model == BEGINNING else 0.1) * mean(losses[:20])

    (offline_run,) = run_dir.glob("wandb/offline-run-*")
    increments = wandb_run.tables(offline_run, "inference_eval/samples")
    assert [len(table["data"]) for table in increments] == [PROMPTS] * len(steps)
    columns = [*COLUMNS, "exact_match"]
    assert all(table["columns"] == columns for table in increments)
    assert [dict(zip(columns, cells, strict=True)) for table in increments for cells in table["data"]] == rows

    leader, other = run.logs
    assert leader.count("generated text") == len(steps)
    assert "generated text" not in other
    for name in ("samples.jsonl", "metrics.jsonl", "offline-run-"):
        assert name in leader[leader.rindex("done:") :], "the closing summary names what the run left"

    check_the_checkpoint(run_dir / "checkpoint", [row["generated_text"] for row in rows[-PROMPTS:]])
    if exact:
        check_exact(str(run_dir / "checkpoint"))
