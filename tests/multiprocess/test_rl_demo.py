"""The reinforcement demo as `make rl-demo` runs it: a model that was taught a little learns sums from rewards alone."""

import re
import shlex
from pathlib import Path

import pytest

from lockstep.report import read_jsonl
from tests.multiprocess.harness import run_command
from tests.multiprocess.launcher import OPTIMISED
from tests.snippets import lacking

pytestmark = [pytest.mark.multiprocess, pytest.mark.nightly]

ROOT = Path(__file__).parents[2]
TEN_MINUTES = 600.0
START, END = 5, 20
"""Steps whose rewards are averaged at the start, while the learning rate warms up, and at the end."""


def commands():
    """The commands of `make rl-demo` with their arguments, without those that a user adds."""
    (recipe,) = re.findall(r"^rl-demo:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    lines = recipe.replace("\\\n", " ").replace("$(ARGS)", "").splitlines()
    found = [shlex.split(line.split(" -- ")[1]) for line in lines if " -- " in line]
    assert [words[:2] for words in found] == [["lockstep", "train-lm"], ["lockstep", "train-grpo"]]
    return found


def run(command, log_dir, *more):
    ended = run_command(
        [*command, "--trainer.log_dir", str(log_dir), *more], timeout_s=TEN_MINUTES, cwd=ROOT, env=OPTIMISED
    )
    assert ended.code == 0, ended.output
    return ended


def mean(values):
    return sum(values) / len(values)


@pytest.fixture(scope="module")
def taught(tmp_path_factory):
    """The checkpoint of the model that `make rl-demo` teaches first."""
    directory = tmp_path_factory.mktemp("taught")
    run(commands()[0], directory)
    return directory / "rl-demo-sft" / "checkpoint"


@pytest.mark.parametrize(
    ("seed", "steps"),
    [pytest.param(0, 80, id="first-steps"), *(pytest.param(seed, None, id=f"seed-{seed}") for seed in (0, 1, 2))],
)
def test_the_reward_rises_by_a_fifth_in_less_than_ten_minutes(tmp_path, taught, seed, steps):
    """With the learning rate constant, the first steps of a run are those of a shorter one."""
    more = ["--initialize_from_hf", str(taught), "--trainer.seed", str(seed)]
    ended = run(commands()[1], tmp_path, *more, *(["--trainer.num_train_steps", str(steps)] if steps else []))
    records = read_jsonl(tmp_path / "rl-demo" / "metrics.jsonl")

    def logged(name):
        return [record[name] for record in records if name in record]

    rewards, held_out = logged("reward/mean"), logged("inference_eval/pass@1/exact_match")
    start, end = mean(rewards[:START]), mean(rewards[-END:])
    print(f"seed {seed}: reward {start:.3f} -> {end:.3f} in {len(rewards)} steps, held-out sums {held_out}")
    assert 0.2 <= start <= 0.6, "what is taught first answers a part of the sums"
    assert end >= start + 0.2
    assert held_out[-1] >= held_out[0] - 0.15, "other sums are not forgotten for those that are learned"
    gaps = logged("train/logprob_gap")
    assert len(gaps) == len(rewards) and max(gaps) < 1e-5, "engine and trainer give the same probabilities"
    assert "(last 10: " in ended.logs[0], "the progress display shows the trend"
    if steps is None:
        assert lacking("docs/grpo.md:text:0", ended.logs[0]) is None, ended.logs[0]
