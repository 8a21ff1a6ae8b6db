"""The MLP of the trainable model, and the mixture of experts in its place, on named axes."""

import dataclasses
import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Self

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from haliax.nn.scan import Stacked
from haliax.partitioning import physical_axis_name
from jax.sharding import PartitionSpec
from jaxtyping import Array

from lockstep.models.config import LlamaConfig
from lockstep.models.expert_mlps import AdaptedMatrices, ExpertWeights, mixture
from lockstep.models.experts import RouterSums, route
from lockstep.models.low_rank import AdaptedWeight, Weight
from lockstep.models.named_block import weight_axes
from lockstep.models.remat import scan_policy
from lockstep.models.weight_sizes import OWN_NORMS
from lockstep.placement import PARAMETER_AXES, axes_of, gather
from lockstep.placement.device import auto_axes


class LlamaMlp(eqx.Module):
    """A gated MLP, such as SwiGLU (Shazeer 2020, https://arxiv.org/abs/2002.05202, eq. 6), or one without a gate."""

    gate: Weight | None
    up: Weight
    down: Weight
    xielu_p: NamedArray | None
    xielu_n: NamedArray | None
    xielu_beta: NamedArray | None
    xielu_eps: NamedArray | None
    config: LlamaConfig = eqx.field(static=True)

    @classmethod
    def init(cls, config: LlamaConfig, *, key: jax.Array) -> Self:
        """Return random projections."""
        keys, std, gated = jax.random.split(key, 3), config.initializer_range, config.variant.gated

        def projection(number: int, name: str) -> NamedArray:
            return hax.random.normal(keys[number], weight_axes(config, name)) * std

        def scalar(value: float) -> NamedArray | None:
            return hax.named(jnp.float32(value), ()) if config.variant.activation == "xielu" else None

        return cls(
            gate=projection(0, "gate") if gated else None,
            up=projection(1, "up"),
            down=projection(2, "down"),
            # As published: softplus(p) = 0.8, 0.5 + softplus(n) = 0.8.
            xielu_p=scalar(0.2033),
            xielu_n=scalar(-1.0502),
            xielu_beta=scalar(0.5),
            xielu_eps=scalar(-1e-6),
            config=config,
        )


class EngineRouting(eqx.Module):
    """The experts that an engine chose while it sampled, to compare the model's own choice with or to take."""

    experts: NamedArray
    """Their numbers ``[batch, position, layer, choice]``, in a layer without ``layer``; -1 where it chose none."""
    replayed: bool = eqx.field(static=True)
    """Whether the model takes them."""


