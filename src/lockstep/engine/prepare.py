"""From requests to programs that fit: chosen by prediction, compiled, and held against the compiler's own figures."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from lockstep.device import Compile, compile_lowered
from lockstep.engine.config import EngineConfig, tensor_size
from lockstep.engine.decoder.build import Programs, build_programs
from lockstep.engine.sizing.choose import Chooser
from lockstep.engine.sizing.memory_model import measured
from lockstep.engine.sizing.result import Sizing, layout_text
from lockstep.errors import HbmError
from lockstep.hosts import Ledger
from lockstep.models import DecoderWeights, LlamaConfig
from lockstep.placement.decode_mesh import DecodeMesh, make_decode_mesh
from lockstep.placement.lazy_weight import sources, weight_specs
from lockstep.types import Request


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepared:
    """What was compiled, for what, and why in these sizes."""

    signature: object
    sizing: Sizing
    decode_mesh: DecodeMesh
    programs: Programs


def prepare_programs(
    config: EngineConfig,
    mesh: Mesh,
    model: LlamaConfig,
    weights: DecoderWeights,
    requests: Sequence[Request],
    *,
    free: int,
    vocab_size: int | None,
    ledger: Ledger,
    before: Prepared | None = None,
    compile_with: Compile = compile_lowered,
) -> Prepared:
    """Chooses layout and capacities, compiles, and chooses smaller ones where the compiler needs more than predicted.

    Launches nothing. Everything follows from the arguments and from compiled programs, which hosts agree on.

    Args:
        config: of the engine.
        mesh: that the model is sharded over.
        model: of the model.
        weights: arrays or shape structs with shardings.
        requests: at least one; checked.
        free: bytes on the fullest device of all hosts.
        vocab_size: token ids below it may be sampled; None for all rows of the embedding.
        ledger: where launches are recorded.
        before: of an earlier call; returned as it is if it does for these requests too.
        compile_with: the compiler.

    Raises:
        ConfigError: a capacity, layout or model that cannot work.
        CapacityError: a request that can never fit.
        CompilerError: a program does not compile.
    """
    signature = signature_of(model, weights)
    if before is not None and before.signature != signature:
        before = None
    excess: dict[str, int] = {}
    while True:
        chooser = Chooser(config, model, weights, mesh, free, excess)
        sizing = chooser.choose(requests, before.sizing if before else None)
        if before is not None and sizing.layout == before.sizing.layout and sizing.sizes == before.sizing.sizes:
            if sizing.wanted == before.sizing.wanted:
                if sizing.max_prompts == before.sizing.max_prompts:
                    return before
                sizing = dataclasses.replace(before.sizing, max_prompts=sizing.max_prompts, reasons=sizing.reasons)
            return dataclasses.replace(before, sizing=sizing)
        decode_mesh = make_decode_mesh(mesh, tensor_size(sizing.layout) or 1)
        try:
            programs = build_programs(
                dataclasses.replace(config, layout=sizing.layout),
                model,
                weights,
                decode_mesh,
                sizing.sizes,
                vocab_size=vocab_size,
                ledger=ledger,
                compile_with=compile_with,
            )
        except HbmError as error:
            beyond = max(error.needed - error.limit, sizing.budget // 10)
        else:
            compiled = measured(programs)
            if compiled.total <= sizing.budget:
                sizing = dataclasses.replace(sizing, compiled=compiled)
                return Prepared(signature=signature, sizing=sizing, decode_mesh=decode_mesh, programs=programs)
            beyond = compiled.total - sizing.predicted.total
        # At least a hundredth of the budget more each time, so that this ends.
        name = layout_text(sizing.layout)
        excess[name] = max(beyond, excess.get(name, 0) + sizing.budget // 100 + 1)


def signature_of(config: LlamaConfig, weights: DecoderWeights) -> object:
    """All of a model that programs depend on: configuration, shapes, dtypes and placement."""

    def describe(leaf: Any) -> tuple[object, ...]:
        return leaf.shape, leaf.dtype, getattr(leaf, "sharding", None)

    return config, jax.tree.map(describe, weights), jax.tree.map(describe, sources(weights)), weight_specs(weights)
