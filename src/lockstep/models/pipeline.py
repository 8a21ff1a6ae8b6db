"""Pipeline parallelism: stages of the mesh have some of the layers each, and microbatches pass through them in turn."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import NamedArray
from haliax.nn.scan import Stacked
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, PyTree

from lockstep.errors import ConfigError
from lockstep.models.llama import LlamaLMHeadModel
from lockstep.placement import COMPUTE_AXES, PP


class PipelinedLayers(eqx.Module):
    """Stacked layers over stages, by the schedule of GPipe (Huang et al. 2018, arXiv 1811.06965).

    Rows are split over stages too, as embedding and output layer need them. In each of ``microbatches * stages + stages
    - 1`` steps the first stage takes a microbatch from a ring that turns towards it, and the last one puts a finished
    one in: when all are done, each is back where it came from.
    """

    stacked: Stacked[Any]
    microbatches: int = eqx.field(static=True)
    """The number of microbatches that the rows of one stage are divided into."""

    def scan_via(self, call: Callable[..., Any]) -> Callable[..., tuple[NamedArray, None]]:
        """Returns a function that applies the layers, as that of ``haliax.nn.Stacked`` does.

        Args:
            call: Takes a layer and the arguments of the function.
        """
        policy = self.stacked.gradient_checkpointing

        def scan(x: NamedArray, *rest: Any) -> tuple[NamedArray, None]:
            angles, segment_ids, layer_kind, _ = rest
            of_rows, shared = eqx.partition((angles, segment_ids), _has_rows, is_leaf=_named)
            layers, named_layers = _arrays((self.stacked.stacked, layer_kind), "layer")
            states, named_states = _arrays(x, "batch")
            rows, named_rows = _arrays(of_rows, "batch")
            others, named_others = _arrays(shared)

            def stage(layers: list[Array], states: list[Array], rows: list[Array], others: list[Array]) -> Array:
                block, kinds = named_layers(layers)
                stack = Stacked(block, hax.Axis("layer", len(layers[0])), policy)

                def apply(x: Array, rows: list[Array]) -> Array:
                    given = eqx.combine(named_rows(rows), named_others(others), is_leaf=_named)
                    with hax.axis_mapping(COMPUTE_AXES):
                        found = stack.scan_via(call)(named_states([x]), *given, kinds, None)[0]
                    out: Array = found.rearrange(("batch", ...)).array
                    return out

                return _schedule(apply, states[0], rows, self.microbatches)

            mesh = jax.sharding.get_abstract_mesh()
            run = jax.shard_map(
                stage, mesh=mesh, axis_names={PP}, in_specs=(P(PP), P(PP), P(PP), P()), out_specs=P(PP), check_vma=False
            )
            return named_states([run(layers, states, rows, others)]).rearrange(x.axes), None

        return scan


def _schedule(apply: Callable[[Array, list[Array]], Array], x: Array, rows: list[Array], parts: int) -> Array:
    """Passes the rows of all stages through all stages, inside ``shard_map``.

    Args:
        apply: The layers of this stage, on a microbatch and what belongs to its rows.
        x: The rows of this stage.
        rows: What belongs to them.
        parts: The number of microbatches of this stage.
    """
    mesh = jax.sharding.get_abstract_mesh()
    stages, stage = mesh.shape[PP], jax.lax.axis_index(PP)
    shards = math.prod(mesh.shape[axis] for axis in COMPUTE_AXES["batch"])

    def split(array: Array) -> Array:
        # As in the train step: no row moves to another device.
        flat = array.reshape(shards, parts, -1, *array.shape[1:]).swapaxes(0, 1).reshape(parts, -1, *array.shape[1:])
        return jax.lax.with_sharding_constraint(flat, P(None, COMPUTE_AXES["batch"]))

    # Every stage sees every microbatch, though it has the rows of its own alone.
    everyone = [jax.lax.all_gather(split(array), PP, tiled=True) for array in rows]

    def step(carry: tuple[Array, Array], time: Array) -> tuple[tuple[Array, Array], None]:
        ring, arrived = carry
        slot = time % parts
        waiting = jax.lax.dynamic_index_in_dim(ring, slot, keepdims=False)
        number = jnp.clip(time - stage, 0, parts * stages - 1)
        own = [jax.lax.dynamic_index_in_dim(array, number, keepdims=False) for array in everyone]
        done = apply(jnp.where(stage == 0, waiting, arrived), own)
        turned = jax.lax.ppermute(waiting, PP, [(one, one - 1) for one in range(1, stages)])
        arrived = jax.lax.ppermute(done, PP, [(one, one + 1) for one in range(stages - 1)])
        ring = jax.lax.dynamic_update_index_in_dim(ring, jnp.where(stage == stages - 1, done, turned), slot, 0)
        return (ring, arrived), None

    ring = split(x)
    (ring, _), _ = jax.lax.scan(step, (ring, jnp.zeros_like(ring[0])), jnp.arange((parts + 1) * stages - 1))
    ring = jnp.roll(ring, 1 - stages, axis=0)  # the first one was finished in step ``stages - 1``
    return ring.reshape(parts, shards, -1, *x.shape[1:]).swapaxes(0, 1).reshape(x.shape)


def pipelined(model: PyTree, microbatches: int = 1) -> PyTree:
    """Returns the model to compute with, for the mesh that is set: with stages where that has ``pp``.

    Args:
        model: The model, its layers split over the stages.
        microbatches: The number of microbatches that the rows of one stage are divided into.

    Raises:
        ConfigError: The model cannot be divided into stages.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if PP not in mesh.shape:
        return model
    config = getattr(model, "config", None)
    found = f"a {type(model).__name__}" if not isinstance(model, LlamaLMHeadModel) else None
    if config is not None and config.experts is not None:
        found = "a model with experts"
    if config is not None and config.exact:
        found = "model.numerics exact"
    if found is not None:
        raise ConfigError(
            f"trainer.mesh_shape has pp ({dict(mesh.shape)}), and this is {found}, which is not divided into stages. "
            "Only models without experts and adapters are, with model.numerics fast. Leave pp out."
        )
    return dataclasses.replace(model, layers=PipelinedLayers(model.layers, microbatches))


def _arrays(tree: PyTree, first: str | None = None) -> tuple[list[Array], Callable[[Sequence[Array]], Any]]:
    """Returns the arrays of a tree of named ones, with one axis first, and what names arrays of other sizes so."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=_named)
    leaves = leaves if first is None else [leaf.rearrange((first, ...)) for leaf in leaves]
    names = [[axis.name for axis in leaf.axes] for leaf in leaves]

    def named(arrays: Sequence[Array]) -> Any:
        return jax.tree.unflatten(structure, [hax.named(*pair) for pair in zip(arrays, names, strict=True)])

    return [leaf.array for leaf in leaves], named


def _has_rows(leaf: NamedArray) -> bool:
    return any(axis.name == "batch" for axis in leaf.axes)


def _named(leaf: Any) -> bool:
    return isinstance(leaf, NamedArray)
