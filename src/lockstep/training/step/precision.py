"""The float types of parameters and arithmetic, written as in google-deepmind/jmp: ``p=f32,c=bf16``."""

import dataclasses
from typing import Final

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from lockstep.errors import ConfigError

_TYPES: Final = {
    "f32": jnp.float32,
    "float32": jnp.float32,
    "full": jnp.float32,
    "bf16": jnp.bfloat16,
    "bfloat16": jnp.bfloat16,
    "f16": jnp.float16,
    "float16": jnp.float16,
    "half": jnp.float16,
}
_KEYS: Final = {"p": "param", "params": "param", "c": "compute", "compute": "compute"}
_USAGE: Final = "Write one type for both ('f32') or pairs such as 'p=f32,c=bf16'; types: " + ", ".join(_TYPES)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Precision:
    """The float types of a training run."""

    param: jnp.dtype
    """The type of stored parameters, gradients and optimizer state."""
    compute: jnp.dtype
    """The type of the arithmetic inside the model; losses are summed in float32 whatever it is."""

    def cast_to_compute(self, tree: PyTree) -> PyTree:
        """Cast the floating-point arrays of a tree to the compute type; others are left as they are."""
        return cast_floats(tree, self.compute)

    def cast_to_param(self, tree: PyTree) -> PyTree:
        """Cast the floating-point arrays of a tree to the parameter type; others are left as they are."""
        return cast_floats(tree, self.param)


def cast_floats(tree: PyTree, dtype: jnp.dtype) -> PyTree:
    """Cast the floating-point arrays of a tree.

    Args:
        tree: Any tree of arrays. Inside a jitted program the cast is no launch of its own.

    Returns:
        The tree, integer and boolean leaves untouched.
    """
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


def parse_precision(policy: str) -> Precision:
    """Read a policy string.

    Args:
        policy: One type for both, or comma-separated ``p=`` (float32 where it is left out) and ``c=`` (that of ``p``
            where it is left out). jmp's ``o=`` is refused, because it would have no effect.

    Raises:
        ConfigError: The string names an unknown key or type.
    """
    if "=" not in policy:
        only = _read_type(policy, policy)
        return Precision(param=only, compute=only)
    found: dict[str, jnp.dtype] = {}
    for part in policy.split(","):
        key, _, name = part.strip().partition("=")
        if key not in _KEYS or _KEYS[key] in found:
            raise ConfigError(f"mp is {policy!r}: {part.strip()!r} is not one of p= and c=, each once. {_USAGE}")
        found[_KEYS[key]] = _read_type(name, policy)
    param = found.get("param", jnp.dtype(jnp.float32))
    return Precision(param=param, compute=found.get("compute", param))


def _read_type(name: str, policy: str) -> jnp.dtype:
    if name.strip() not in _TYPES:
        raise ConfigError(f"mp is {policy!r}: {name.strip()!r} is not a known float type. {_USAGE}")
    return jnp.dtype(_TYPES[name.strip()])
