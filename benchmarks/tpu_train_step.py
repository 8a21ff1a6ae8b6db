"""What the TPU compiler makes of the train step for a model and a slice; no TPU is needed.

    JAX_PLATFORMS=cpu .venv/bin/python -m benchmarks.tpu_train_step --case llama-3-8b --json one.json

With ``--maker ours --maker levanter`` Levanter's own train step is compiled beside it. Data parallel slices and
pipeline stages, side by side:

    ... --case llama-3.1-70b --slice_name 2xv5p-64 --at_a_time 1 --mesh_shape auto --mesh_shape pp=2,fsdp=-1

``docs/performance.md`` says what the numbers mean.
"""

import argparse
import dataclasses
import itertools
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "JAX_PLATFORMS": "cpu"}

import jax
import numpy as np

from benchmarks.workers import read_rows, write_json
from lockstep.models.families.family import ModelPreset
from lockstep.models.families.registry import PRESETS
from lockstep.models.remat import RematPolicy
from lockstep.placement import PP, make_mesh
from lockstep.placement.device.chips import chip_of
from lockstep.plan.fsdp import fsdp_bytes
from lockstep.plan.traffic import traffic
from lockstep.plan.train_step import compile_step, flops_on, make_state, peak
from lockstep.plan.workload import TrainingWorkload, Workload
from lockstep.training import OptimizerConfig, TrainerConfig, lm_loss
from lockstep.xla import Array, CompileCache, Hlo, Op, Summary, Topology, collectives, summed, topology

STEPS = 100


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A model on a slice, with full FSDP and, unless told otherwise, parameters in float32.

    Args:
        model: The name of the model's preset.
        slice_name: The name of the slice.
        sequences: The number of sequences of a batch.
        length: The number of tokens of each.
        at_a_time: The number of sequences of a device's microbatch.
        layers: The number of layers, in place of the model's own; None for those.
        mesh_shape, pipeline_repeats, mp: As of ``trainer``.
        remat: The rematerialisation policy.
    """

    model: str
    slice_name: str
    sequences: int
    length: int
    at_a_time: int
    layers: int | None = None
    mesh_shape: str = "auto"
    pipeline_repeats: int = 1
    remat: RematPolicy = "full"
    mp: str = "p=f32,c=bfloat16"

    @property
    def preset(self) -> ModelPreset:
        """The model, which takes sequences of this length and no longer ones."""
        preset = PRESETS[self.model]
        layers = self.layers or preset.config.num_layers
        config = dataclasses.replace(
            preset.config, max_seq_len=self.length, num_layers=layers, gradient_checkpointing=self.remat
        )
        return dataclasses.replace(preset, config=config)


# Batches of the shipped configurations; SimPO's 256 pairs are 512 sequences.
CASES = (
    Case(model="llama-3-8b", slice_name="v5p-64", sequences=512, length=2048, at_a_time=4),
    Case(model="qwen2.5-3b", slice_name="v6e-16", sequences=128, length=1024, at_a_time=4),
    Case(model="qwen3-30b-a3b", slice_name="v5p-64", sequences=128, length=1024, at_a_time=4),
    Case(model="llama-3.1-70b", slice_name="v5p-256", sequences=256, length=2048, at_a_time=2),
)


def train_step(case: Case, found: Topology, cache: CompileCache) -> Summary:
    """The train step, compiled."""
    mesh = make_mesh(case.mesh_shape, list(found.devices))
    workload = workload_of(case)
    assert workload.training is not None
    microbatches = workload.training.trainer.microbatches(mesh)
    return compile_step(workload, mesh, make_state(workload, mesh), cache, microbatches=microbatches)


def levanter_step(case: Case, found: Topology, cache: CompileCache) -> Summary:
    """Levanter's own train step for the same model, slice, batch and float types, compiled."""
    from benchmarks.levanter_step import lower_step

    lowered = lower_step(
        case.preset.config, case.preset.vocab_size, found.devices, sequences=case.sequences, length=case.length,
        at_a_time=case.at_a_time, steps=STEPS,
    )  # fmt: skip
    return cache(lowered, "levanter")


MAKERS = {"ours": train_step, "levanter": levanter_step}


def workload_of(case: Case) -> Workload:
    """The train step of a case, as a configuration of ``train-lm`` asks for it."""
    columns = {
        "tokens": jax.ShapeDtypeStruct((case.length,), np.int32),
        "loss_mask": jax.ShapeDtypeStruct((case.length,), np.bool_),
    }
    trainer = TrainerConfig(
        train_batch_size=case.sequences, per_device_parallelism=case.at_a_time, num_train_steps=STEPS,
        mp=case.mp, pipeline_repeats=case.pipeline_repeats,
    )  # fmt: skip
    return Workload(
        command="train-lm", model=case.preset.config, model_key="model", vocab_size=case.preset.vocab_size,
        mesh_shape=case.mesh_shape, dtype="float32", sampling=[],
        training=TrainingWorkload(trainer=trainer, optimizer=OptimizerConfig(), loss=lm_loss, columns=columns),
    )  # fmt: skip


