"""What docs/extending.md says of files to touch: a table that is checked, and a file that has one of each piece."""

import json
import re
from pathlib import Path

import draccus
import pytest

from lockstep.hosts import Hosts, MemoryClient
from lockstep.main.arguments import parse_arguments
from lockstep.training import TrainGrpoConfig, TrainPreferenceConfig, train

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "lockstep"
TABLE = dict(
    re.findall(r"^\| (?:an? )?([a-z -]+) \| (.*) \|$", (ROOT / "docs" / "extending.md").read_text(), re.MULTILINE)
)
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


@pytest.fixture(autouse=True)
def my_pieces(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")


def arguments(pieces=KEYS):
    given = [text for key, value in pieces.values() for text in (f"--{key}", json.dumps(value))]
    return ["--config_path", str(ROOT / "config" / "dpo_tiny.yaml"), *given]


def test_every_file_of_the_table_is_there():
    assert set(TABLE) >= {*SHIPPED, *KEYS}
    paths = [path for files in TABLE.values() for path in re.findall(r"`([\w./]+)`", files)]
    assert len(paths) > 10 and not [path for path in paths if not (PACKAGE / path).exists()]


@pytest.mark.parametrize("kind", SHIPPED)
def test_what_ships_touches_the_files_of_its_row_alone(kind):
    """Beside the faces of packages, which only re-export."""
    named = re.compile(rf"\b({SHIPPED[kind]})\b")
    touched = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if path.name != "__init__.py" and named.search(path.read_text(encoding="utf-8"))
    }
    listed = re.findall(r"`([\w./]+)`", TABLE[kind])
    assert touched, f"nothing has the name {SHIPPED[kind]}"
    assert not [path for path in touched if not any(path.startswith(one) for one in listed)]


def test_a_piece_of_a_users_own_touches_no_file():
    assert all(TABLE[kind].startswith("none") for kind in (*KEYS, "reward"))


def test_a_configuration_names_each_and_says_so_when_it_is_written():
    config = parse_arguments(TrainPreferenceConfig, arguments())
    written = draccus.encode(config)
    for key, value in KEYS.values():
        inner = written
        for part in key.split("."):
            inner = inner[part]
        assert inner == value
    rewards = [{"type": "my_pieces:Brevity", "most": 20, "weight": 0.5}]
    grpo = parse_arguments(
        TrainGrpoConfig,
        ["--config_path", str(ROOT / "config" / "grpo_demo.yaml"), "--rewards", json.dumps(rewards)]
        + ["--data.format", "my_pieces:asked"],
    )
    assert draccus.encode(grpo)["data"]["format"] == "my_pieces:asked"
    assert grpo.rewards[0].label == "Brevity" and grpo.rewards[0].most == 20


@pytest.mark.slow
def test_a_run_uses_all_of_them(tmp_path):
    records = [{"question": f"{n}?", "good": "yes", "bad": str(n)} for n in range(10, 74)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n")
    given = ["--data.train_urls", f"[{tmp_path}/pairs.jsonl]", "--trainer.log_dir", str(tmp_path)]
    given += ["--trainer.run_id", "run", "--trainer.num_train_steps", "4", "--optimizer.warmup", "0"]
    given += ["--inference_eval.n_generations", "4", "--inference_eval.temperature", "5", "--inference_eval.eval_every"]
    given += ["2", "--trainer.per_device_parallelism", "-1"]
    config = parse_arguments(TrainPreferenceConfig, [*arguments(), *given])
    assert train(config, Hosts(MemoryClient.hub(1)[0])) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "lines.txt").read_text().splitlines()]
    steps = [line for line in lines if "train/loss" in line]
    peak = config.optimizer.learning_rate
    rates = [max(peak * 0.5**n, peak * config.optimizer.min_lr_ratio) for n in range(4)]
    assert [line["train/learning_rate"] for line in steps] == pytest.approx(rates)
    first = steps[0]
    assert first["train/loss"] > 1 and first["train/loss"] >= 2 - first["train/rewards/margins"] - 1e-3
    rows = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    answers = {}
    for row in rows:
        answers.setdefault((row["step"], row["prompt_id"]), set()).add(row["generated_text"])
        assert row["in_words"] == float(not any(map(str.isdigit, row["generated_text"])))
    assert len(rows) == 3 * 2 * 4 and all(len(each) == 1 for each in answers.values()), "the filter leaves one token"