class LlamaExperts(eqx.Module):
    """A mixture of experts with a router (Shazeer et al. 2017, https://arxiv.org/abs/1701.06538), no capacity."""

    router: NamedArray
    router_bias: NamedArray | None
    expert_gate: Weight | None
    expert_up: Weight | None
    expert_gate_up: Weight | None
    expert_gate_up_bias: NamedArray | None
    expert_down: Weight
    expert_down_bias: NamedArray | None
    shared_gate: Weight | None
    shared_up: Weight | None
    shared_down: Weight | None
    shared_router: NamedArray | None
    shared_post_norm: NamedArray | None
    routed_norm: NamedArray | None
    routed_post_norm: NamedArray | None
    router_scale: NamedArray | None
    router_factors: NamedArray | None
    config: LlamaConfig = eqx.field(static=True)

    @classmethod
    def init(cls, config: LlamaConfig, *, key: jax.Array) -> Self:
        """Return random projections, and zero biases."""
        std, keys = config.initializer_range, jax.random.split(key, 4)
        experts, fused = config.experts, config.variant.fused_gate
        assert experts is not None
        keys_of_shared, shared = jax.random.split(jax.random.fold_in(key, 1), 4), experts.shared_intermediate_dim

        def projection(own: jax.Array, name: str, has: Any = True) -> Any:
            return hax.random.normal(own, weight_axes(config, name)) * std if has else None

        def zeros(name: str, has: bool) -> NamedArray | None:
            return hax.zeros(weight_axes(config, name)) if has else None

        return cls(
            router=projection(keys[0], "router"),
            router_bias=zeros("router_bias", fused or experts.scoring != "softmax"),
            expert_gate=projection(keys[1], "expert_gate", not fused),
            expert_up=projection(keys[2], "expert_up", not fused),
            expert_gate_up=projection(keys[1], "expert_gate_up", fused),
            expert_gate_up_bias=zeros("expert_gate_up_bias", fused),
            expert_down=projection(keys[3], "expert_down"),
            expert_down_bias=zeros("expert_down_bias", fused),
            shared_gate=projection(keys_of_shared[0], "shared_gate", shared),
            shared_up=projection(keys_of_shared[1], "shared_up", shared),
            shared_down=projection(keys_of_shared[2], "shared_down", shared),
            shared_router=projection(keys_of_shared[3], "shared_router", experts.shared_router),
            **{name: hax.ones(weight_axes(config, name)) if experts.own_norms else None for name in OWN_NORMS},
            config=config,
        )

    def __call__(
        self,
        x: NamedArray,
        counted: NamedArray | None,
        engine: EngineRouting | None = None,
        of_router: NamedArray | None = None,
    ) -> tuple[NamedArray, RouterSums]:
        """Map ``[batch, position, embed]`` to the same axes; each device routes the rows that it has.

        Args:
            counted: 0 for each position that is not in the sums, such as the document of padding; None: all are.
            of_router: The router's inputs ``[batch, position, embed]``; None for ``x``.

        Returns:
            The sum of what the experts answer, without the shared one, and the router's sums.
        """
        experts, Embed = self.config.experts, x.resolve_axis("embed")
        assert experts is not None
        axes = (*(axis for axis in x.axes if axis != Embed), Embed)
        tokens = x.rearrange(axes).array
        valid = jnp.ones(tokens.shape[:-1], bool) if counted is None else counted.rearrange(axes[:-1]).array != 0
        mesh = jax.sharding.get_abstract_mesh()
        rows, width = (None if mesh.empty else physical_axis_name(axis) for axis in (axes[0], "expert_mlp"))
        # XLA would sort the tokens of all devices.
        sharded = not mesh.empty and tokens.shape[0] % math.prod(mesh.shape[axis] for axis in axes_of(rows)) == 0
        fsdp = PARAMETER_AXES["embed"] if sharded and PARAMETER_AXES["embed"] in mesh.shape else None
        fsdp = fsdp if fsdp is not None and Embed.size % mesh.shape[fsdp] == 0 else None

        weights, specs = self._weights(fsdp, width)

        replays = engine is not None and engine.replayed

        def compute(
            tokens: Array, valid: Array, chosen: Any, routed_by: Any, router: Any, weights: ExpertWeights
        ) -> Any:
            weights = jax.tree.map(functools.partial(_whole, fsdp), specs, weights)
            if weights.down_bias is not None and sharded and width is not None:  # in the sum of devices once
                first = jax.lax.axis_index(width) == 0
                weights = weights._replace(down_bias=jnp.where(first, weights.down_bias, 0))
            flat = tokens.reshape(-1, tokens.shape[-1])
            chosen = None if chosen is None else chosen.reshape(len(flat), -1).astype(jnp.int32)
            # Experts of its own are replayed too: gradients then have the same bits where an engine's are no others.
            own = jnp.full((len(flat), experts.num_experts_per_tok), -1, jnp.int32)
            matrix, router_bias, factors = router
            inputs = flat if routed_by is None else routed_by.reshape(flat.shape)
            routing = route(inputs, matrix, router_bias, experts, chosen if replays else own, factors=factors)
            answers = mixture(flat, routing, weights, self.config.variant.activation)
            if sharded and width is not None:
                answers = jax.lax.psum(answers, width)
            sums = RouterSums.of(routing, valid.reshape(-1), chosen)
            return answers.reshape(tokens.shape), jax.tree.map(lambda leaf: leaf[None], sums)

        if sharded:
            split = PartitionSpec(rows)
            compute = jax.shard_map(
                compute,
                mesh=mesh,
                in_specs=(split, split, split, split, PartitionSpec(), specs),
                out_specs=(split, PartitionSpec(rows)),
                axis_names=auto_axes(mesh),
                check_vma=False,
            )
        router = tuple(map(_matrices, (self.router, self.router_bias, self.router_factors)))
        routed_by = None if of_router is None else of_router.rearrange(axes).array
        chosen = None if engine is None else engine.experts.rearrange((*axes[:-1], "choice")).array
        answers, sums = compute(tokens, valid, chosen, routed_by, router, weights)
        answers = hax.named(answers, axes).rearrange(x.axes)
        return answers, jax.tree.map(lambda leaf: leaf.sum(axis=0), sums)

    def _weights(self, fsdp: str | None, width: Any) -> tuple[ExpertWeights, ExpertWeights]:
        """The weights of the experts, and the mesh axes that split them: ``fsdp`` the stream, ``width`` the MLPs."""
        up = self.expert_gate_up if self.expert_up is None else self.expert_up
        biases = (None if bias is None else bias.array for bias in (self.expert_gate_up_bias, self.expert_down_bias))
        weights = ExpertWeights(*map(_matrices, (self.expert_gate, up, self.expert_down)), *biases)
        return weights, ExpertWeights(
            gate=_specs(weights.gate, fsdp, width),
            up=_specs(weights.up, fsdp, width),
            down=_specs(weights.down, width, fsdp),
            up_bias=PartitionSpec(None, width),
            down_bias=PartitionSpec(None, fsdp),
        )


