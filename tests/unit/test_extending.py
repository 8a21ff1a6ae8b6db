"""What docs/extending.md says of files to touch: a table that is checked, and a file that has one of each piece."""

import functools
import json
import operator
import re
from pathlib import Path

import pytest

from lockstep.config_fields import encode_config
from lockstep.hosts import Hosts, MemoryClient
from lockstep.main.arguments import parse_arguments
from lockstep.training import TrainGrpoConfig, TrainPreferenceConfig, train

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "lockstep"
PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
TABLE = dict(re.findall(r"^\| (?:an? )?([a-z -]+) \| (.*) \|$", PAGE, re.MULTILINE))
"""The files of each kind of piece."""

SHIPPED = {
    "sampling filter": "def top_n_sigma|NamedFilter",
    "tracker": "TensorboardTrackerConfig",
    "model family": "Olmo2Config",
    "attention kernel": "XlaAttention",
    "launcher backend": "class Slurm|import Slurm",
    "preference objective": "OrpoConfig",
    "learning-rate schedule": "_inv_sqrt",
    "data format": "_completions",
    "reward": "OverlongReward",
}
"""A piece of each kind that ships, by a name that whoever touches it must write."""

KEYS = {
    "preference objective": ("objective", {"type": "my_pieces:Hinge", "margin": 2.0}),
    "learning-rate schedule": ("optimizer.lr_schedule", "my_pieces:halving"),
    "data format": ("data.format", "my_pieces:FORMAT"),
    "tracker": ("trainer.tracker", {"type": "my_pieces:LinesConfig", "name": "lines.txt"}),
    "sampling filter": ("inference_eval.filters", ["my_pieces:within=0"]),
    "metric": ("inference_eval.metrics", ["my_pieces:in_words"]),
}
"""The key of each piece of examples/my_pieces.py."""


@pytest.mark.parametrize("kind", TABLE)
def test_a_piece_touches_the_files_of_its_row_alone(kind):
    """Beside the faces of packages, which only re-export; one of a user's own touches none."""
    assert set(TABLE) >= {*SHIPPED, *KEYS} and (TABLE[kind].startswith("none") or kind not in (*KEYS, "reward"))
    listed = re.findall(r"`([\w./]+)`", TABLE[kind])
    assert all((PACKAGE / path).exists() for path in listed)
    if kind in SHIPPED:
        sources = [path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"]
        named = [path for path in sources if re.search(rf"\b({SHIPPED[kind]})\b", path.read_text(encoding="utf-8"))]
        touched = [path.relative_to(PACKAGE).as_posix() for path in named]
        assert touched and not [path for path in touched if not path.startswith(tuple(listed))]


def parsed(cls, file, pieces, *given):
    """A configuration with pieces of examples/my_pieces.py, which it names when it is written."""
    words = [word for key, value in pieces for word in (f"--{key}", json.dumps(value))]
    config = parse_arguments(cls, ["--config_path", str(ROOT / "config" / file), *words, *given])
    written = encode_config(config)
    for key, value in pieces:
        assert functools.reduce(operator.getitem, key.split("."), written) == value
    return config


@pytest.mark.slow
def test_a_run_uses_all_of_them(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    reward = {"type": "my_pieces:Brevity", "weight": 0.5, "most": 20, "default": 0.0, "on_failure": "default"}
    parsed(
        TrainGrpoConfig, "grpo_demo.yaml", [("rewards", [reward | {"name": None}]), ("data.format", "my_pieces:asked")]
    )
    records = [{"question": f"{n}?", "good": "yes", "bad": str(n)} for n in range(10, 74)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n")
    given = f"--data.train_urls [{tmp_path}/pairs.jsonl] --trainer.log_dir {tmp_path} --trainer.run_id run "
    given += "--trainer.num_train_steps 4 --optimizer.warmup 0 --trainer.per_device_parallelism -1 "
    given += "--inference_eval.n_generations 4 --inference_eval.temperature 5 --inference_eval.eval_every 2"
    config = parsed(TrainPreferenceConfig, "dpo_tiny.yaml", KEYS.values(), *given.split())
    assert train(config, Hosts(MemoryClient.hub(1)[0])) == 0
    lines = map(json.loads, (tmp_path / "run" / "lines.txt").read_text().splitlines())
    steps = [line for line in lines if "train/loss" in line]
    rates = [config.optimizer.learning_rate * max(0.5**n, config.optimizer.min_lr_ratio) for n in range(4)]
    assert [line["train/learning_rate"] for line in steps] == pytest.approx(rates)
    assert steps[0]["train/loss"] > 1 and steps[0]["train/loss"] >= 2 - steps[0]["train/rewards/margins"] - 1e-3
    rows = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    answers = {}
    for row in rows:
        answers.setdefault((row["step"], row["prompt_id"]), set()).add(row["generated_text"])
        assert row["in_words"] == float(not any(map(str.isdigit, row["generated_text"])))
    assert len(rows) == 3 * 2 * 4 and all(len(each) == 1 for each in answers.values()), "the filter leaves one token"
