"""Published steps beside what ``lockstep plan`` gives for the same model, slice, batch and rematerialisation.

    JAX_PLATFORMS=cpu .venv/bin/python -m benchmarks.published --json FILE [--compile NAME ...]

No TPU is needed. The least seconds of a train step are those by sizes alone, or of the compiled program for the rows
that ``--compile`` names (minutes each). Recipes that keep or offload more than layers' inputs compute less again than
our policies do: theirs is the nearest. ``docs/plan.md`` has the table.
"""

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.tpu_train_step import Case, workload_of
from benchmarks.workers import write_json
from lockstep.engine import EngineConfig
from lockstep.models.families.registry import PRESETS
from lockstep.placement.device import chip_of
from lockstep.plan import StepTime, least_time, make_plan
from lockstep.plan.planner import predict_sampling
from lockstep.plan.step_time import train_time
from lockstep.plan.workload import SamplingWorkload, Workload
from lockstep.types import Request, SamplingParams
from lockstep.xla import CompileCache, default_directory, topology

HALF = 0.5
"""The share of a chip's peak from which on a row must hold."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Train:
    """A train step that somebody measured.

    Args:
        case: The model, the slice and the batch.
        published_s: The seconds of a step.
    """

    case: Case
    published_s: float

    @property
    def name(self) -> str:
        return f"{self.case.model}, {self.case.slice_name}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decode:
    """A decode step that somebody measured, with prompts of 1,024 tokens and as many new ones.

    Args:
        model: The name of the model's preset.
        slice_name: The name of the slice, on which one copy of the weights is split over all devices.
        sequences: The number of sequences that decode at a time.
        published_s: The seconds of a step.
    """

    model: str
    slice_name: str
    sequences: int
    published_s: float

    @property
    def name(self) -> str:
        return f"{self.model}, {self.slice_name}, decode {self.sequences}"


def _train(model: str, slice_name: str, devices: int, at_a_time: int, length: int, published_s: float,
           **options: Any) -> Train:  # fmt: skip
    case = Case(
        model=model, slice_name=slice_name, sequences=devices * at_a_time, length=length, at_a_time=at_a_time, **options
    )
    return Train(case=case, published_s=published_s)


# https://github.com/AI-Hypercomputer/tpu-recipes at c8cfe2f, `training/`: v5p, ironwood (two devices a chip), trillium.
TRAIN = (
    _train("llama-3.1-405b", "v5p-1024", 512, 2, 8192, 131.474),
    _train("llama-3.1-405b", "tpu7x-512", 512, 3, 8192, 98.34, remat="offload"),
    _train("llama-3.1-70b", "tpu7x-128", 128, 2, 8192, 12.20),
    _train("llama-3.1-70b", "v6e-128", 128, 4, 8192, 34.786, remat="offload"),
    _train("llama-3.1-70b", "v6e-32", 32, 2, 8192, 17.790, remat="offload", mp="p=bfloat16,c=bfloat16"),
    _train("mistral-7b-v0.3", "v6e-8", 8, 6, 8192, 6.320, remat="offload"),
    _train("llama-3.1-8b", "v6e-16", 16, 3, 8192, 3.393, remat="offload"),
    _train("llama-3.1-8b", "v6e-256", 256, 4, 8192, 4.546, remat="offload"),
    _train("llama-3.1-8b", "v6e-8", 8, 3, 8192, 3.443, remat="offload"),
    _train("gemma-3-12b", "v6e-256", 256, 1, 32768, 7.318),
)
# vLLM-TPU 0.12 (the first two) and sglang-jax.
DECODE = (
    Decode(model="llama-3.3-70b", slice_name="v6e-8", sequences=64, published_s=0.02535),
    Decode(model="llama-3.3-70b", slice_name="v6e-8", sequences=128, published_s=0.03512),
    Decode(model="qwen3-8b", slice_name="v6e-4", sequences=64, published_s=0.01111),
    Decode(model="qwen3-32b", slice_name="v6e-4", sequences=64, published_s=0.02948),
    Decode(model="qwen3-8b", slice_name="v6e-4", sequences=256, published_s=0.03000),
)


def least_step(row: Train) -> StepTime:
    """The least time of the step by sizes alone."""
    return least_time(workload_of(row.case), topology(row.case.slice_name))


def compiled_step(row: Train) -> StepTime:
    """The least time of our own step, compiled."""
    name = row.case.slice_name
    cache = CompileCache(name, default_directory(), lambda *said: print(*said, file=sys.stderr))
    plan = make_plan(workload_of(row.case), topology(name), cache)
    time = train_time(plan)
    if time is None:
        raise SystemExit(f"{row.name} is not planned: {'; '.join(each.text for each in plan.infeasibilities)}")
    return time


def train_rows(step: Callable[[Train], StepTime] = least_step) -> list[dict[str, Any]]:
    """The rows of train steps; ``expected_s`` of each is by all others."""
    rows = []
    for row in TRAIN:
        time, chip = step(row), chip_of(topology(row.case.slice_name).devices[0])
        operations = time.compute_s * chip.flops  # of a device
        rows.append(
            {
                "name": row.name,
                "published_s": row.published_s,
                "best_s": time.step_s,
                "best_over_published": time.step_s / row.published_s,
                "compute_s": time.compute_s,
                "memory_s": time.memory_s,
                "collectives_s": time.collectives_s,
                "must_hold": time.compute_s / row.published_s >= HALF,
                "exposed_bytes": (row.published_s - time.step_s) * chip.bandwidth / operations,
                "bytes_s": operations / chip.bandwidth,  # seconds of a byte per operation
            }
        )
    for row, others in _left_out(rows):
        exposed = statistics.fmean(other["exposed_bytes"] for other in others)
        row["expected_s"] = row["best_s"] + exposed * row.pop("bytes_s")
        row["error"] = row["expected_s"] / row["published_s"] - 1
    return rows


def decode_rows() -> list[dict[str, Any]]:
    """The rows of decode steps; ``floor_s`` is reading weights and K/V once, ``best_s`` has the collectives too."""
    rows = []
    for row in DECODE:
        preset, params = PRESETS[row.model], SamplingParams(max_new_tokens=1024)
        found = topology(row.slice_name)
        sampling = SamplingWorkload(
            name="", engine_block="engine",
            engine=EngineConfig(
                layout={"tensor": len(found.devices)}, dtype="bfloat16", max_seqs=row.sequences, hbm_utilization=0.95
            ),
            requests=[Request(prompt_id=i, prompt_tokens=(0,) * 1024, params=params) for i in range(row.sequences)],
        )  # fmt: skip
        workload = Workload(
            command="sample", model=preset.config, model_key="hf_checkpoint", vocab_size=preset.vocab_size,
            mesh_shape="1,1,-1", dtype="bfloat16", training=None, sampling=[sampling],
        )  # fmt: skip
        estimate = predict_sampling(workload, sampling, found).estimate
        if estimate.active != row.sequences:
            raise ValueError(f"{row.name}: {estimate.active} sequences decode at a time.")
        rows.append(
            {
                "name": row.name,
                "published_s": row.published_s,
                "floor_s": estimate.memory_s,
                "best_s": estimate.step_s,
                "best_over_published": estimate.step_s / row.published_s,
                "published_over_floor": row.published_s / estimate.memory_s,
                "must_hold": False,
            }
        )
    for row, others in _left_out(rows):
        over_best = statistics.geometric_mean(1 / other["best_over_published"] for other in others)
        row["expected_s"] = over_best * row["best_s"]
        row["error"] = row["expected_s"] / row["published_s"] - 1
    return rows


def _left_out(rows: Sequence[dict[str, Any]]) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Each row and all others."""
    return [(row, [other for other in rows if other is not row]) for row in rows]