def _whole(fsdp: str | None, spec: PartitionSpec, weight: Any) -> Any:
    """The whole weight, of which devices along an axis have parts."""
    if fsdp is None or weight is None or fsdp not in spec:
        return weight
    # Gathered here, its gradient is scattered while it is summed; XLA would sum all of it on every device.
    return gather(weight, fsdp, tuple(spec).index(fsdp))


def _matrices(weight: Weight | None) -> Any:
    """The matrices of experts as plain arrays."""
    if isinstance(weight, AdaptedWeight):
        return AdaptedMatrices(weight.weight.array, weight.pair.a.array * weight.scale, weight.pair.b.array)
    return None if weight is None else weight.array


def _specs(weight: Any, inputs: str | None, outputs: Any) -> Any:
    """The mesh axes that split the inputs and the outputs of experts, of their matrices and what is beside them."""
    spec = PartitionSpec(None, inputs, outputs)
    if isinstance(weight, AdaptedMatrices):
        return AdaptedMatrices(spec, PartitionSpec(None, inputs, None), PartitionSpec(None, None, outputs))
    return spec


class MixedMlps(eqx.Module):
    """The MLPs of the layers that have one, stacked, and the experts of the others."""

    dense: LlamaMlp
    sparse: LlamaExperts

    @classmethod
    def init(cls, config: LlamaConfig, *, key: jax.Array) -> Self:
        """Return random projections."""
        dense, sparse = config.layers_of("up"), config.layers_of("router")
        return cls(stack(LlamaMlp, config, dense, key=key), stack(LlamaExperts, config, sparse, key=key))


def stack(kind: Any, config: LlamaConfig, layers: Sequence[int], *, key: jax.Array) -> Any:
    """Return the modules of some layers, stacked."""
    keys = jax.random.split(key, config.num_layers)[jnp.asarray(layers)]
    return Stacked.init(Axis("layer", len(layers)), kind)(config, key=keys).stacked


