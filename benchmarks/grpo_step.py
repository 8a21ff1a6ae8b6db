"""A step of GRPO: lockstep's trainer, the same with Levanter's engine, and Tunix's learner with its rollout and ours.

    python -m benchmarks.grpo_step [--quick] [--json PATH] [--only ours --only tunix --only update] [--steps 6]

All train the same small Llama from the same float32 weights on four simulated devices (FSDP): the same questions,
answers per question, lengths, reward and optimizer, one update per rollout. Each has a process of its own, and they
take turns: one makes a step while the others wait. The first `WARM` steps compile and are reported apart; the rest are
medians. Then the update alone takes turns with itself: answers as long as GSM8K's in packed rows, and in a row each.
Last, lockstep's trainer waits for each program, which tells the share of its step in which devices wait for the host.
"""

import argparse
import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.grpo.load import LOADS, UPDATES, GrpoLoad, save_tokenizer
from benchmarks.grpo.turns import Process
from benchmarks.sizes import sized
from benchmarks.workers import write_json

ROOT = Path(__file__).resolve().parents[1]
CONTESTANTS = ("ours", "levanter", "tunix", "tunix_with_ours")
UPDATE, BUSY = "update", "busy"
UPDATE_ROWS = ("packed", "padded")
DEVICES = 4
WARM = 2
"""Levanter's engine compiles in its second call, too, and Tunix's train step in its second step."""
MAKE_TUNIX = ".venv/bin/python -m pip install -c constraints.txt -e '.[tunix]'"
MAKE_LEVANTER = ".venv/bin/python -m pip install -c constraints.txt -e '.[bench]'"
GOALS = {
    "rollout_vs_levanter": 5.0,
    "rollout_vs_tunix": 4.0,
    "step_vs_levanter": 1.0,
    "step_vs_tunix": 2.5,
    "tunix_rollout_with_ours": 3.0,
    "tunix_step_with_ours": 1.0,
    "update_tokens_vs_padded": 2.0,
    "busy_share": 0.97,
}
"""How many times as fast ours is: tokens per second of the rollout, and whole steps; Tunix's with our rollout; tokens
per second of the update in packed rows beside rows of one answer. The share of our step in which devices are busy."""
SAME_LOSS = 1e-5
"""How far apart the losses of packed rows and of rows of one answer may be, beside a thousandth of them."""
SAME_MODEL = 1e-3
"""How far apart the log-probabilities of two contestants' first models may be."""


