"""What the TPU compiler makes of the engine's programs for a model and a slice; no TPU is needed.

    JAX_PLATFORMS=cpu .venv/bin/python -m benchmarks.tpu_programs --slice v5p-16 --tensor 1 --batch 64 --context 1024

Prints one JSON object. ``docs/performance.md`` says what the numbers mean; ``--table FILE…`` makes its table of such
objects.
"""

import argparse
import dataclasses
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.run_facts import run_facts
from benchmarks.workers import write_json
from lockstep.engine import DecodeModel, Engine, EngineConfig
from lockstep.engine.sampling.sampler import never_used
from lockstep.engine.sizing.memory_model import MemoryModel
from lockstep.models import WEIGHT_AXES, DecoderWeights, LlamaConfig, read_decoder, skeleton
from lockstep.models.attention import select_attention
from lockstep.models.families.family import ModelPreset
from lockstep.models.families.registry import PRESETS
from lockstep.placement import make_mesh
from lockstep.placement.device.chips import chip_of, hops
from lockstep.plan.traffic import StepBytes, copies, step_bytes, traffic
from lockstep.types import Drafts, Request, SamplingParams
from lockstep.xla import Hlo, collectives, topology

SAMPLED = SamplingParams(max_new_tokens=64, temperature=0.7)
UNMET = never_used([SAMPLED])
"""Filters that the decode program may hold and that are not counted."""

_OPTIMIZER_COPIES = 4  # the parameters, two moments of Adam, and the gradients' accumulator, all float32


def weights_on(mesh: Mesh, model: ModelPreset, dtype: str) -> DecoderWeights:
    """Shapes of a model's weights, split over all devices as the trainer has them (FSDP)."""
    _, weights = read_decoder(skeleton(model.vocab_size, model.config))

    def struct(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        axes = WEIGHT_AXES[path[-1].name]
        spec = PartitionSpec(*("fsdp" if axis == "embed" else None for axis in axes))
        return jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(dtype), sharding=NamedSharding(mesh, spec))

    placed: DecoderWeights = jax.tree_util.tree_map_with_path(struct, weights)
    return placed


def compile_for(
    slice_name: str, tensor: int, batch: int, context: int, *, model: str = "llama-3.1-8b", dtype: str = "float32",
    drafts: bool = False, filters: bool = False, split: int = 1, **options: Any,
) -> tuple[Engine, DecodeModel]:  # fmt: skip
    """An engine with programs for a batch per replica, and what they were made from; nothing can be run.

    ``split`` devices share the positions of a sequence; ``options`` are fields of `EngineConfig`.
    """
    known, found = PRESETS[model], topology(slice_name)
    mesh = make_mesh("auto", list(found.devices))
    weights = weights_on(mesh, known, dtype)
    resident = sum(leaf.size for leaf in jax.tree.leaves(weights)) * 4 * _OPTIMIZER_COPIES // mesh.size
    config: LlamaConfig = known.config
    sequences = batch * mesh.size // tensor
    engine = Engine(
        EngineConfig(
            layout={"tensor": tensor} | ({"context": split} if split > 1 else {}),
            dtype="bfloat16",
            max_seqs=sequences,
            max_seq_len=context + SAMPLED.max_new_tokens,
            memory_bytes_per_device=chip_of(found.devices[0]).memory - resident,
            hbm_utilization=1.0,
            **options,
        ),
        mesh,
    )
    prompt, guesses = tuple(at % known.vocab_size for at in range(context)), Drafts() if drafts else None
    params = dataclasses.replace(SAMPLED, top_p=0.95) if filters else SAMPLED
    requests = [Request(prompt_id=i, prompt_tokens=prompt, params=params, drafts=guesses) for i in range(sequences)]
    engine.prepare((config, weights), requests)
    assert engine.decode_model is not None
    return engine, engine.decode_model


