"""The merged weights of a model with adapters, on the mesh of training: what a Hugging Face checkpoint is saved of."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from lockstep.hosts import Hosts, Ledger, Watchdog
from lockstep.models.llama import LlamaLMHeadModel
from lockstep.models.lora import LoraModel
from lockstep.models.low_rank import MergeLora
from lockstep.placement import mesh_of
from lockstep.placement.device import Program, compile_program


def merge_adapters(model: LoraModel, hosts: Hosts, dtype: Any = None) -> LlamaLMHeadModel:
    """Makes the model that a model with adapters computes; every host makes this call.

    Until the result is dropped, the devices hold a second copy of the weights that have adapters; other weights are
    the model's own arrays. The programs are compiled once per run.

    Args:
        model: The model on the mesh; it is not changed.
        hosts: The processes of the job.
        dtype: The dtype of the merged weights; None for that of the frozen ones.

    Returns:
        The merged model, sharded as the frozen weights are.

    Raises:
        PeerError: A program does not compile, or fails, on some host; raised on every host.
        DisagreementError: The hosts compiled different programs.
    """
    parts = {name: (model.weight(name).array, pair.a.array, pair.b.array) for name, pair in model.pairs.items()}
    with hosts.scope("merging adapters") as scope:
        watchdog = Watchdog(scope, scope.timeout_s)
        programs: dict[str, Program] = {}
        with scope.run_on_all("compile", "merging adapters") as phase:
            for name, arrays in parts.items():
                structs = [jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=each.sharding) for each in arrays]
                target = jnp.dtype(structs[0].dtype if dtype is None else dtype)
                programs[name] = _program(model.merge_of(name), *structs, target, mesh_of(arrays[0]), hosts.ledger)
                phase.agree({f"{key}, {name}": value for key, value in programs[name].digests.items()})
        merged = {}
        with scope.launch_on_all("merge"):
            for name, arrays in parts.items():
                with watchdog.watch(f"merging {name}"):
                    merged[name] = jax.block_until_ready(programs[name](*arrays))
    return model.with_weights(merged)


@functools.lru_cache(maxsize=64)
def _program(
    assemble: MergeLora,
    weight: jax.ShapeDtypeStruct,
    a: jax.ShapeDtypeStruct,
    b: jax.ShapeDtypeStruct,
    dtype: jnp.dtype,
    mesh: Mesh,
    ledger: Ledger,
) -> Program:
    """The program for all layers of one linear layer, one after the other, so that one is in float32 at a time."""

    def merge(*parts: jax.Array) -> jax.Array:
        return jax.lax.map(lambda layer: assemble(*layer).astype(dtype), parts)

    return compile_program(
        "merge_adapter", merge, [weight, a, b], mesh=mesh, ledger=ledger, out_shardings=weight.sharding
    )
