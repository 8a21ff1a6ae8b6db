"""The arrays of training: what a step changes, frozen parameters beside it, the moving average; their float types."""

import dataclasses
from typing import Any, Final, NamedTuple, Self

import haliax as hax
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int, PyTree

from lockstep.errors import ConfigError
from lockstep.models import join_trained, split_trained
from lockstep.placement import parameter_axes

_TYPES: Final = {
    "f32": jnp.float32,
    "float32": jnp.float32,
    "full": jnp.float32,
    "bf16": jnp.bfloat16,
    "bfloat16": jnp.bfloat16,
}
_FLOAT16: Final = ("f16", "float16", "half")
_KEYS: Final = {"p": "param", "params": "param", "c": "compute", "compute": "compute"}
_USAGE: Final = "Write one type for both ('f32') or pairs such as 'p=f32,c=bf16'; types: " + ", ".join(_TYPES)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Precision:
    """The float types of a training run."""

    param: jnp.dtype  # of stored parameters, gradients (sums of microbatches are in float32) and optimizer state
    compute: jnp.dtype  # the type of the arithmetic inside the model; losses are summed in float32 whatever it is

    def cast_to_compute(self, tree: PyTree) -> PyTree:
        """Cast the floating-point arrays of a tree to the compute type; others are left as they are."""
        return cast_floats(tree, self.compute)

    def cast_to_param(self, tree: PyTree) -> PyTree:
        """Cast the floating-point arrays of a tree to the parameter type; others are left as they are."""
        return cast_floats(tree, self.param)


def cast_floats(tree: PyTree, dtype: jnp.dtype) -> PyTree:
    """Cast the floating-point arrays of a tree; others stay. In a jitted program it is no launch of its own."""
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepSettings:
    """The settings of a run that are part of the program of its train step."""

    precision: Precision
    repeats: int = 1  # the number of times that microbatches pass through all stages
    skip_bad: bool = False
    """Whether a step whose loss or gradient is not finite, or whose loss is above a limit, leaves parameters and
    optimizer state as they are."""
    reduce_dtype: jnp.dtype | None = None  # in which slices add up their gradients; None: that of the gradients


def parse_precision(policy: str) -> Precision:
    """Read a policy string.

    Args:
        policy: One type for both, or comma-separated ``p=`` (float32 where it is left out) and ``c=`` (that of ``p``
            where it is left out). jmp's ``o=`` is refused, because it would have no effect.

    Raises:
        ConfigError: The string names an unknown key or type, or float16.
    """
    if "=" not in policy:
        only = _read_type(policy, policy)
        return Precision(param=only, compute=only)
    types: dict[str, jnp.dtype] = {}
    for part in policy.split(","):
        key, _, name = part.strip().partition("=")
        if key not in _KEYS or _KEYS[key] in types:
            raise ConfigError(f"mp is {policy!r}: {part.strip()!r} is not one of p= and c=, each once. {_USAGE}")
        types[_KEYS[key]] = _read_type(name, policy)
    param = types.get("param", jnp.dtype(jnp.float32))
    return Precision(param=param, compute=types.get("compute", param))


def _read_type(name: str, policy: str) -> jnp.dtype:
    if name.strip() in _FLOAT16:
        raise ConfigError(
            f"mp is {policy!r}, and float16 cannot train: gradients of single tokens are below its least number, and "
            "losses are not scaled. Use bf16 (as in p=f32,c=bf16) or f32."
        )
    if name.strip() not in _TYPES:
        raise ConfigError(f"mp is {policy!r}: {name.strip()!r} is not a known float type. {_USAGE}")
    return jnp.dtype(_TYPES[name.strip()])


class AverageState(NamedTuple):
    """The state of `average_parameters`."""

    average: PyTree  # the average in float32: a narrower type would round away what a step adds


def average_parameters(decay: float) -> optax.GradientTransformation:
    """Keep an average of the parameters that each step moves by ``1 - decay`` towards the new ones.

    It begins with the first parameters, and changes no update. It has to be the last part of an optimizer.
    """

    def init(parameters: PyTree) -> AverageState:
        return AverageState(average=cast_floats(parameters, jnp.dtype(jnp.float32)))

    def update(updates: PyTree, state: AverageState, parameters: PyTree | None = None) -> tuple[PyTree, AverageState]:
        assert parameters is not None, "the average is of parameters"
        new = optax.apply_updates(parameters, updates)
        average = jax.tree.map(lambda a, p: decay * a + (1.0 - decay) * p.astype(a.dtype), state.average, new)
        return updates, AverageState(average=average)

    return optax.GradientTransformation(init, update)


def average_of(opt_state: PyTree) -> PyTree | None:
    """Return the average that the state of an optimizer has; None where it keeps none. Launches nothing."""
    parts = jax.tree.leaves(opt_state, is_leaf=lambda part: isinstance(part, AverageState))
    return next((part.average for part in parts if isinstance(part, AverageState)), None)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainState:
    """All that a step changes, and frozen parameters, where there are any, beside it.

    What a step changes is donated to the next step, so only the newest state can be read.
    """

    step: Int[Array, ""]  # the number of completed steps
    model: PyTree  # the parameters, in the parameter type and sharding; of a `LoraModel` also those that are frozen
    opt_state: PyTree
    """The state of the optimizer, sharded as the parameters that it belongs to: those that are trained."""

    @property
    def average(self) -> PyTree | None:
        """The model with the average of its trained parameters, where the optimizer keeps one (``ema_decay``)."""
        average = average_of(self.opt_state)
        return None if average is None else join_trained(average, split_trained(self.model)[1])

    def split(self) -> tuple[Self, PyTree]:
        """Return the state with what is trained in place of the model, and what is frozen; None where nothing is."""
        trained, frozen = split_trained(self.model)
        return dataclasses.replace(self, model=trained), frozen

    def join(self, frozen: PyTree) -> Self:
        """Return the state that `split` has taken apart."""
        return dataclasses.replace(self, model=join_trained(self.model, frozen))


def parameter_shardings(tree: PyTree, mesh: Mesh) -> PyTree:
    """Return the sharding of every array of a model or of an optimizer state.

    Args:
        tree: Haliax arrays or their shapes; an array without axis names is replicated.

    Raises:
        ConfigError: The mesh does not divide an axis.
    """
    axes = parameter_axes(mesh)

    def sharding(path: tuple[Any, ...], leaf: Any) -> Any:
        if not _named(leaf):
            return NamedSharding(mesh, P())
        for axis in leaf.axes:
            mesh_axis = axes.get(axis.name)
            if mesh_axis is not None and axis.size % mesh.shape[mesh_axis]:
                raise ConfigError(
                    f"parameter {jax.tree_util.keystr(path)}: its axis {axis.name!r} has size {axis.size}, which the "
                    f"mesh axis {mesh_axis!r} of size {mesh.shape[mesh_axis]} does not divide. Choose a mesh_shape "
                    f"whose {mesh_axis} divides {axis.size} (mesh now: {dict(mesh.shape)}), or change the model."
                )
        spec = P(*(axes.get(axis.name) for axis in leaf.axes))
        return jax.tree.map(lambda _: NamedSharding(mesh, spec), leaf)

    return jax.tree_util.tree_map_with_path(sharding, tree, is_leaf=_named)


def _named(leaf: Any) -> bool:
    return isinstance(leaf, hax.NamedArray)
