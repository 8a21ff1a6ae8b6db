"""Walks of strangers: in an empty directory, a page's files are copied and its commands typed, and the end is reached.

What a reader brings (a checkpoint, questions, a model class, a broken script) is small; all else is read from the page.
tests/unit/test_first_pod.py and test_examples.py walk to a pod with Levanter.
"""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lockstep.models import as_trainable, save_hf
from lockstep.placement import make_mesh
from lockstep.report import read_jsonl
from tests import snippets, tiny
from tests.isolation import COMPILED_FAST

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


class Walk:
    """A reader with an empty directory and an installed package."""

    def __init__(self, directory):
        self.directory = directory

    def copy(self, name, file):
        """Save a block of a page as a file."""
        return self.write(file, snippets.named(name).text)

    def write(self, file, text):
        path = self.directory / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    def type(self, line, code=0):
        """Type a line of a page; what it prints."""
        environment = {
            **{
                name: value for name, value in os.environ.items() if not name.startswith(("LOCKSTEP", "WANDB", "JAX_C"))
            },
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(snippets.ROOT / "src"),
            "WANDB_MODE": "offline",
            "XLA_FLAGS": COMPILED_FAST,
            "HOME": str(self.directory),
        }
        done = subprocess.run(
            ["bash", "-c", line], cwd=self.directory, env=environment, capture_output=True, text=True, timeout=300,
            check=False,
        )  # fmt: skip
        assert done.returncode == code, f"{line}\nended with {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def checkpoint(self, place):
        """A small one of the reader's own, with a chat template, where a configuration looks for it."""
        config = dataclasses.replace(tiny.CONFIG, max_seq_len=1024)
        weights = tiny.placed_weights(make_mesh("auto"), vocab=tiny.vocab_size())
        save_hf(as_trainable(config, weights), self.directory / place, tokenizer=tiny.tokenizer())


@pytest.fixture
def walk(tmp_path):
    return Walk(tmp_path)


@pytest.mark.nightly  # in make slow: lockstep sample in test_sample.py
def test_with_a_checkpoint_and_prompts(walk):
    page = "docs/sampler.md"
    config = yaml.safe_load(walk.copy(f"{page}:yaml:0", "my-samples.yaml").read_text())
    walk.checkpoint(config["hf_checkpoint"])
    *asked, sample = snippets.commands(snippets.named(f"{page}:sh:1"))
    for line in asked:
        walk.type(line)
    questions = read_jsonl(walk.directory / "questions.jsonl")
    walk.type(sample)
    rows_file = walk.directory / "runs" / config["trainer"]["run_id"] / "samples" / "samples.jsonl"
    rows, written = read_jsonl(rows_file), rows_file.read_bytes()
    assert len(rows) == len(questions) * config["n_rounds"] * config["n_generations"]
    for row in rows:
        asked = questions[row["prompt_id"]]
        assert asked["question"] in row["prompt"] and row["fields"] == {"id": asked["id"]}
        assert all(row[metric] is not None for metric in config["metrics"])
    walk.type(sample)
    assert rows_file.read_bytes() == written, "the same command again goes on"


@pytest.mark.nightly  # in make slow: the command in test_train_grpo.py
def test_with_data_and_a_reward_of_ones_own(walk):
    page = "docs/grpo.md"
    walk.copy(f"{page}:python:0", "my-runs/my_rewards.py")
    config = walk.copy(f"{page}:yaml:1", "my-runs/grpo.yaml").read_text()
    record = json.loads(re.search(r"# (\{.*\})$", config, re.MULTILINE)[1])
    records = [record | {"question": f"{record['question']} {n}"} for n in range(8)]
    config = yaml.safe_load(config)
    walk.write(config["data"]["train_urls"][0], "".join(json.dumps(each) + "\n" for each in records))
    walk.checkpoint(config["initialize_from_hf"])
    (line,) = snippets.commands(snippets.named(f"{page}:sh:1"))
    assert " -- lockstep train-grpo --config_path my-runs/grpo.yaml" in line
    walk.type(line)
    (metrics,) = walk.directory.glob("runs/*/metrics.jsonl")
    rewards = [row["reward/mean"] for row in read_jsonl(metrics) if "reward/mean" in row]
    assert len(rewards) == config["trainer"]["num_train_steps"]
    assert not any(row.get("reward/judge/failed") for row in read_jsonl(metrics))