def main() -> int:
    """Measure all, show the rows, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smaller model, fewer and shorter answers")
    parser.add_argument("--steps", type=int, default=6, help=f"of each, of which the first {WARM} are not counted")
    parser.add_argument("--only", action="append", choices=(*CONTESTANTS, UPDATE, BUSY), help="measure these alone")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    if arguments.steps <= WARM:
        parser.error(f"--steps is {arguments.steps}; the first {WARM} are not counted. Use at least {WARM + 1}.")
    began, name = time.monotonic(), "quick" if arguments.quick else "full"
    names = arguments.only or [*CONTESTANTS, UPDATE, BUSY]
    commands, missing = contestants([name for name in names if name in CONTESTANTS])
    update_load = sized("measured", "smallest")
    with tempfile.TemporaryDirectory() as directory:
        heard = run(commands, name, arguments.steps, Path(directory)) if commands else {}
        updates = run_updates(update_load, arguments.steps, Path(directory)) if UPDATE in names else {}
        busy = run_busy(name, arguments.steps, Path(directory)) if BUSY in names else []
    rows = figures(heard, missing, LOADS[name]) | update_figures(updates) | {"busy_share": busy_share(busy)}
    rows |= {"load": str(LOADS[name]), "measured_in_s": round(time.monotonic() - began)}
    if updates:
        rows["update_load"] = str(UPDATES[update_load])
    show(rows)
    if arguments.json:
        write_json(arguments.json, rows)
    return 0


def contestants(names: Sequence[str]) -> tuple[dict[str, list[str]], dict[str, str]]:
    """The command of each contestant that can run here; for each other one, what makes its environment."""
    ours = [sys.executable, "-m", "benchmarks.grpo.ours", "--engine"]
    commands = {
        "ours": [*ours, "ours"],
        "levanter": [*ours, "levanter"],
        "tunix": [sys.executable, "-m", "benchmarks.grpo.tunix", "--rollout", "vanilla"],
        "tunix_with_ours": [sys.executable, "-m", "benchmarks.grpo.tunix", "--rollout", "lockstep"],
    }
    missing = {}
    if importlib.util.find_spec("levanter") is None:
        missing["levanter"] = MAKE_LEVANTER
    if importlib.util.find_spec("tunix") is None:
        missing |= {"tunix": MAKE_TUNIX, "tunix_with_ours": MAKE_TUNIX}
    return (
        {name: commands[name] for name in names if name not in missing},
        {name: command for name, command in missing.items() if name in names},
    )


def run(commands: Mapping[str, Sequence[str]], load: str, steps: int, directory: Path) -> dict[str, list[Any]]:
    """What each contestant said before its first step and after each step, in turns."""
    save_tokenizer(LOADS[load], directory / "tokenizer")
    options = ["--load", load, "--steps", str(steps), "--tokenizer", str(directory / "tokenizer")]
    heard = take_turns({name: [*command, *options] for name, command in commands.items()}, steps, directory)
    check_models(heard)
    return heard


def run_updates(load: str, steps: int, directory: Path) -> dict[str, list[Any]]:
    """What the updates in packed rows and in rows of one answer said, in turns."""
    command = [sys.executable, "-m", "benchmarks.grpo.update", "--load", load, "--steps", str(steps), "--rows"]
    return take_turns({rows: [*command, rows] for rows in UPDATE_ROWS}, steps, directory)


def run_busy(load: str, steps: int, directory: Path) -> list[Any]:
    """The figures of each step of ours, which waits for each program."""
    save_tokenizer(LOADS[load], directory / "tokenizer")
    options = ["--load", load, "--steps", str(steps), "--tokenizer", str(directory / "tokenizer")]
    command = [sys.executable, "-m", "benchmarks.grpo.ours", "--engine", "ours", "--busy", *options]
    return take_turns({BUSY: command}, steps, directory)[BUSY][1:]


def busy_share(steps: Sequence[Any]) -> float | None:
    """The median share of a step in which devices run programs; the rest is work of the host."""
    return float(np.median([step["busy_s"] / step["step_s"] for step in steps[WARM:]])) if steps else None


def take_turns(commands: Mapping[str, Sequence[str]], steps: int, directory: Path) -> dict[str, list[Any]]:
    """Run processes that each make a step while the others wait; what each said before the first and after each."""
    environment = {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}",
        "JAX_ENABLE_COMPILATION_CACHE": sized("false", "true"),  # or the first step would not be the first
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }
    heard: dict[str, list[Any]] = {}
    with ExitStack() as stack:
        running = {}
        for name, command in commands.items():
            log = directory / f"{name}.log"
            running[name] = stack.enter_context(Process(name, command, environment, log))
            heard[name] = [running[name].ready()]  # one start after the other, too
        for step in range(steps):
            for name, process in running.items():
                heard[name].append(process.step())
                print(f"step {step + 1} of {steps}, {name}: {json.dumps(heard[name][-1])}", flush=True)
    return heard


def check_models(heard: Mapping[str, Sequence[Any]]) -> None:
    """All train the same model on the same number of devices, or the figures would compare nothing.

    Raises:
        ValueError: They do not.
    """
    facts = {name: said[0] for name, said in heard.items()}
    logprobs = [each["logprob"] for each in facts.values()]
    if max(logprobs) - min(logprobs) > SAME_MODEL or {each["devices"] for each in facts.values()} != {DEVICES}:
        raise ValueError(f"the contestants have different models or devices: {facts}")


def figures(heard: Mapping[str, Sequence[Any]], missing: Mapping[str, str], load: GrpoLoad) -> dict[str, Any]:
    """Medians of each contestant, and how many times as fast ours is.

    Raises:
        ValueError: A contestant generated another number of tokens.
    """
    rows: dict[str, Any] = {}
    for name, (_, *steps) in heard.items():
        if wrong := {each["tokens"] for each in steps} - {load.answers * load.new_tokens}:
            raise ValueError(f"{name} generated {wrong} tokens in a step, not {load.answers * load.new_tokens}")
        counted = steps[WARM:]
        found = {key: float(np.median([each[key] for each in counted])) for key in counted[0]}
        found["rollout_tokens_per_s"] = found.pop("tokens") / found["rollout_s"]
        del found["reward"]
        found["first_steps_s"] = [each["step_s"] for each in steps[:WARM]]
        found["steps_s"] = [each["step_s"] for each in counted]
        found["rewards"] = [each["reward"] for each in steps]
        rows[name] = found
    for rollout, step, one, other in (
        ("rollout_vs_levanter", "step_vs_levanter", "ours", "levanter"),
        ("rollout_vs_tunix", "step_vs_tunix", "ours", "tunix"),
        ("tunix_rollout_with_ours", "tunix_step_with_ours", "tunix_with_ours", "tunix"),
    ):
        both = one in rows and other in rows
        tokens_per_s = "rollout_tokens_per_s"
        rows[rollout] = rows[one][tokens_per_s] / rows[other][tokens_per_s] if both else None
        rows[step] = rows[other]["step_s"] / rows[one]["step_s"] if both else None
    return rows | {"not_run": dict(missing)}


def update_figures(heard: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Medians of the update in packed rows and in rows of one answer, and how many times as fast the first is.

    Raises:
        ValueError: They have not learned the same.
    """
    if not heard:
        return {"update_tokens_vs_padded": None}
    rows: dict[str, Any] = {}
    for name, (_, *steps) in heard.items():
        seconds = [each["update_s"] for each in steps[WARM:]]
        rows[f"update_{name}"] = {
            "update_s": float(np.median(seconds)),
            "tokens_per_s": steps[0]["tokens"] / float(np.median(seconds)),
            "updates_s": seconds,
            "rows": steps[0]["rows"],
            "losses": [each["loss"] for each in steps],
        }
    packed, padded = (rows[f"update_{name}"] for name in UPDATE_ROWS)
    if not np.allclose(packed["losses"], padded["losses"], rtol=1e-3, atol=SAME_LOSS):
        raise ValueError(f"packed rows have the losses {packed['losses']}, rows of one answer {padded['losses']}")
    return rows | {"update_tokens_vs_padded": packed["tokens_per_s"] / padded["tokens_per_s"]}