def figures(case: Case, found: Topology, summary: Summary) -> dict[str, Any]:
    """What is to be known of a train step, ready for JSON. Bytes are per device and step."""
    workload, chip, hlo = workload_of(case), chip_of(found.devices[0]), Hlo(summary.text)
    assert workload.training is not None
    mesh = make_mesh(case.mesh_shape, list(found.devices))
    microbatches = workload.training.trainer.microbatches(mesh) * mesh.shape.get(PP, 1)
    idle = workload.training.bubble(mesh)
    hosts = [device.process_index for device in mesh.devices.flat]
    each = collectives(hlo, len(hosts))
    sums = summed(each, hosts)
    model = make_state(workload, mesh).structs.model
    moved = fsdp_bytes(model, mesh.shape, each, itemsize=2, microbatches=microbatches, bubble=idle)
    accessed = sum(size * run.times for run, size in traffic(hlo, _kernel))
    times = {
        "compute_s": flops_on(workload, mesh) / len(hosts) / chip.flops,
        "memory_s": accessed / chip.bandwidth,
        "collectives_s": sum(
            one.bytes / chip.link.bandwidth + one.count * chip.link.latency_s for one in sums if not one.crosses_slices
        ),
    }
    between = sum(one.bytes for one in sums if one.crosses_slices)
    if between:
        times["slices_s"] = between / chip.dcn if chip.dcn else math.nan
    return {
        "arguments": summary.memory.argument_size_in_bytes,
        "temporaries": summary.memory.temp_size_in_bytes,
        "peak": peak(summary),
        "accessed": accessed,
        "received": sum(one.bytes for one in sums if not one.crosses_slices),
        "between_slices": between,
        "microbatches": microbatches,
        "bubble": idle,
        "launched": sum(one.count for one in sums),
        "fsdp_floor": moved.floor,
        "fsdp_ratio": moved.received / moved.floor,
        "collectives": [dataclasses.asdict(one) for one in sums],
        **times,
        "step_s": max(times.values()),
        "compile_s": summary.seconds,
    }


def _kernel(op: Op, operands: Sequence[Sequence[Array]]) -> int:
    """The bytes of a kernel, into which the compiler does not see: operands once, results once."""
    return op.bytes + sum(array.bytes for arrays in operands for array in arrays)


ROWS: tuple[tuple[str, Callable[[dict[str, Any]], str]], ...] = (
    ("arguments, GiB", lambda one: f"{one['arguments'] / 2**30:.2f}"),
    ("temporaries, GiB", lambda one: f"{one['temporaries'] / 2**30:.2f}"),
    ("read and written in HBM, GiB", lambda one: f"{one['accessed'] / 2**30:,.1f}"),
    ("received inside a slice, GiB", lambda one: f"{one['received'] / 2**30:,.1f}"),
    ("received from other slices, GiB", lambda one: f"{one.get('between_slices', 0) / 2**30:,.2f}"),
    ("idle in the pipeline", lambda one: f"{one.get('bubble', 0):.1%}"),
    ("of what FSDP needs", lambda one: f"{one['fsdp_ratio']:.3f}"),
    ("collectives", lambda one: f"{one['launched']:,}"),
    ("compute at best, s", lambda one: f"{one['compute_s']:.3f}"),
    ("memory at best, s", lambda one: f"{one['memory_s']:.3f}"),
    ("collectives at best, s", lambda one: f"{one['collectives_s']:.3f}"),
    ("between slices at best, s", lambda one: f"{one.get('slices_s', 0):.3f}"),
    ("step at best, s", lambda one: f"{one['step_s']:.3f}"),
)


def table(results: list[dict[str, Any]]) -> str:
    """The table of ``docs/performance.md``, in Markdown."""
    heads = [
        f"{result['maker']}: {result['model']} on {result['slice_name']}, {result.get('mesh_shape', 'auto')}"
        for result in results
    ]
    lines = [
        "| | " + " | ".join(heads) + " |",
        "|---|" + "---:|" * len(results),
    ]
    lines += [f"| {name} | " + " | ".join(show(result) for result in results) + " |" for name, show in ROWS]
    kinds = dict.fromkeys(one["kind"] for result in results for one in result["collectives"])
    for kind in kinds:
        cells = []
        for result in results:
            every = [one for one in result["collectives"] if one["kind"] == kind]
            count, size = sum(one["count"] for one in every), sum(one["bytes"] for one in every)
            cells.append(f"{count:,}: {size / 2**30:,.1f} GiB" if every else "")
        lines.append(f"| {kind} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Compiles, and prints what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=[case.model for case in CASES], help="default: all")
    parser.add_argument("--layers", type=int, help="in place of the model's own, to compile faster")
    parser.add_argument("--slice_name", help="in place of that of the case")
    parser.add_argument("--at_a_time", type=int, help="in place of that of the case")
    parser.add_argument("--mesh_shape", action="append", help="default: auto")
    parser.add_argument("--pipeline_repeats", type=int, default=1)
    parser.add_argument("--maker", action="append", choices=list(MAKERS), help="default: ours")
    parser.add_argument("--cache_dir", type=Path, help="where compiled results are kept; default: nowhere")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", type=Path, nargs="+", metavar="FILE", help="only print the table of such files")
    options = parser.parse_args()
    if options.table:
        print(table([each for file in options.table for each in read_rows(file)]))
        return
    results = []
    for case in CASES:
        if options.case and case.model not in options.case:
            continue
        case = dataclasses.replace(
            case, layers=options.layers, slice_name=options.slice_name or case.slice_name,
            at_a_time=options.at_a_time or case.at_a_time, pipeline_repeats=options.pipeline_repeats,
        )  # fmt: skip
        found = topology(case.slice_name)
        cache = CompileCache(case.slice_name, options.cache_dir, lambda name, what: print(name, what, file=sys.stderr))
        for maker, mesh_shape in itertools.product(options.maker or ["ours"], options.mesh_shape or ["auto"]):
            case = dataclasses.replace(case, mesh_shape=mesh_shape)
            start = time.monotonic()
            compiled = figures(case, found, MAKERS[maker](case, found, cache))
            seconds = time.monotonic() - start
            results.append(dataclasses.asdict(case) | {"maker": maker} | compiled | {"seconds": seconds})
            if options.json:
                write_json(options.json, results)
    print(table(results))


if __name__ == "__main__":
    sys.exit(main())