def figures(train: Sequence[dict[str, Any]], decode: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """All rows, and what they say together.

    Returns:
        ``rows``; ``lowest`` and ``highest`` of best over published, of the rows that must hold; ``exposed_bytes`` and
        ``decode_over_best``, from which ``lockstep plan`` expects; and the ``errors`` of both, each row by all others.
    """
    held = [row["best_over_published"] for row in train if row["must_hold"]]
    return {
        "rows": [*train, *decode],
        "lowest": min(held),
        "highest": max(held),
        "exposed_bytes": statistics.fmean(row["exposed_bytes"] for row in train),
        "decode_over_best": statistics.geometric_mean(1 / row["best_over_published"] for row in decode),
        "train_errors": _range(train),
        "decode_errors": _range(decode),
    }


def _range(rows: Sequence[dict[str, Any]]) -> list[float]:
    errors = [row["error"] for row in rows]
    return [min(errors), max(errors)]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The table of ``docs/plan.md``."""
    lines = [f"{'seconds':36}{'published':>10}{'at best':>10}{'expected':>10}"]
    for row in rows:
        seconds = "".join(f"{row[key]:>10.3g}" for key in ("published_s", "best_s", "expected_s"))
        lines.append(f"{row['name']:36}{seconds}")
    return "\n".join(lines)


def main() -> int:
    """Works all rows out, and prints them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile", action="append", default=[], metavar="NAME", choices=[row.name for row in TRAIN])
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args()
    train = train_rows(lambda row: (compiled_step if row.name in options.compile else least_step)(row))
    found = figures(train, decode_rows())
    print(table(found["rows"]))
    print({name: value for name, value in found.items() if name != "rows"})
    if options.json:
        write_json(options.json, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