def show(rows: Mapping[str, Any]) -> None:
    """The contestants, then the goals."""
    table = Table(title="a step of GRPO, seconds (medians)", title_justify="left")
    for column in (
        "",
        "step",
        "rollout",
        "reward",
        "update",
        "rollout tokens/s",
        "first steps",
        "mean reward, first → last",
    ):
        table.add_column(column, justify="right" if column else "left")
    for name in (each for each in CONTESTANTS if each in rows):
        one = rows[name]
        seconds = (f"{one[key]:.3g}" for key in ("step_s", "rollout_s", "reward_s", "update_s"))
        first = ", ".join(f"{each:.1f}" for each in one["first_steps_s"])
        rewards = f"{one['rewards'][0]:.3f} → {one['rewards'][-1]:.3f}"
        table.add_row(name, *seconds, f"{one['rollout_tokens_per_s']:.0f}", first, rewards)
    Console(width=140).print(table)
    for name, command in rows["not_run"].items():
        print(f"not run: {name}; make its environment with: {command}")
    for name, goal in GOALS.items():
        if rows.get(name) is not None:
            met = "met" if rows[name] >= goal else "NOT MET"
            print(f"{name} {rows[name]:.3g} (goal {goal:g}: {met})")


if __name__ == "__main__":
    sys.exit(main())
