"""The engine and a step of GRPO on the accelerator of this machine, beside what ``lockstep plan`` gives at best.

    python -m benchmarks.accelerator [--quick] [--json PATH]

``scripts/on_accelerator.sh`` runs it with the environment that it needs. Each section is a process of its own, one
after the other, for a device belongs to one process: decode and prefill of the shapes of Llama 3.2 1B and Llama 3.1 8B
in bfloat16 with random weights, steps of GRPO, the self-test of ``lockstep doctor``, the engine's tests. A section that
fails, or takes too long, is written down as such, and the others go on; the exit code is then 1.
"""

import argparse
import dataclasses
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from benchmarks.contestants import Contestant, one_device, side_by_side
from benchmarks.grpo.load import LOADS, save_tokenizer
from benchmarks.run_facts import ROOT
from benchmarks.shapes import VOCAB, Load
from benchmarks.workers import figures_in, report, write_json
from lockstep.engine import Engine, EngineConfig
from lockstep.models import DecoderWeights, LlamaConfig, layer_products, read_decoder, skeleton
from lockstep.models.families.family import ModelPreset
from lockstep.models.families.registry import PRESETS
from lockstep.placement.device import chip_of

WHOLE_S = 350.0
"""Seconds for all sections; what is left of six minutes is for the start and the results."""
QUICK_S = 600.0
"""Seconds for a section of ``--quick``, which takes some ten on an idle machine."""
TINY = ModelPreset(
    config=LlamaConfig(hidden_dim=64, intermediate_dim=176, num_layers=2, num_heads=4, num_kv_heads=2, max_seq_len=256),
    vocab_size=VOCAB,
)
SHAPES: Mapping[str, tuple[ModelPreset, Load]] = {
    "tiny": (TINY, Load(4, 32, 16)),
    **{name: (PRESETS[name], Load(64, 512, 128)) for name in ("llama-3.2-1b", "llama-3.1-8b")},
}
ENGINE_TESTS = ("tests/unit/engine/decoder", "tests/unit/engine/sampling", "tests/unit/engine/test_engine.py")
KEPT = "JAX_PLATFORMS XLA_FLAGS JAX_DEFAULT_MATMUL_PRECISION JAX_NUM_CPU_DEVICES LD_LIBRARY_PATH"
"""The variables by which the tests, too, run on the accelerator."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
    """A process that measures, and the most seconds that it may take."""

    arguments: Sequence[str]
    limit_s: float
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)


def sections(quick: bool, directory: Path) -> dict[str, Section]:
    """All sections by their names, those first without which the others say little."""
    worker = ("-m", "benchmarks.accelerator", "--worker")
    names = ("tiny",) if quick else ("llama-3.2-1b", "llama-3.1-8b")
    tests = ("tests/unit/engine/decoder/test_packing.py",) if quick else ENGINE_TESTS
    doctor = (
        "-c",
        "from lockstep.main.cli import main; main()",
        "doctor",
        "--self-test",
        "--reach_s",
        "1",
        "--self_test_s",
        "30",
    )
    doctor += ("--measure", "false") if quick else ()
    found = {
        **{name: Section(arguments=(*worker, name), limit_s=90) for name in names},
        "grpo": Section(arguments=(*worker, "quick" if quick else "full", "--grpo"), limit_s=60),
        "doctor": Section(arguments=(*doctor, "--json", str(directory / "doctor.json")), limit_s=60),
        "tests": Section(
            arguments=("-m", "pytest", "-q", "-p", "no:cacheprovider", *tests),
            limit_s=120,
            # Products of float32 are those of float32, to which the tests' tolerances belong.
            environment={"LOCKSTEP_TEST_KEEP": KEPT, "JAX_DEFAULT_MATMUL_PRECISION": "highest"},
        ),
    }
    return {name: dataclasses.replace(each, limit_s=QUICK_S) for name, each in found.items()} if quick else found


def main() -> int:
    """Run all sections, print their figures, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny model and few tests: whether all sections run")
    parser.add_argument("--json", type=Path, help="write all figures to this file; in a directory, under a new name")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--grpo", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        report(grpo_steps(arguments.worker) if arguments.grpo else generation(arguments.worker))
        return 0
    with tempfile.TemporaryDirectory() as directory:
        whole_s = QUICK_S if arguments.quick else WHOLE_S
        rows = measure(sections(arguments.quick, Path(directory)), Path(directory), whole_s)
    show(rows)
    if arguments.json:
        path = arguments.json / file_name(rows, arguments.quick) if arguments.json.is_dir() else arguments.json
        write_json(path, rows)
        print(f"results: {path}")
    return 1 if failures(rows) else 0