def over_floor(text: str, model: DecodeModel, moved: StepBytes, steps: int) -> dict[str, float]:
    """The bytes of a step beyond the floor: of layers, of logits and sampling, of attention, and a launch's own."""
    layers = sum(weight.decode_bytes for weight in model.leaves if weight.layers)
    outside = sum(size for run, size in traffic(Hlo(text, UNMET), lambda *_: 0) if run.in_step and run.times == 1)
    return {
        "layers": moved.program - outside - layers,
        "logits": outside - (moved.floor_weights - layers),
        "attention": moved.kernel - moved.floor_kv,
        "launch": moved.per_launch / steps,
    }


def figures(engine: Engine, model: DecodeModel, context: int) -> dict[str, Any]:
    """What is to be known of the programs, ready for JSON. Bytes are per device."""
    sizes, decode_mesh, sizing = engine.sizes, engine.decode_mesh, engine.sizing
    assert sizes is not None and sizing is not None
    devices = list(decode_mesh.mesh.devices.flat)
    replica = [place // decode_mesh.tensor for place in range(len(devices))]
    host = [device.process_index for device in devices]
    split = decode_mesh.context
    attention = select_attention(
        devices[0], model.heads.at_own_positions, page_size=sizes.page_size // split, dtype=model.dtype,
        kv_dtype=model.kv_dtype,
    )  # fmt: skip
    block = min(attention.decode_blocks.pages, sizes.pages_per_sequence)  # type: ignore[attr-defined]
    programs: dict[str, Any] = {}
    for name, program in engine.programs.items():
        memory, hlo = program.memory(), Hlo(program.text(), UNMET)
        pool = (
            model.config.num_layers * sizes.pages, sizes.page_size // split, *attention.stored_kv_heads.shape,
        )  # fmt: skip
        programs[name] = {
            "arguments": int(memory.argument_size_in_bytes),
            "outputs": int(memory.output_size_in_bytes),
            "aliased": int(memory.alias_size_in_bytes),
            "temporaries": int(memory.temp_size_in_bytes),
            "code": int(memory.generated_code_size_in_bytes),
            "pool_copies": len(copies(hlo, pool)),
            "pool_scatters": sum(
                op.kind == "scatter" and math.prod(op.arrays[0].dims) == math.prod(pool)
                for computation in hlo.computations.values()
                for op in computation.values()
            ),
            "kernels": sum(run.op.kind == "custom-call" and "tpu_custom_call" in run.op.line for run in hlo.runs),
            "collectives": [
                {
                    "kind": one.kind,
                    "times": one.times,
                    "in_step": one.in_step,
                    "bytes": one.bytes,
                    "crosses_replicas": one.crosses(replica),
                    "crosses_hosts": one.crosses(host),
                }
                for one in collectives(hlo, len(devices))
            ],
        }
    moved = step_bytes(engine.programs["decode"].text(), model, sizes, context=context, block_pages=block, unmet=UNMET)
    verified: dict[str, Any] = {}
    for width in sizes.verify_widths:
        blocks = attention.prefill_blocks  # type: ignore[attr-defined]
        of_width = step_bytes(
            engine.programs[f"verify_{width}"].text(), model, sizes, context=context,
            block_pages=min(blocks.pages, sizes.pages_per_sequence),
            query_blocks=split * -(-width // (split * blocks.queries)), unmet=UNMET,
        )  # fmt: skip
        launch = max(1, sizes.draft_tokens // width)
        verified[str(width)] = {
            "step": of_width.compiled(launch),
            "per_accepted_token": of_width.compiled(launch) / (width * sizes.slots),
            "cost": sizing.estimate.verify_cost(width),
        }
    chip = chip_of(devices[0])
    steps = [one for one in programs["decode"]["collectives"] if one["in_step"]]
    filtered = [one for one in collectives(Hlo(engine.programs["decode"].text()), len(devices)) if one.in_step]
    width, far = (decode_mesh.tensor - 1) / decode_mesh.tensor, hops(devices[: decode_mesh.tensor])
    wait = sum(
        one["times"] * (chip.link.reduce_s(far) + 2 * width * one["bytes"] / chip.link.bandwidth) for one in steps
    )
    seconds = moved.compiled(sizes.steps) / chip.bandwidth + wait
    return {
        "tensor": decode_mesh.tensor,
        "replicas": decode_mesh.replicas,
        "slots": sizes.slots,
        "context": context,
        "chip": chip.name,
        "pool": sizes.pages * sizes.page_size * model.kv_bytes,
        "weights": model.copied_bytes,
        "floor": moved.floor,
        "floor_weights": moved.floor_weights,
        "floor_kv": moved.floor_kv,
        "program": moved.program,
        "kernel": moved.kernel,
        "per_launch": moved.per_launch,
        "steps": sizes.steps,
        "ratio": moved.ratio(sizes.steps),
        "over_floor": over_floor(engine.programs["decode"].text(), model, moved, sizes.steps),
        "step_s": seconds,
        "collectives_s": wait,
        "bytes": moved.compiled(sizes.steps),
        "per_token": moved.compiled(sizes.steps) / sizes.slots,
        "verify": verified,
        "filter_collectives": sum(one.times for one in filtered) - sum(one["times"] for one in steps),
        "tokens_per_s_per_chip": sizes.slots / decode_mesh.tensor / seconds,
        "floor_tokens_per_s_per_chip": sizes.slots / decode_mesh.tensor / (moved.floor / chip.bandwidth),
        "predicted": MemoryModel(model).temporaries(sizes) | {"reshard": sizing.predicted.reshard},
        "programs": programs,
    }  # fmt: skip


def table(files: list[Path]) -> str:
    """The rows of ``docs/performance.md``, in Markdown."""
    lines = [
        "| slice | tensor | B per replica | floor, GB | compiled, GB | of it kernel | ratio | step, ms "
        "| tokens/s per chip | at the floor |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for file in files:
        found = json.loads(file.read_text(encoding="utf-8"))
        moved = found["ratio"] * found["floor"]
        lines.append(
            f"| {found['slice']} | {found['tensor']} | {found['slots']} | {found['floor'] / 1e9:.2f} "
            f"| {moved / 1e9:.2f} | {found['kernel'] / 1e9:.2f} | {found['ratio']:.3f} | {1e3 * found['step_s']:.2f} | "
            f"{found['tokens_per_s_per_chip']:,.0f} | {found['floor_tokens_per_s_per_chip']:,.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Compiles, and prints what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slice", default="v5p-16")
    parser.add_argument("--model", default="llama-3.1-8b", choices=PRESETS)
    parser.add_argument("--dtype", default="float32", help="of the parameters; decoding is in bfloat16")
    parser.add_argument("--tensor", type=int, default=1)
    parser.add_argument("--split", type=int, default=1, help="devices that share the positions of a sequence")
    parser.add_argument("--batch", type=int, default=64, help="sequences per replica")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--weight-dtype", default="auto", choices=("auto", "int8", "fp8"))
    parser.add_argument("--kv-cache-dtype", default="auto", choices=("auto", "fp8"))
    parser.add_argument("--drafts", action="store_true", help="with the programs that verify drafts")
    parser.add_argument("--filters", action="store_true", help="with programs that have top-k, top-p and min-p")
    parser.add_argument("--json", type=Path, help="write the object to this file too")
    parser.add_argument("--table", type=Path, nargs="+", metavar="FILE")
    options = parser.parse_args()
    if options.table:
        print(table(options.table))
        return
    engine, model = compile_for(
        options.slice, options.tensor, options.batch, options.context, model=options.model, dtype=options.dtype,
        drafts=options.drafts, filters=options.filters, split=options.split, weight_dtype=options.weight_dtype,
        kv_cache_dtype=options.kv_cache_dtype,
    )  # fmt: skip
    names = ("slice", "model", "weight_dtype", "kv_cache_dtype")
    rows = {name: getattr(options, name) for name in names} | figures(engine, model, options.context)
    print(json.dumps({"run": run_facts()} | rows))
    if options.json:
        write_json(options.json, rows)


if __name__ == "__main__":
    sys.exit(main())
