"""From a model in a layout and a capacity to compiled programs."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from lockstep.engine.decode_model import DecodeModel
from lockstep.engine.decoder.decode import decode_function
from lockstep.engine.decoder.prefill import copy_pages_function, prefill_function, prompt_logprobs_function
from lockstep.engine.decoder.states import KvAndStates, state_structs
from lockstep.engine.decoder.transformer import Transformer, routed_shape
from lockstep.engine.decoder.verify import verify_function
from lockstep.engine.schedule import (
    Batch,
    Capacity,
    CopyPagesBatch,
    DecodeBatch,
    PrefillBatch,
    PromptLogprobsBatch,
    VerifyBatch,
)
from lockstep.hosts import Ledger
from lockstep.models import DecoderWeights
from lockstep.models.attention import Attention, pool_dtype, select_attention, tpu_generation
from lockstep.placement import DecodeMesh, LayoutTree, assembly_function, partition_specs, reshard_function, sources
from lockstep.placement.device import Compile, Compiler, Program, compile_lowered, compile_program

_TPU_OPTIONS: Final = {"xla_tpu_msa_inefficient_use_to_copy_ratio": "1.0"}
"""Nothing is brought into vector memory that is not used there as a whole: without this, XLA was seen to move ``k`` of
all layers in 8 bits in and out of it in every layer (v6e), half of all that a step then moved."""

_TPU7X_OPTIONS: Final = {"xla_tpu_control_large_2nd_minor_layout_for_x16": "0"}
"""Weights of 16 bits are read in the tiles that arguments have. Without this each launch began with a copy of all of
them in tiles of 16 rows (read off the compiler, libtpu 0.0.46.3: 7.5 GB of temporaries where 0.8 are needed), and a
step of decode took 3 % more cycles by its own estimate."""

_TPU7X_DECODE_OPTIONS: Final = {"xla_tpu_offload_gather_to_sparsecore": "false"}
"""The gathers of a step stay on the TensorCore. libtpu of jax 0.11.1 moves them to the SparseCore, which made decode up
to 57 % slower; gathers of a long prefill gain by it (https://github.com/jax-ml/jax/issues/40553)."""


def compiler_options(device: jax.Device, program: str) -> dict[str, str]:
    """Options of XLA for one of the engine's programs, by name; none of them changes what it computes."""
    if device.platform != "tpu":
        return {}
    if tpu_generation(device.device_kind) != "tpu7x":
        return _TPU_OPTIONS
    return _TPU_OPTIONS | _TPU7X_OPTIONS | (_TPU7X_DECODE_OPTIONS if program.startswith(("decode", "verify")) else {})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Programs:
    """Everything the engine launches.

    ``reshard`` is None where decoding reads the trainer's weights in place, ``copy_pages`` where no two sequences have
    the same prompt, ``prompt_logprobs`` where nobody asks for log-probabilities of prompts. ``verify`` has a program
    for each of `Capacity.verify_widths`.
    """

    reshard: Program | None
    new_cache: Program
    prefill: Program
    copy_pages: Program | None
    prompt_logprobs: Program | None
    decode: Program
    verify: Mapping[int, Program] = dataclasses.field(default_factory=dict)

    def by_name(self) -> dict[str, Program]:
        """The programs by name, in the order of their first launch."""
        once = (self.reshard, self.new_cache, self.prefill, self.copy_pages, self.prompt_logprobs, self.decode)
        return {program.name: program for program in (*once, *self.verify.values()) if program is not None}


def build_programs(
    model: DecodeModel,
    sizes: Capacity,
    *,
    vocab_size: int | None,
    ledger: Ledger,
    compile_with: Compile = compile_lowered,
) -> Programs:
    """Compile all programs for a model in a layout; launches nothing.

    Args:
        vocab_size: The number of token ids that may be sampled, from 0; None for all rows of the embedding.

    Raises:
        CompilerError: A program does not compile.
    """
    decode_mesh = model.decode_mesh
    # Weights are gathered outside the loop over layers and inside, and neither waits for the other.
    gathers = any(layout != layout.decode for layout in jax.tree.leaves(model.layouts))

    def compiled(name: str, function: Callable[..., Any], arguments: list[Any], **options: Any) -> Program:
        ordered = name != "reshard" and (model.moves or not gathers)
        compiler = Compiler(compile_with=compile_with, options=compiler_options(model.device, name), ordered=ordered)
        return compile_program(
            name, function, arguments, mesh=decode_mesh.mesh, ledger=ledger, compiler=compiler, **options
        )

    reshard, structs, layouts = _resharded(model, compiled)
    attention = select_attention(
        model.device, model.heads, page_size=sizes.page_size, dtype=model.dtype, kv_dtype=model.kv_dtype,
        exact=model.config.exact,
    )  # fmt: skip
    pool = _pool(model, sizes, attention)
    new_cache = compiled(
        "new_cache",
        lambda: jax.tree.map(lambda part: jnp.zeros(part.shape, part.dtype), pool),
        [],
        out_shardings=_shardings(pool),
    )

    rows = model.weights.embed.shape[0]
    allowed = rows if vocab_size is None else min(vocab_size, rows)
    transformer = Transformer(
        config=model.config, decode_mesh=decode_mesh, layouts=layouts, pages=sizes.pages, vocab_size=allowed,
        routed=routed_shape(model.config, sizes),
    )  # fmt: skip
    on_mesh = _OnMesh(compiled=compiled, layouts=layouts, weights=structs, pool=pool, decode_mesh=decode_mesh)
    prefill = on_mesh("prefill", prefill_function(transformer, sizes, attention), PrefillBatch.empty(sizes))
    copy_pages = None
    if sizes.page_copies:
        pages, copies = KvAndStates.of(pool).kv, _packed(CopyPagesBatch.empty(sizes), decode_mesh)
        function = copy_pages_function(model.paged_layers, sizes, attention)
        specs, out = (pages.sharding.spec, copies.sharding.spec), pages.sharding
        mapped = jax.shard_map(function, mesh=decode_mesh.mesh, in_specs=specs, out_specs=out.spec, check_vma=False)
        copy_pages = compiled("copy_pages", mapped, [pages, copies], donate=(0,), out_shardings=out)
    prompt_logprobs = None
    if sizes.prompt_logprobs:
        function = prompt_logprobs_function(transformer, sizes, attention)
        prompt_logprobs = on_mesh("prompt_logprobs", function, PromptLogprobsBatch.empty(sizes), reads_only=True)
    decode = on_mesh("decode", decode_function(transformer, sizes, attention), DecodeBatch.empty(sizes, 0))
    verify = {}
    for width in sizes.verify_widths:
        function = verify_function(transformer, sizes, attention, width)
        verify[width] = on_mesh(f"verify_{width}", function, VerifyBatch.empty(sizes, width, 0))
    return Programs(
        reshard=reshard, new_cache=new_cache, prefill=prefill, copy_pages=copy_pages, prompt_logprobs=prompt_logprobs,
        decode=decode, verify=verify,
    )  # fmt: skip


def _resharded(
    model: DecodeModel, compiled: Callable[..., Program]
) -> tuple[Program | None, DecoderWeights, LayoutTree]:
    """The program that moves the weights, if any, and the weights that the other programs read, with their layouts."""
    if not model.copies:
        return None, model.weights, model.layouts
    structs, mesh = model.weights, model.decode_mesh.mesh
    if model.lazy:
        structs = sources(model.weights)
        function, layouts = assembly_function(model.weights, model.layouts, model.dtype, gather=model.moves)
    else:
        function, layouts = reshard_function(model.layouts, model.dtype, gather=model.moves)
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), partition_specs(layouts))
    reshard = compiled("reshard", function, [structs], out_shardings=shardings)
    with jax.set_mesh(mesh):
        return reshard, jax.tree.map(_struct, jax.eval_shape(function, structs), shardings), layouts


