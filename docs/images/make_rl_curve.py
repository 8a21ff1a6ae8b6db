"""Draws rl-curve.png from runs of ``make rl-demo``: the reward of the sampled answers, and the held-out questions.

Run it in the repository's environment with the extra ``figures``, after runs with several seeds::

    .venv/bin/python docs/images/make_rl_curve.py runs/rl-demo runs/rl-demo-1 runs/rl-demo-2
"""

import argparse
import io
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from lockstep.report import read_jsonl

REWARD = "reward/mean"
HELD_OUT = "inference_eval/pass@1/exact_match"
WINDOW = 5
"""Steps over which the reward is averaged, the step itself being the last of them."""
COLOURS = ("#1b6ca8", "#c8553d", "#588157", "#8e6c8a")
OUTPUT = Path(__file__).with_name("rl-curve.png")


def values(run: Path, name: str) -> tuple[list[int], list[float]]:
    """Steps and values of a metric."""
    records = [record for record in read_jsonl(run / "metrics.jsonl") if name in record]
    return [record["step"] for record in records], [record[name] for record in records]


def draw(runs: list[Path]) -> None:
    """Write the picture beside this script."""
    figure = Figure(figsize=(6.4, 3.4), dpi=100, layout="constrained")
    axes = figure.subplots()
    for number, (run, colour) in enumerate(zip(runs, COLOURS, strict=False)):
        steps, rewards = values(run, REWARD)
        means = [np.mean(rewards[max(0, place + 1 - WINDOW) : place + 1]) for place in range(len(rewards))]
        axes.plot(steps, rewards, color=colour, linewidth=0.6, alpha=0.35)
        axes.plot(steps, means, color=colour, linewidth=1.6, label=f"reward, seed {number}")
        axes.plot(*values(run, HELD_OUT), "D", color=colour, markersize=5, markeredgecolor="white")
    axes.plot([], [], "D", color="#555555", markersize=5, label="held-out sums, pass@1")
    axes.set(xlabel="optimizer steps", ylabel="share of right answers", ylim=(0, 1))
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", frameon=False, fontsize=8)
    drawn = io.BytesIO()
    figure.savefig(drawn)
    Image.open(drawn).convert("RGB").quantize(48).save(OUTPUT, optimize=True)  # a third of the bytes


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="run directories, one per seed, at most four")
    draw(parser.parse_args().runs)
    print(f"wrote {OUTPUT}")


if __name__ == "__main__":
    main()