class MixedLayers(eqx.Module):
    """Stacked layers that differ in attention or MLP: a scan over each run of layers of one kind.

    Two runs that repeat, as every other layer having experts, are a scan too, so that the time of compiling does not
    grow with the number of layers.
    """

    stacked: Any
    """The stacked layers, whose `LlamaConfig.mixed_parts` are `MixedMlps` and `MixedAttention`."""
    config: LlamaConfig = eqx.field(static=True)

    def scan_via(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that applies the layers, as that of ``haliax.nn.Stacked`` does."""
        policy = scan_policy(self.config.gradient_checkpointing)

        def scan(
            x: NamedArray,
            angles: Any,
            segment_ids: Any,
            layer_kind: Any,
            engine: EngineRouting | None = None,
            known: NamedArray | None = None,
            counted: NamedArray | None = None,
        ) -> tuple[NamedArray, RouterSums | None]:
            def run(x: NamedArray, layers: Any, of_layers: Any) -> Any:
                # Not of a projection, which may have adapters.
                leaves = jax.tree.leaves(layers, is_leaf=lambda leaf: isinstance(leaf, NamedArray))
                axis = next(leaf.resolve_axis("layer") for leaf in leaves if isinstance(leaf, NamedArray))
                stack = Stacked(layers, axis, policy)
                return stack.scan_via(call)(x, angles, segment_ids, *of_layers, counted)

            def unit(x: NamedArray, runs: Sequence[Any]) -> tuple[NamedArray, RouterSums | None]:
                last_sums = None
                for layers, of_layers in runs:
                    x, sums = run(x, layers, of_layers)
                    last_sums = last_sums if sums is None else sums
                return x, last_sums

            parts: list[RouterSums] = []
            for runs, repeats in self._units((layer_kind, engine, known)):
                if repeats == 1:
                    x, sums = unit(x, runs)
                else:
                    x, sums = hax.scan(unit, "repeat")(x, runs)
                    sums = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), sums)
                parts += [] if sums is None else [sums]
            return x, jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts) if parts else None

        return scan

    def _units(self, of_layers: Any) -> list[tuple[list[Any], int]]:
        """Return for each unit its runs, each as layers and what is theirs, and how often it repeats.

        Where it does, arrays have an axis ``repeat`` before that of the layer.

        Args:
            of_layers: The kinds of the layers, the experts that an engine chose, and what is known of them, by layer.
        """
        mixed, units = self.config.mixed_parts, list[tuple[list[Any], int]]()
        common = dataclasses.replace(self.stacked, **dict.fromkeys(mixed))
        taken = Counter[Any]()  # of each stack, by part and field; that of all layers by None
        for unit, repeats in repeated_runs(list(zip(*mixed.values(), strict=True))):
            lengths, offsets, runs = Counter[Any](), Counter[Any](), list[Any]()
            for fields, count in unit:
                lengths.update(dict.fromkeys((None, *zip(mixed, fields, strict=True)), count))
            for fields, count in unit:

                def cut(tree: Any, stack: Any) -> Any:
                    own = _layers(tree, taken[stack], repeats, lengths[stack], offsets[stack], count)  # noqa: B023
                    offsets[stack] += count  # noqa: B023
                    return own

                layers, own = cut((common, of_layers), None)
                parts = {
                    part: cut(getattr(getattr(self.stacked, part), field), (part, field))
                    for part, field in zip(mixed, fields, strict=True)
                }
                runs.append((dataclasses.replace(layers, **parts), own))
            taken.update({stack: repeats * length for stack, length in lengths.items()})
            units.append((runs, repeats))
        return units


def repeated_runs[Kind](kinds: Sequence[Kind]) -> list[tuple[tuple[tuple[Kind, int], ...], int]]:
    """Return the runs of layers of one kind as units of at most two runs, and how often each unit repeats."""
    runs = [(kind, len(list(layers))) for kind, layers in itertools.groupby(kinds)]
    units, start = list[tuple[tuple[tuple[Kind, int], ...], int]](), 0
    while start < len(runs):
        unit, repeats = tuple(runs[start : start + 2]), 1
        while tuple(runs[start + 2 * repeats :][:2]) == unit:
            repeats += 1
        units.append((unit, repeats))
        start += repeats * len(unit)
    return units


def _layers(tree: Any, first: int, repeats: int, length: int, offset: int, count: int) -> Any:
    """Return ``count`` layers from ``offset`` on of each of ``repeats`` units of ``length`` layers."""

    def cut(leaf: Any) -> Any:
        if not isinstance(leaf, NamedArray):
            return leaf
        axes, dim = list(leaf.axes), [axis.name for axis in leaf.axes].index("layer")
        array = jax.lax.slice_in_dim(leaf.array, first, first + repeats * length, axis=dim)
        array = array.reshape(*array.shape[:dim], repeats, length, *array.shape[dim + 1 :])
        array = jax.lax.slice_in_dim(array, offset, offset + count, axis=dim + 1)
        axes[dim : dim + 1] = [Axis("repeat", repeats), Axis("layer", count)]
        named = hax.named(array, axes)
        return named if repeats > 1 else named["repeat", 0]

    return jax.tree.map(cut, tree, is_leaf=lambda leaf: isinstance(leaf, NamedArray))