def measure(parts: Mapping[str, Section], directory: Path, whole_s: float) -> dict[str, Any]:
    """What each section reports, or the end of its output as ``error``; all together take at most ``whole_s``."""
    rows: dict[str, Any] = {"device": None}
    end = time.monotonic() + whole_s
    for name, section in parts.items():
        start = time.monotonic()
        limit = min(section.limit_s, end - start)
        row = run(section, limit) if limit > 0 else {"error": f"not begun: {whole_s:.0f} s were over"}
        if name == "doctor" and (directory / "doctor.json").is_file():
            row |= findings(json.loads((directory / "doctor.json").read_text(encoding="utf-8")))
        rows[name] = row | {"seconds": time.monotonic() - start}
        rows["device"] = rows["device"] or row.get("device")
        print(f"{name}: {json.dumps(rows[name])}", flush=True)
    return rows


def run(section: Section, limit_s: float) -> dict[str, Any]:
    """One section; the figures that it reports, and the counts of pytest."""
    command, environment = [sys.executable, *section.arguments], {**os.environ, **section.environment}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired as late:
        said = (late.stdout or b"").decode(errors="replace")
        return {"error": f"not over after {limit_s:.0f} s:\n{said[-1000:]}"} | counts(said)
    row: dict[str, Any] = {"exit_code": process.returncode} | counts(process.stdout)
    for figures in figures_in(process.stdout):
        row |= figures
    if process.returncode:
        row["error"] = f"{process.stdout[-2000:]}\n{process.stderr[-2000:]}"
    return row


def counts(output: str) -> dict[str, Any]:
    """The outcomes that pytest has counted, and the tests that failed."""
    summary = re.findall(r"(\d+) (passed|failed|skipped|errors?)\b", output.rpartition("\n=")[2] or output)
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    return {kind: int(number) for number, kind in summary} | ({"failures": failed} if failed else {})


def findings(doctor: Mapping[str, Any]) -> dict[str, Any]:
    """The warnings and what is to be fixed of a report of ``lockstep doctor``."""
    every = [finding for section in doctor["sections"].values() for finding in section]
    found: dict[str, Any] = {outcome: [] for outcome in ("warning", "fix")}
    for finding in every:
        if finding["outcome"] in found:
            found[finding["outcome"]].append(f"{finding['name']}: {finding['text']}")
    return {"ok": sum(finding["outcome"] == "ok" for finding in every)} | found


def failures(rows: Mapping[str, Any]) -> list[str]:
    """The sections that did not end well."""
    return [name for name, row in rows.items() if isinstance(row, dict) and "error" in row]


def file_name(rows: Mapping[str, Any], quick: bool) -> str:
    """The file of results: the day, and the name of the device."""
    device = re.sub(r"[^a-z0-9]+", "-", str(rows["device"]).lower()).strip("-")
    return f"{time.strftime('%Y-%m-%d')}-accelerator-{'quick-' if quick else ''}{device}.json"


class RandomModel:
    """The engine on one device, with random weights in bfloat16 that are made on it."""

    def __init__(self, preset: ModelPreset) -> None:
        self.engine = Engine(EngineConfig(dtype="bfloat16"), one_device())
        self.model = (preset.config, random_weights(preset))

    def generate(self, load: Load, new_tokens: int) -> float:
        """A call of the engine, compiling where it has to."""
        requests = load.requests(new_tokens)
        start = time.perf_counter()
        self.engine.generate(self.model, requests)
        return time.perf_counter() - start


def random_weights(preset: ModelPreset) -> DecoderWeights:
    """Normal numbers of standard deviation 0.02, and norms of one."""
    _, shapes = read_decoder(skeleton(preset.vocab_size, preset.config))

    def draw(path: Any, leaf: jax.ShapeDtypeStruct, number: int) -> jax.Array:
        if "norm" in path[-1].name:
            return jnp.ones(leaf.shape, jnp.bfloat16)
        return _normal(jax.random.key(number), leaf.shape)

    numbers = jax.tree.unflatten(jax.tree.structure(shapes), range(len(jax.tree.leaves(shapes))))
    weights: DecoderWeights = jax.tree_util.tree_map_with_path(draw, shapes, numbers)
    return weights


