"""Kernels of tokamax beside those of our train step, by the TPU compiler; no TPU is needed. ADR 12 has the numbers.

    .venv/bin/python -m pip install tokamax==0.0.17
    JAX_PLATFORMS=cpu .venv/bin/python -m benchmarks.tokamax_kernels --slice v5p-8 --slice v6e-1 --json FILE

Bytes are those that operations read and write, and a kernel's operands and results once each.
"""

import argparse
import contextlib
import dataclasses
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}

import haliax as hax
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.workers import write_json
from lockstep.models import LlamaConfig
from lockstep.models.attention import CausalAttention, HeadArrays
from lockstep.models.attention.training.splash import LARGEST_BLOCK, splash_attention
from lockstep.models.families.registry import PRESETS
from lockstep.placement import make_mesh
from lockstep.plan.traffic import traffic
from lockstep.training.objectives.logprobs import LOGITS_BYTES
from lockstep.training.objectives.vocab_blocks import VocabBlocks
from lockstep.xla import Hlo, topology

LOSS_TOKENS: Final = 8192
_VMEM: Final = re.compile(r'"used_scoped_memory_configs":\[\{"memory_space":"1","offset":"\d+","size":"(\d+)"')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """The gradient of a kernel, ours or tokamax's.

    Args:
        function: The kernel, of some `shapes`; gradients are those of the arrays of floats.
        context: Makes what the function is traced in, its backward pass too.
    """

    name: str
    function: Callable[..., jax.Array]
    shapes: tuple[tuple[tuple[int, ...], str], ...]
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext

    def figures(self, mesh: Mesh) -> dict[str, Any]:
        """What the compiler makes of it on one device, ready for JSON."""
        whole = NamedSharding(mesh, PartitionSpec())
        arguments = [jax.ShapeDtypeStruct(shape, dtype, sharding=whole) for shape, dtype in self.shapes]
        floats = tuple(place for place, (_, dtype) in enumerate(self.shapes) if dtype != "int32")

        def total(*arrays: jax.Array) -> jax.Array:
            return jnp.sum(jnp.square(self.function(*arrays).astype(jnp.float32)))

        with jax.set_mesh(mesh), self.context():
            compiled = jax.jit(jax.grad(total, argnums=floats)).lower(*arguments).compile()
        text = compiled.as_text()
        calls = text.split('custom_call_target="tpu_custom_call"')[1:]
        sizes = [int(match[1]) for call in calls if (match := _VMEM.search(call))]
        moved = traffic(Hlo(text), lambda op, operands: op.bytes + sum(a.bytes for arrays in operands for a in arrays))
        return {
            "name": self.name,
            "kernels": len(calls),
            "vmem": max(sizes, default=0),
            "temporaries": compiled.memory_analysis().temp_size_in_bytes,
            "bytes": sum(size * run.times for run, size in moved),
        }


def attention_cases(model: str, length: int) -> list[Case]:
    """Attention of a packed row: jax's splash attention, and tokamax's, whose backward pass is one kernel."""
    config: LlamaConfig = PRESETS[model].config
    kv_heads, group, head = config.num_kv_heads, config.q_heads_per_group, config.head_size
    attention = CausalAttention(scale=head**-0.5)

    def ours(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array) -> jax.Array:
        return splash_attention(HeadArrays(q, k, v, segments), attention)

    def theirs(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array) -> jax.Array:
        from tokamax._src.ops.experimental.tpu.splash_attention import splash_attention_kernel as library
        from tokamax._src.ops.experimental.tpu.splash_attention import splash_attention_mask as masks

        size = LARGEST_BLOCK
        blocks = library.SplashConfig(block_q=size, block_kv=size, block_q_dkv=size, block_kv_dkv=size)
        kernel = library.make_splash_mha(masks.CausalMask((length, length)), config=blocks, q_seq_shards=1)
        scaled = (q.astype(jnp.float32) * attention.scale).astype(q.dtype)
        q, k, v = (jnp.moveaxis(array, 1, -2) for array in (scaled, k, v))
        out = jax.vmap(kernel)(q.reshape(1, -1, length, head), k, v, library.SegmentIds(segments, segments))
        return jnp.moveaxis(out.reshape(q.shape), -2, 1)

    kept = ((1, length, kv_heads, head), "bfloat16")
    shapes = (((1, length, kv_heads, group, head), "bfloat16"), kept, kept, ((1, length), "int32"))
    name = f"attention/{model}/{length}"
    return [
        Case(name=f"{name}/ours", function=ours, shapes=shapes),
        Case(name=f"{name}/tokamax", function=theirs, shapes=shapes),
    ]


def loss_cases(model: str) -> list[Case]:
    """Log-probabilities of tokens, and tokamax's cross entropy of the same."""
    preset = PRESETS[model]
    width, vocab = preset.config.hidden_dim, preset.vocab_size

    def ours(states: jax.Array, head: jax.Array, targets: jax.Array) -> jax.Array:
        named = hax.named(states, ("batch", "position", "embed")), hax.named(head, ("embed", "vocab"))
        blocks = VocabBlocks.of(*named, None, most=LOGITS_BYTES)
        assert blocks is not None
        return blocks(states, head, targets)

    def theirs(states: jax.Array, head: jax.Array, targets: jax.Array) -> jax.Array:
        import tokamax

        loss: jax.Array = tokamax.linear_softmax_cross_entropy_loss(
            states[0], targets[0], head, implementation="mosaic_tpu"
        )
        return loss

    def cross_compile() -> contextlib.AbstractContextManager[Any]:
        import tokamax

        context: contextlib.AbstractContextManager[Any] = tokamax.config.cross_compile(True)
        return context

    shapes = (((1, LOSS_TOKENS, width), "bfloat16"), ((width, vocab), "bfloat16"), ((1, LOSS_TOKENS), "int32"))
    return [
        Case(name=f"loss/{model}/ours", function=ours, shapes=shapes),
        Case(name=f"loss/{model}/tokamax", function=theirs, shapes=shapes, context=cross_compile),
    ]


def main() -> None:
    """Compiles every case for every slice, and prints what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slice", action="append", help="default: v5p-8, v6e-1")
    parser.add_argument("--only", default="", help="the beginning of the names of cases, such as loss; default: all")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    models = [(model, length) for model in ("llama-3-8b", "qwen3-30b-a3b") for length in (4096, 8192)]
    cases = [case for model, length in models for case in attention_cases(model, length)] + loss_cases("llama-3-8b")
    rows = []
    for slice_name in options.slice or ["v5p-8", "v6e-1"]:
        mesh = make_mesh("1,1,1", list(topology(slice_name).devices)[:1])
        for case in cases:
            if case.name.startswith(options.only):
                rows.append({"slice": slice_name} | case.figures(mesh))
                print(rows[-1], flush=True)
                if options.json:
                    write_json(options.json, rows)


if __name__ == "__main__":
    sys.exit(main())
