"""A model with low-rank adapters beside frozen weights (LoRA, https://arxiv.org/abs/2106.09685)."""

import dataclasses
import functools
import math
import string
from typing import Any, Final, Literal, Self

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jax.sharding import Mesh
from jaxtyping import Array, PyTree

from lockstep.config_fields import check_fields
from lockstep.errors import ConfigError
from lockstep.hosts import Hosts, Ledger, Watchdog
from lockstep.models.config import LlamaConfig
from lockstep.models.experts import RouterSums
from lockstep.models.llama import LlamaLMHeadModel, attention_and_mlp
from lockstep.models.llama_mlp import EngineRouting
from lockstep.models.low_rank import RANK, AdaptedWeight, LowRankPair, MergeLora, narrower
from lockstep.models.registry import read_registered, register_reader
from lockstep.models.trainable import skeleton
from lockstep.models.weights import MLP_WEIGHTS, WIDE, DecoderWeights, input_dims
from lockstep.placement import LazyWeight, axis_specs, mesh_of, resharded
from lockstep.placement.device import Program, compile_program

_LATENT: Final = {"q_a_proj": "q_a", "q_b_proj": "q_b", "kv_a_proj_with_mqa": "kv_a", "kv_b_proj": "kv_b"}
_ATTENTION: Final = ("q", "k", "v", "o", *_LATENT.values())
TARGETS: Final[dict[str, tuple[str, ...]]] = {
    "q_proj": ("q", "gated_q", WIDE["q"]),
    **{f"{weight}_proj": (weight, WIDE[weight]) for weight in ("k", "v", "o")},
    **{f"{weight}_proj": (weight, f"expert_{weight}", f"shared_{weight}") for weight in MLP_WEIGHTS},
    "gate_up_proj": ("expert_gate_up",),
    "in_proj_qkvz": ("linear_qkvz",),
    "in_proj_qkv": ("linear_q", "linear_k", "linear_v"),
    "in_proj_z": ("linear_z",),
    "out_proj": ("linear_o",),
    **{name: (weight,) for name, weight in _LATENT.items()},
}
"""The linear layers that can have adapters, by their names in Hugging Face models: their weights, of which a model has
some. The adapter of a weight has its name and ``_proj``."""

_LATER: Final = (
    *("gated_q", "linear_qkvz", "linear_o", *_LATENT.values()),
    *("linear_q", "linear_k", "linear_v", "linear_z"),
    *(WIDE[weight] for weight in "qkvo"),
)
WEIGHTS: Final = [
    *(name for place in range(3) for of in TARGETS.values() for name in of[place : place + 1] if name not in _LATER),
    *_LATER,  # behind the others, whose random numbers stay
]
"""Those weights."""