@functools.partial(jax.jit, static_argnums=1)
def _normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return 0.02 * jax.random.normal(key, shape, jnp.bfloat16)


def generation(name: str) -> dict[str, Any]:
    """Decode and prefill of a shape, and each at best.

    At best a decode step is as ``lockstep plan`` has it, prefill the products of layers' weights at the chip's peak.
    """
    preset, load = SHAPES[name]
    contestant = RandomModel(preset)
    start = time.perf_counter()
    contestant.generate(load, load.new_tokens)
    first_s = time.perf_counter() - start
    contestants: dict[str, Contestant] = {"ours": contestant}
    times = side_by_side(contestants, load, 3, warm=("ours",))["ours"]
    device = jax.devices()[0]
    chip, sizing = chip_of(device), contestant.engine.sizing
    assert sizing is not None
    decode_s = load.prompts / times.decode_rate(load)
    prefill_s = load.prompts * load.prompt_tokens / times.prefill_rate(load)
    products = layer_products(preset.config) * load.prompts * load.prompt_tokens
    prefill_floor_s = 2 * products / chip.flops
    best = sizing.estimate
    return {
        "device": device.device_kind,
        "chip": dataclasses.asdict(chip),
        "load": str(load),
        "first_call_s": first_s,
        "decode_step_s": decode_s,
        "decode_best_s": best.step_s,
        "decode_bandwidth_floor_s": best.memory_s,
        "decode_vs_best": best.step_s / decode_s,
        "decode_tokens_per_s": times.decode_rate(load),
        "prefill_s": prefill_s,
        "prefill_best_s": prefill_floor_s,
        "prefill_vs_best": prefill_floor_s / prefill_s,
        "attention": sizing.attention,
        "sequences_at_a_time": best.active,
    }


def grpo_steps(load_name: str) -> dict[str, Any]:
    """Three steps of ``train-grpo``, of which the last is compiled already."""
    from benchmarks.grpo.ours import PHASES, LastFigures, first_model, make
    from lockstep.hosts import start

    load, tracker, steps = LOADS[load_name], LastFigures(), 3
    rows: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as directory:
        save_tokenizer(load, Path(directory))
        trainer, rollouts = make(load, steps, directory, "ours", start(), tracker)
        began = time.perf_counter()

        def after_step(info: Any) -> None:
            nonlocal began
            jax.block_until_ready(info.model)
            step_s = time.perf_counter() - began
            trainer.tracker.flush(60)
            figures = {name: tracker.values[key] for name, key in PHASES.items()}
            rows.append({"step_s": step_s, "logprob_gap": tracker.values["train/logprob_gap"]} | figures)
            began = time.perf_counter()

        trainer.add_hook(after_step)
        trainer.train(first_model(load, trainer.mesh), rollouts)
        rollouts.close()
    return {
        "device": jax.devices()[0].device_kind,
        "load": str(load),
        "first_steps_s": [row["step_s"] for row in rows[:-1]],
    } | rows[-1]


def show(rows: Mapping[str, Any]) -> None:
    """The measured seconds beside the least ones."""
    table = Table(title=f"on {rows['device']}", title_justify="left")
    for column in ("section", "decode step", "at best", "share", "prefill", "at best", "share"):
        table.add_column(column, justify="right" if column != "section" else "left")
    for name, row in rows.items():
        if isinstance(row, dict) and "decode_step_s" in row:
            seconds = (
                f"{1e3 * row[key]:.3g} ms" for key in ("decode_step_s", "decode_best_s", "prefill_s", "prefill_best_s")
            )
            decode, decode_best, prefill, prefill_best = seconds
            shares = (f"{row[key]:.2f}" for key in ("decode_vs_best", "prefill_vs_best"))
            table.add_row(name, decode, decode_best, next(shares), prefill, prefill_best, next(shares))
    Console(width=120).print(table)
    for name in failures(rows):
        print(f"{name} failed: {rows[name]['error'][-500:]}")


if __name__ == "__main__":
    sys.exit(main())