def _pool(model: DecodeModel, sizes: Capacity, attention: Attention) -> Any:
    """The shapes of pages and states on all devices."""
    decode_mesh, (kept, size) = model.decode_mesh, attention.stored_kv_heads.shape
    pages = jax.ShapeDtypeStruct(
        (
            decode_mesh.replicas * model.paged_layers * sizes.pages,
            sizes.page_size // decode_mesh.context,
            decode_mesh.tensor * kept,
            size,
        ),
        pool_dtype(model.device, model.heads, model.kv_dtype),
        sharding=decode_mesh.sharding(decode_mesh.replica_axes or None, None, decode_mesh.tensor_axes or None),
    )
    return KvAndStates(pages, state_structs(model.config, sizes, decode_mesh, model.dtype)).pool


@dataclasses.dataclass(frozen=True, kw_only=True)
class _OnMesh:
    """Compiles functions of (weights, pool, a replica's part of a packed batch) that return the pool, and results or
    None.
    """

    compiled: Callable[..., Program]
    layouts: LayoutTree
    weights: DecoderWeights
    pool: Any
    decode_mesh: DecodeMesh

    def __call__(self, name: str, function: Callable[..., Any], batch: Batch, *, reads_only: bool = False) -> Program:
        """Compile a function for batches as this one.

        One that ``reads_only`` leaves the pool unchanged and returns its results alone.
        """
        everywhere, packed = self.decode_mesh.sharding(), _packed(batch, self.decode_mesh)
        shardings = _shardings(self.pool)
        outputs = everywhere if reads_only else (shardings, everywhere)
        pool_specs = jax.tree.map(lambda part: part.spec, shardings)
        mapped = jax.shard_map(
            function,
            mesh=self.decode_mesh.mesh,
            in_specs=(partition_specs(self.layouts), pool_specs, packed.sharding.spec),
            out_specs=jax.tree.map(lambda sharding: sharding.spec, outputs),
            check_vma=False,
        )
        arguments, donate = [self.weights, self.pool, packed], () if reads_only else (1,)
        return self.compiled(name, mapped, arguments, donate=donate, out_shardings=outputs)


def _packed(batch: Batch, decode_mesh: DecodeMesh) -> jax.ShapeDtypeStruct:
    return _struct(batch.packed(), decode_mesh.sharding(decode_mesh.replica_axes or None))


def _shardings(pool: Any) -> Any:
    return jax.tree.map(lambda part: part.sharding, pool)


def _struct(array: Any, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