ALL: Final = "all-linear"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters, in the words of Levanter and PEFT; everything else of the model is frozen.

    Raises:
        ConfigError: A value is out of its range, or a module is unknown.
    """

    r: int = 8
    """The rank of the adapters."""
    alpha: float = 8.0
    """The product of the factors is scaled by ``alpha / r``."""
    target_modules: tuple[str, ...] = (ALL,)
    """The linear layers with adapters: ``all-linear``, without the MLPs of a model that has experts, or some of
    ``q_proj``, ``k_proj``, ``v_proj``, ``o_proj``, ``gate_proj``, ``up_proj``, ``down_proj``; ``gate_up_proj`` of
    gpt-oss; ``in_proj_qkvz`` and ``out_proj`` of Qwen3-Next, ``in_proj_qkv``, ``in_proj_z`` and ``out_proj`` of
    Qwen3.5; ``q_a_proj``, ``q_b_proj``, ``kv_a_proj_with_mqa``, ``kv_b_proj`` of DeepSeek. Those of an MLP are of each
    expert, too."""
    base_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """The float type in which the frozen weights are stored; null: the compute type of ``trainer.mp``, in which a step
    uses them anyway. Adapters are in the parameter type."""

    def __post_init__(self) -> None:
        check_fields(self, "lora.")
        if self.r < 1:
            raise ConfigError(f"lora.r is {self.r}; a rank must be at least 1. Raise it, or leave lora out.")
        if not (self.alpha > 0 and math.isfinite(self.alpha)):
            raise ConfigError(f"lora.alpha is {self.alpha}; it must be a number above 0. Use lora.r for a scale of 1.")
        modules = self.target_modules
        unknown = [name for name in modules if name not in TARGETS and modules != (ALL,)]
        if unknown or not modules or len(set(modules)) < len(modules):
            fault = f"has {unknown[0]!r}" if unknown else f"is {list(modules)}"
            raise ConfigError(
                f"lora.target_modules {fault}; it must be {ALL} alone, or one or more of {', '.join(TARGETS)}, each "
                "once. Correct it."
            )

    @property
    def scale(self) -> float:
        """The factor of the product of the two factors."""
        return self.alpha / self.r

    def modules_of(self, config: LlamaConfig) -> tuple[str, ...]:
        """The names of the adapters of a model, those of its experts after the others.

        Raises:
            ConfigError: The model has no layer of a name that was asked for.
        """
        layers, asked = skeleton(1, config).layers.stacked, self.target_modules
        own = {name: [weight for weight in of if _find(layers, weight) is not None] for name, of in TARGETS.items()}
        own = {name: weights for name, weights in own.items() if weights}
        if asked == (ALL,):
            mlps = {f"{name}_proj" for name in (*MLP_WEIGHTS, "gate_up")} if config.experts is not None else set()
            asked = tuple(name for name in own if name not in mlps)
        missing = [name for name in asked if name not in own]
        if missing:
            raise ConfigError(
                f"lora.target_modules has {missing[0]}, which this model does not have. Use some of {', '.join(own)}."
            )
        targeted = [weight for name in asked for weight in own[name]]
        return tuple(f"{weight}_proj" for weight in WEIGHTS if weight in targeted)

    def resolved(self, compute: str) -> Self:
        """Return the configuration with a float type for the frozen weights.

        Args:
            compute: The name of the compute type of the run, which stands for null.
        """
        changed: dict[str, Any] = {"base_dtype": self.base_dtype or compute}
        return dataclasses.replace(self, **changed)

    def shapes(self, config: LlamaConfig) -> dict[str, LowRankPair]:
        """Return the adapters with a `jax.ShapeDtypeStruct` in place of each array, without device work.

        Raises:
            ConfigError: As for `init`.
        """
        with hax.axis_mapping({}):
            return jax.eval_shape(lambda: self.init(config, jax.random.key(0)))

    def init(self, config: LlamaConfig, key: jax.Array) -> dict[str, LowRankPair]:
        """Return new adapters, which change nothing yet: A is random, B is zero, as in PEFT.

        Args:
            key: The key of the random numbers, which are the same on any mesh; uniform between -1 and 1 divided by the
                root of the number of inputs.

        Raises:
            ConfigError: The model has no such layer, or the rank is larger than one of its sides.
        """
        layers, Rank = skeleton(1, config).layers.stacked, Axis(RANK, self.r)
        keys = dict(zip(WEIGHTS, jax.random.split(key, len(WEIGHTS)), strict=True))
        pairs = {}
        for name in self.modules_of(config):
            axes = _find(layers, weight_of(name)).axes
            dims = input_dims(weight_of(name), len(axes))
            Stack, In, Out = axes[: dims[0]], axes[dims[0] : dims[-1] + 1], axes[dims[-1] + 1 :]
            size_in, size_out = (math.prod(axis.size for axis in side) for side in (In, Out))
            if self.r > min(size_in, size_out):
                raise ConfigError(
                    f"lora.r is {self.r}, and {name} maps {size_in} numbers to {size_out}: no more than "
                    f"{min(size_in, size_out)} can have an effect. Lower lora.r, or leave "
                    f"{name.removeprefix('expert_').removeprefix('shared_')} out of lora.target_modules."
                )
            bound = size_in**-0.5
            a = hax.random.uniform(keys[weight_of(name)], (*Stack, *In, Rank), minval=-bound, maxval=bound)
            pairs[name] = LowRankPair(a=a, b=hax.zeros((*Stack, Rank, *Out)))
        return pairs


def weight_of(name: str) -> str:
    """Return the name of the weight that an adapter is for, see `lockstep.models.weights`."""
    return name.removesuffix("_proj")


def adapter_products(pairs: dict[str, LowRankPair], config: LlamaConfig) -> float:
    """Return the numbers of adapters that a token is multiplied with: of those of experts, its own experts'."""
    sizes = {name: sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(pair)) for name, pair in pairs.items()}
    return sum(config.part_read(weight_of(name), 1) * size for name, size in sizes.items())


def _find(layers: Any, weight: str) -> Any:
    """The weight of the stacked layers; None where they have none of this name."""
    candidates = (getattr(module, weight, None) for module in attention_and_mlp(layers))
    return next((candidate for candidate in candidates if candidate is not None), None)