MODEL = '''
from types import SimpleNamespace

import equinox as eqx
import jax
import jax.numpy as jnp
import lockstep
from transformers import AutoTokenizer

HEADS, SIZE, WIDTH, WIDE, IDS = 4, 16, 64, 96, 4096


class Cell(eqx.Module):
    """A layer; queries, keys and values are rows of one matrix, gate and up of another."""

    pre: jax.Array
    mix_in: jax.Array
    mix_out: jax.Array
    mid: jax.Array
    fan: jax.Array
    fold: jax.Array


class Tower(eqx.Module):
    words: jax.Array
    cells: list[Cell]
    last: jax.Array
    guess: jax.Array


def make(key):
    keys = iter(jax.random.split(key, 32))
    normal = lambda *shape: 0.2 * jax.random.normal(next(keys), shape)
    cells = [
        Cell(
            1 + normal(WIDTH), normal(3 * HEADS * SIZE, WIDTH), normal(WIDTH, HEADS * SIZE),
            1 + normal(WIDTH), normal(2 * WIDE, WIDTH), normal(WIDTH, WIDE),
        )
        for _ in range(2)
    ]
    return Tower(normal(IDS, WIDTH), cells, 1 + normal(WIDTH), normal(IDS, WIDTH))


def norm(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5) * scale


def turned(x):
    angles = jnp.arange(x.shape[1])[:, None, None] * 10000.0 ** (-jnp.arange(0, SIZE, 2) / SIZE)
    low, high = jnp.split(x, 2, axis=-1)
    return jnp.concatenate(
        [low * jnp.cos(angles) - high * jnp.sin(angles), high * jnp.cos(angles) + low * jnp.sin(angles)], axis=-1
    )


def forward(tower, ids):
    x = tower.words[ids]
    seen = jnp.tril(jnp.ones((ids.shape[1],) * 2, bool))
    for cell in tower.cells:
        q, k, v = jnp.moveaxis((norm(x, cell.pre) @ cell.mix_in.T).reshape(*ids.shape, 3, HEADS, SIZE), 2, 0)
        scores = jnp.einsum("bthd,bshd->bhts", turned(q), turned(k)) * SIZE**-0.5
        mixed = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(jnp.where(seen, scores, -jnp.inf)), v)
        x = x + mixed.reshape(*ids.shape, HEADS * SIZE) @ cell.mix_out.T
        gate, up = jnp.split(norm(x, cell.mid) @ cell.fan.T, 2, axis=-1)
        x = x + (jax.nn.silu(gate) * up) @ cell.fold.T
    return norm(x, tower.last) @ tower.guess.T


MyModel = Tower
CONFIG = lockstep.models.LlamaConfig(
    max_seq_len=128, hidden_dim=WIDTH, intermediate_dim=WIDE, num_layers=2, num_heads=HEADS, num_kv_heads=HEADS
)
PARTS = "(part heads head) embed -> embed heads head"
NAMES = {
    "embed": "words",
    "final_norm": "last",
    "lm_head": ("guess", "vocab embed -> embed vocab"),
    "attn_norm": "cells.{}.pre",
    "q": ("cells.{}.mix_in", PARTS, {"part": (0, 3), "head": SIZE}),
    "k": ("cells.{}.mix_in", PARTS, {"part": (1, 3), "head": SIZE}),
    "v": ("cells.{}.mix_in", PARTS, {"part": (2, 3), "head": SIZE}),
    "o": ("cells.{}.mix_out", "embed (heads head) -> heads head embed", {"head": SIZE}),
    "mlp_norm": "cells.{}.mid",
    "gate": ("cells.{}.fan", "(two mlp) embed -> embed mlp", {"two": (0, 2)}),
    "up": ("cells.{}.fan", "(two mlp) embed -> embed mlp", {"two": (1, 2)}),
    "down": ("cells.{}.fold", "embed mlp -> mlp embed"),
}
'''
"""A model of a reader's own, and its row for each weight, as docs/your-trainer.md has them written."""


