"""Draws curves of what two tests have measured: resume_kills.png and simpo_learns.png.

In an environment with matplotlib (``pip install -c constraints.txt 'jax-lockstep[figures]'``)::

    pytest -m nightly tests/multiprocess/test_resume_kills.py --basetemp build/kills
    python docs/images/make_curves.py kills build/kills/*/starts.json
    pytest -m slow tests/multiprocess/test_train_simpo.py -k learns --basetemp build/simpo
    python docs/images/make_curves.py simpo build/simpo/*/run
"""

import argparse
import json
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt

HERE = Path(__file__).parent
SIZE, DPI = (7.6, 3.4), 100


def killed_runs(path: Path) -> Any:
    """The loss of a run without a break, and on top of it that of each start of the run that was killed."""
    record = json.loads(path.read_text(encoding="utf-8"))
    figure, axes = plt.subplots(figsize=SIZE, dpi=DPI, layout="constrained")
    whole = record["whole"]
    axes.plot(range(1, len(whole) + 1), whole, color="0.8", linewidth=7, label="never interrupted")
    for number, start in enumerate(record["starts"]):
        steps = range(start["first"], start["first"] + len(start["losses"]))
        axes.plot(steps, start["losses"], color=f"C{number}", linewidth=1.4, label=f"start {number + 1}")
        if "killed" in start:
            who = start["killed"]
            name = "both processes" if who == "all" else f"process {who}"
            axes.plot(steps[-1], start["losses"][-1], "x", color=f"C{number}", markersize=9, markeredgewidth=2)
            axes.annotate(f"{name} killed", (steps[-1], start["losses"][-1]), xytext=(6, 14), rotation=60, fontsize=8,
                          textcoords="offset points", color=f"C{number}")  # fmt: skip
    axes.set(xlabel="step", ylabel="train/loss", title="train-lm, 2 processes × 2 devices, killed five times (SIGKILL)")
    axes.margins(y=0.12)
    axes.legend(fontsize=8)
    return figure


def simpo(runs: list[Path]) -> Any:
    """Accuracy and margin on held-out pairs by step, a curve per run, in the order of the seeds."""
    figure, (left, right) = plt.subplots(1, 2, figsize=SIZE, dpi=DPI, layout="constrained")
    left.axhline(0.5, color="0.6", linestyle="--", linewidth=1, label="chance")
    right.axhline(0.0, color="0.6", linestyle="--", linewidth=1)
    for number, run in enumerate(runs):
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        found = [line for line in lines if "eval/rewards/accuracies" in line]
        steps = [line["step"] for line in found]
        for axes, name in ((left, "rewards/accuracies"), (right, "rewards/margins")):
            axes.plot(steps, [line[f"eval/{name}"] for line in found], marker=".", label=f"seed {number}")
    left.set(xlabel="step", title="eval/rewards/accuracies", ylim=(0, 1.05))
    right.set(xlabel="step", title="eval/rewards/margins")
    left.legend(fontsize=8, loc="lower right")
    figure.suptitle("train-simpo: 200 held-out pairs, three seeds", fontsize=11)
    return figure


def main() -> None:
    """Write a picture beside this script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["kills", "simpo"])
    parser.add_argument("paths", type=Path, nargs="+", help="starts.json of the test, or run directories")
    options = parser.parse_args()
    if options.what == "kills":
        name, figure = "resume_kills.png", killed_runs(options.paths[0])
    else:
        name, figure = "simpo_learns.png", simpo(options.paths)
    figure.savefig(HERE / name, metadata={"Software": None})
    print(f"wrote {HERE / name}")


if __name__ == "__main__":
    main()