class LoraModel(eqx.Module):
    """A model whose weights are frozen, with adapters that are trained; it computes as the model that it adapts does.

    `split_trained` takes it apart into what is trained and what is frozen.
    """

    base: LlamaLMHeadModel
    adapters: dict[str, LowRankPair] | None
    """By their names; None where `split_trained` has taken them away."""
    scale: float = eqx.field(static=True)

    @property
    def config(self) -> LlamaConfig:
        """See `LlamaLMHeadModel`; so for all that it has."""
        return self.base.config

    @property
    def Vocab(self) -> Axis:
        return self.base.Vocab

    @property
    def logit_soft_cap(self) -> float | None:
        return self.base.logit_soft_cap

    def activations(self, input_ids: NamedArray, segment_ids: NamedArray | None = None) -> NamedArray:
        return self.adapted().activations(input_ids, segment_ids)

    def activations_and_router(
        self,
        input_ids: NamedArray,
        segment_ids: NamedArray | None = None,
        engine: EngineRouting | None = None,
        known: NamedArray | None = None,
        counted: NamedArray | None = None,
    ) -> tuple[NamedArray, RouterSums | None]:
        return self.adapted().activations_and_router(input_ids, segment_ids, engine, known, counted)

    def lm_head_array(self) -> NamedArray:
        return self.base.lm_head_array()

    def logits(self, activations: NamedArray) -> NamedArray:
        return self.base.logits(activations)

    def __call__(self, input_ids: NamedArray, segment_ids: NamedArray | None = None) -> NamedArray:
        return self.logits(self.activations(input_ids, segment_ids))

    def adapted(self) -> LlamaLMHeadModel:
        """Return the model with its adapters beside the weights; nothing is computed."""
        pairs = self.pairs
        return self._with({name: AdaptedWeight(self.weight(name), pairs[name], self.scale) for name in pairs})

    @property
    def pairs(self) -> dict[str, LowRankPair]:
        """The adapters, which must not have been split off."""
        assert self.adapters is not None, "the adapters have been split off"
        return self.adapters

    def weight(self, name: str) -> NamedArray:
        """Return the frozen weight that an adapter is for."""
        frozen: NamedArray = _find(self.base.layers.stacked, weight_of(name))
        return frozen

    def merge_of(self, name: str) -> MergeLora:
        """Return what makes one layer's merged weight of the weight and the two factors."""
        weight, pair = self.weight(name), self.pairs[name]
        names = [[axis.name for axis in part.axes if axis.name != "layer"] for part in (pair.a, pair.b, weight)]
        letters = dict(zip((*names[2], RANK), string.ascii_letters, strict=False))
        a, b, merged = ("".join(letters[axis] for axis in part) for part in names)
        return MergeLora(equation=f"{a},{b}->{merged}", scale=self.scale)

    def with_weights(self, weights: dict[str, Array]) -> LlamaLMHeadModel:
        """Return the model with other weights in place of those that have adapters, such as merged ones.

        Args:
            weights: The weights by the name of the linear layer, with the axes of the frozen ones.
        """
        return self._with({name: hax.named(array, self.weight(name).axes) for name, array in weights.items()})

    def _with(self, weights: dict[str, Any]) -> LlamaLMHeadModel:
        def places(model: LlamaLMHeadModel) -> list[Any]:
            return [_find(model.layers.stacked, weight_of(name)) for name in weights]

        model: LlamaLMHeadModel = eqx.tree_at(places, self.base, list(weights.values()))
        return model


def split_trained(model: PyTree) -> tuple[PyTree, PyTree]:
    """Return what of a model is trained, and what is frozen: the adapters of a `LoraModel`, of others everything.

    Args:
        model: The model; nothing is copied.

    Returns:
        The trained part, and the frozen part, None where there is none. `join_trained` puts them together.
    """
    if isinstance(model, LoraModel):
        return model.adapters, dataclasses.replace(model, adapters=None)
    return model, None


def join_trained(trained: PyTree, frozen: PyTree) -> PyTree:
    """Return the model that `split_trained` has taken apart.

    Args:
        trained: The trained part, or another in its place.
    """
    return trained if frozen is None else dataclasses.replace(frozen, adapters=trained)


@register_reader(LoraModel)
def _read_lora(model: LoraModel) -> tuple[LlamaConfig, DecoderWeights]:
    """The weights of the base by reference; those with adapters are merged while they are resharded."""
    config, weights = read_registered(model.base)
    lazy: dict[str, Any] = {weight_of(name): _merged_on_the_way(model, name) for name in model.pairs}
    return config, dataclasses.replace(weights, layers=dataclasses.replace(weights.layers, **lazy))


def _merged_on_the_way(model: LoraModel, name: str) -> LazyWeight:
    """Each device merges its own blocks: the factors are split over the mesh as the axes of the weight are."""
    weight, pair = model.weight(name).array, model.pairs[name]
    return LazyWeight(
        parts=(weight, pair.a.array, pair.b.array),
        assemble=model.merge_of(name),
        shape=weight.shape,
        dtype=weight.dtype,
        sharding=resharded(weight, axis_specs(weight)),
        stacked=True,
    )


def merge_adapters(model: LoraModel, hosts: Hosts, dtype: Any = None) -> LlamaLMHeadModel:
    """Make the model that a model with adapters computes; every host makes this call.

    Until the result is dropped, the devices hold a second copy of the weights that have adapters; other weights are
    the model's own arrays. The programs are compiled once per run. With ``numerics: exact`` a merged weight has the
    bits that engine and trainer compute with, where that is in the narrower of the two types.

    Args:
        model: The model on the mesh; it is not changed.
        dtype: The dtype of the merged weights; None for that of the frozen ones. Exact ones are not widened.

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
                structs = [jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding) for array in arrays]
                target, merge = jnp.dtype(structs[0].dtype if dtype is None else dtype), model.merge_of(name)
                if model.config.exact:
                    target = narrower(structs[0].dtype, target)
                    merge = dataclasses.replace(merge, exact=target.name)
                programs[name] = _program(merge, *structs, target, mesh_of(arrays[0]), hosts.ledger)
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
