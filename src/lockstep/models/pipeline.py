"""Pipeline parallelism: stages of the mesh have some of the layers each, and microbatches pass through them in turn."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import NamedArray
from haliax.nn.scan import Stacked
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, PyTree

from lockstep.errors import ConfigError
from lockstep.models.llama import LlamaLMHeadModel
from lockstep.models.remat import scan_policy
from lockstep.placement import COMPUTE_AXES, PP

_STATE: Final = "pipeline_state"
"""The name of a layer's input for a policy of `jax.checkpoint`."""


class PipelinedLayers(eqx.Module):
    """Stacked layers over stages, by the schedule of GPipe (Huang et al. 2018, arXiv 1811.06965), or a circular one.

    Rows are split over stages too, as embedding and output layer need them. In each of ``repeats * microbatches *
    stages + stages - 1`` steps the first stage takes a microbatch from a ring that turns towards it, and the last one
    puts a finished one in: when all are done, each is back where it came from.
    """

    stacked: Stacked[Any]
    microbatches: int = eqx.field(static=True)
    """The number of microbatches that the rows of one stage are divided into."""
    repeats: int = eqx.field(static=True)
    """The number of times that all stages are passed through, by every other group of layers (interleaved stages:
    Narayanan et al. 2021, arXiv 2104.04473). The stages exchange their layers for that, once in a step."""

    def scan_via(self, call: Callable[..., Any]) -> Callable[..., tuple[NamedArray, None]]:
        """Return a function that applies the layers, as that of ``haliax.nn.Stacked`` does.

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
            unsplit, named_others = _arrays(shared)

            def stage(layers: list[Array], states: list[Array], rows: list[Array], unsplit: list[Array]) -> Array:
                def named(layer: Any, x: NamedArray, *rest: Any) -> Any:
                    return call(layer, hax.named(checkpoint_name(x.array, _STATE), x.axes), *rest)

                def apply(layers: list[Array], x: Array, rows: list[Array]) -> Array:
                    block, kinds = named_layers(layers)
                    stack = Stacked(block, hax.Axis("layer", len(layers[0])), policy)
                    context = eqx.combine(named_rows(rows), named_others(unsplit), is_leaf=_named)
                    with hax.axis_mapping(COMPUTE_AXES):
                        applied = stack.scan_via(named)(named_states([x]), *context, kinds, None)[0]
                    out: Array = applied.rearrange(("batch", ...)).array
                    return out

                full = policy == scan_policy("full")
                return _schedule(apply, layers, states[0], rows, self.microbatches, self.repeats, full=full)

            mesh = jax.sharding.get_abstract_mesh()
            run = jax.shard_map(
                stage, mesh=mesh, axis_names={PP}, in_specs=(P(PP), P(PP), P(PP), P()), out_specs=P(PP), check_vma=False
            )
            return named_states([run(layers, states, rows, unsplit)]).rearrange(x.axes), None

        return scan


def _schedule(
    apply: Callable[[list[Array], Array, list[Array]], Array],
    layers: list[Array],
    x: Array,
    rows: list[Array],
    parts: int,
    repeats: int,
    *,
    full: bool,
) -> Array:
    """Pass the rows of all stages through all stages, inside ``shard_map``.

    Args:
        apply: Applies layers to a microbatch and what belongs to its rows.
        parts: The number of microbatches of this stage.
        full: Whether the backward pass computes each layer again from its input.
    """
    mesh = jax.sharding.get_abstract_mesh()
    stages, stage = mesh.shape[PP], jax.lax.axis_index(PP)
    total = parts * stages
    shards = math.prod(mesh.shape[axis] for axis in COMPUTE_AXES["batch"])

    def split(array: Array) -> Array:
        # As in the train step: no row moves to another device.
        flat = array.reshape(shards, parts, -1, *array.shape[1:]).swapaxes(0, 1).reshape(parts, -1, *array.shape[1:])
        return jax.lax.with_sharding_constraint(flat, P(None, COMPUTE_AXES["batch"]))

    # Every stage sees every microbatch, though it has the rows of its own alone.
    everyone = [jax.lax.all_gather(split(array), PP, tiled=True) for array in rows]
    groups = [_interleaved(array, stages, repeats) for array in layers] if repeats > 1 else []

    def apply_group(groups: list[Array], repeat: Array, x: Array, own: list[Array]) -> Array:
        return apply([jax.lax.dynamic_index_in_dim(array, repeat, keepdims=False) for array in groups], x, own)

    if full:  # of a group the backward pass keeps its number, not a copy in each step
        policy = jax.checkpoint_policies.save_only_these_names(_STATE)
        apply_group = jax.checkpoint(apply_group, policy=policy)

    def step(carry: tuple[Array, Array, Array], time: Array) -> tuple[tuple[Array, Array, Array], None]:
        ring, arrived, again = carry
        slot = time % parts
        waiting = jax.lax.dynamic_index_in_dim(ring, slot, keepdims=False)
        repeat, number = jnp.divmod(jnp.clip(time - stage, 0, repeats * total - 1), total)
        own = [jax.lax.dynamic_index_in_dim(array, number, keepdims=False) for array in everyone]
        first = waiting
        if repeats > 1:  # what comes from the last stage waits until all microbatches have begun
            again = jax.lax.dynamic_update_index_in_dim(again, arrived, time % len(again), 0)
            next_one = jax.lax.dynamic_index_in_dim(again, (time + 1) % len(again), keepdims=False)
            first = jnp.where(time < total, waiting, next_one)
        entering = jnp.where(stage == 0, first, arrived)
        done = apply_group(groups, repeat, entering, own) if repeats > 1 else apply(layers, entering, own)
        turned = jax.lax.ppermute(waiting, PP, [(number, number - 1) for number in range(1, stages)])
        arrived = jax.lax.ppermute(
            done, PP, [(number, (number + 1) % stages) for number in range(stages - (repeats == 1))]
        )
        ring = jax.lax.dynamic_update_index_in_dim(ring, jnp.where(stage == stages - 1, done, turned), slot, 0)
        return (ring, arrived, again), None

    ring = split(x)
    again = jnp.zeros((total - stages + 1 if repeats > 1 else 0, *ring.shape[1:]), ring.dtype)
    steps = jnp.arange(repeats * total + stages - 1)
    carry, _ = jax.lax.scan(step, (ring, jnp.zeros_like(ring[0]), again), steps)
    ring = jnp.roll(carry[0], 1 - stages, axis=0)  # the first one was finished in step ``stages - 1``
    return ring.reshape(parts, shards, -1, *x.shape[1:]).swapaxes(0, 1).reshape(x.shape)


def _interleaved(layers: Array, stages: int, repeats: int) -> Array:
    """Return the layers of this stage in each repeat: every ``stages``-th group, where it has consecutive ones."""
    groups = layers.reshape(repeats // stages, stages, -1, *layers.shape[1:])
    stage, interleaved = jax.lax.axis_index(PP), jnp.zeros_like(groups).swapaxes(0, 1)
    for shift in range(stages):  # XLA gathers what an all_to_all is given over the other axes
        part = jax.lax.dynamic_index_in_dim(groups, (stage + shift) % stages, 1, keepdims=False)
        part = (
            jax.lax.ppermute(part, PP, [(number, (number + shift) % stages) for number in range(stages)])
            if shift
            else part
        )
        interleaved = jax.lax.dynamic_update_index_in_dim(interleaved, part, (stage - shift) % stages, 0)
    return interleaved.reshape(repeats, -1, *layers.shape[1:])


def pipelined(model: PyTree, microbatches: int = 1, repeats: int = 1) -> PyTree:
    """Return the model to compute with, for the mesh that is set: with stages where that has ``pp``.

    Args:
        model: The model, its layers split over the stages.
        microbatches: The number of microbatches that the rows of one stage are divided into.
        repeats: The number of times that a microbatch passes through all stages.

    Raises:
        ConfigError: The model cannot be divided into stages.
    """
    mesh = jax.sharding.get_abstract_mesh()
    stages = mesh.shape.get(PP, 1)
    if PP not in mesh.shape and repeats == 1:
        return model
    config = getattr(model, "config", None)
    refused = f"a {type(model).__name__}" if not isinstance(model, LlamaLMHeadModel) else None
    if config is not None and config.experts is not None:
        refused = "a model with experts"
    if config is not None and config.linear_attention is not None:
        refused = "a model with linear attention"
    if config is not None and len(config.heads_by_kind) > 1:
        refused = "a model whose layers have heads of two sizes"
    if config is not None and config.exact:
        refused = "model.numerics exact"
    layers = 0 if config is None else config.num_layers
    if repeats > 1 and (stages == 1 or repeats % stages or layers % (stages * repeats)):
        raise ConfigError(
            f"trainer.pipeline_repeats is {repeats}, for {layers} layers in {stages} stages (mesh {dict(mesh.shape)}). "
            f"Use 1, or a multiple of pp that divides the layers of a stage."
        )
    if refused is not None:
        raise ConfigError(
            f"trainer.mesh_shape has pp ({dict(mesh.shape)}), and this is {refused}, which is not divided into stages. "
            "Only models without experts, linear attention and adapters are, with model.numerics fast. Leave pp out."
        )
    return dataclasses.replace(model, layers=PipelinedLayers(model.layers, microbatches, repeats))


def _arrays(tree: PyTree, first: str | None = None) -> tuple[list[Array], Callable[[Sequence[Array]], Any]]:
    """Return the arrays of a tree of named ones, with one axis first, and what names arrays of other sizes so."""
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