@pytest.mark.nightly  # in make test: test_own_models.py
def test_with_an_equinox_model_of_odd_names(walk):
    page = "docs/your-trainer.md"
    names, reader = snippets.named(f"{page}:python:2").text.split("\n\n\n")
    assert names.startswith("NAMES = {") and "def read(model):" in reader
    model = MODEL + "\n\n" + reader
    (check,) = [b.text for b in snippets.BLOCKS if b.page == page and b.text.startswith("lockstep.models.check_reader")]
    walk.write(
        "test_reader.py",
        model
        + "model = params = make(jax.random.key(0))\n"
        + check.replace("lockstep.", "found = lockstep.", 1)
        + "print(found)\n",
    )
    assert "errors" in walk.type("python test_reader.py")
    wrong = model.replace('"part": (1, 3)', '"part": (2, 3)').replace(
        '"v": ("cells.{}.mix_in", PARTS, {"part": (2, 3)', '"v": ("cells.{}.mix_in", PARTS, {"part": (1, 3)'
    )
    walk.write("test_wrong.py", wrong + "model = params = make(jax.random.key(0))\n" + check)
    assert "ReaderMismatchError" in walk.type("python test_wrong.py", code=1)
    loop = f"""
lockstep.start()
from jax.sharding import AxisType, NamedSharding, PartitionSpec
tokenizer = AutoTokenizer.from_pretrained({str(snippets.ROOT / "data/demo/tokenizer")!r})
mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
model = jax.jit(make, out_shardings=NamedSharding(mesh, PartitionSpec()))(jax.random.key(0))
PROMPTS, eval_every, output_dir, steps = ["What is 12 plus 7?"], 2, "out", 4
opt_state, batches = None, iter(range(10))
train_step = jax.jit(lambda model, opt_state, batch: (jax.tree.map(lambda x: 0.9 * x, model), opt_state, 0.0))
"""
    walk.write("loop.py", model + loop + snippets.named("README.md:python:0").text)
    (line,) = snippets.commands(snippets.named("docs/quickstart.md:sh:2"))
    printed = walk.type(line.removeprefix(".venv/bin/"))
    assert "skipped" not in printed and "warning" not in printed.lower(), printed
    rows = read_jsonl(walk.directory / "out" / "samples.jsonl")
    assert [row["step"] for row in rows] == [2, 4], printed


BROKEN = """
import argparse

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import lockstep

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int)
steps = parser.parse_args().steps
lockstep.start()
mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
step = jax.jit(lambda w: 0.9 * w, out_shardings=NamedSharding(mesh, PartitionSpec()))
w = step(jnp.arange(8.0))
for number in range(steps):
    w = step(w)
    {log}
"""


def test_with_a_broken_pod(walk):
    (check,) = snippets.commands(snippets.named("docs/check.md:sh:0"))
    (scope,) = re.findall(
        r"`(with lockstep\.hosts\.leader_only\(\):)`", (snippets.ROOT / "docs/troubleshooting.md").read_text()
    )
    alone = 'if jax.process_index() == 0:\n        print("norm", float(jnp.linalg.norm(w)))'
    script = walk.write("train.py", BROKEN.format(log=alone))
    found = walk.type(check, code=1)
    number = next(n for n, line in enumerate(script.read_text().splitlines(), 1) if "norm" in line)
    assert "one_process" in found and f"train.py:{number}" in found
    walk.write("train.py", BROKEN.format(log=f"{scope}\n        " + alone.replace("\n", "\n    ")))
    assert "LaunchMismatchError" in walk.type("python train.py --steps 5", code=1)
    mended = f"norm = np.asarray(jnp.linalg.norm(w))\n    {scope}\n        " + alone.partition("\n")[0]
    mended += '\n            print("norm", norm)'
    walk.write("train.py", "import numpy as np\n" + BROKEN.format(log=mended))
    assert "✓" in walk.type(check)
    doctor = snippets.commands(snippets.named("docs/doctor.md:sh:0"))[0]
    assert re.search(r"^ok +versions", walk.type(doctor), re.MULTILINE)
