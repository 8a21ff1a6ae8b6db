"""The operations of a layer inside ``shard_map``, as one device of a replica runs them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from lockstep.models import LayerWeights, LlamaConfig, block
from lockstep.models.latent import LatentQueries, absorbed, values_of
from lockstep.models.layers import Attend, Ops
from lockstep.placement import DecodeMesh, QuantizedWeight, matmul
from lockstep.placement.device import add_blocks, add_heads, barrier, blocks_of, elementwise, product, tree_sum


@dataclasses.dataclass(frozen=True)
class Sharded(Ops):
    """`Ops` of a device that has its part of heads and columns, and adds up what all have.

    Rows are ``[sequence, query]``.
    """

    config: LlamaConfig
    decode_mesh: DecodeMesh

    @property
    def epsilon(self) -> float:
        """See `Ops`; so for all methods."""
        return self.config.layer_norm_epsilon

    def local(self, size: int) -> int:
        return size // self.decode_mesh.tensor

    def columns(
        self, x: Array, weight: Any, shape: tuple[int, ...], *, units: int, bias: Any = None
    ) -> Float[Array, "..."]:
        flat = matmul(x, weight)
        return (flat if bias is None else flat + bias.reshape(-1)).reshape(*x.shape[:-1], *shape)

    def part(self, x: Array, weight: Any, *, units: int) -> Float[Array, "*row embed"]:
        return matmul(x.reshape(*x.shape[:2], -1), weight, axes=-1)

    def total(self, part: Array) -> Array:
        return jax.lax.psum(part, self.decode_mesh.tensor_axes) if self.decode_mesh.tensor > 1 else part

    def norm(self, x: Array, weight: Any, *, wide: bool = False, epsilon: float | None = None) -> Array:
        mean = (lambda numbers: self._mean(numbers, weight)) if wide else None
        return self.config.norm.with_epsilon(epsilon)(x, weight, mean=mean)

    def _mean(self, numbers: Array, weight: Array) -> Array:
        axes = tuple(range(-weight.ndim, 0))
        return self.total(jnp.sum(numbers, axis=axes, keepdims=True)) / (weight.size * self.decode_mesh.tensor)

    def hidden(self, w: LayerWeights, up: Array, gate: Array | None) -> Array:
        return block.hidden(self.config.variant.activation, up, gate, (w.xielu_p, w.xielu_n, w.xielu_beta, w.xielu_eps))

    def gate(self, x: Array, h: Array, weight: Any) -> Array:
        return x * jax.nn.sigmoid(matmul(h, weight))

    def attend_latent(self, q: LatentQueries, latent: Array, kv_b: Any, attend: Attend) -> Array:
        heads, nope = q.plain.shape[-2:]
        rank = len(kv_b)
        kv_b = kv_b.reshape(rank, heads, -1)
        attended = attend(absorbed(q, kv_b), latent[..., None, :], latent[..., None, :rank])
        return values_of(attended.reshape(*q.plain.shape[:-1], rank), kv_b[..., nope:])[..., None, :]

    def keep(self, x: Array) -> Array:
        # The TPU compiler joins the norm with each of the products, and each then reads the residual stream from HBM.
        return jax.lax.optimization_barrier(x)


@dataclasses.dataclass(frozen=True)
class Exact(Sharded):
    """`Sharded` with the same bits however many devices there are, see ``docs/exact.md``: `part` returns the total."""

    def columns(
        self, x: Array, weight: Any, shape: tuple[int, ...], *, units: int, bias: Any = None
    ) -> Float[Array, "..."]:
        assert not isinstance(weight, QuantizedWeight)
        flat = product(barrier(x), weight.reshape(len(weight), -1), columns=self.blocks(units))
        flat = barrier(flat.astype(x.dtype))
        return (flat if bias is None else barrier(flat + bias.reshape(-1))).reshape(*x.shape[:-1], *shape)

    def part(self, x: Array, weight: Any, *, units: int) -> Float[Array, "*row embed"]:
        assert not isinstance(weight, QuantizedWeight)
        x = x.reshape(*x.shape[:2], -1)
        part = product(barrier(x), weight.reshape(-1, weight.shape[-1]), inner=self.blocks(units))
        if self.decode_mesh.tensor > 1:
            part = add_blocks(jax.lax.all_gather(part, self.decode_mesh.tensor_axes))
        return barrier(part.astype(x.dtype))

    def total(self, part: Array) -> Array:
        return part

    def norm(self, x: Array, weight: Any, *, wide: bool = False, epsilon: float | None = None) -> Array:
        if weight is None:
            return x
        devices, axes = (self.decode_mesh.tensor, self.decode_mesh.tensor_axes) if wide else (1, ())

        def mean(numbers: Array) -> Array:
            return barrier(add_heads(tree_sum(numbers), weight.ndim - 1, axes) / (weight.size * devices))

        return barrier(self.config.norm.with_epsilon(epsilon)(barrier(x), weight, mean=mean, fix=barrier))

    def hidden(self, w: LayerWeights, up: Array, gate: Array | None) -> Array:
        xielu = (w.xielu_p, w.xielu_n, w.xielu_beta, w.xielu_eps)
        return block.hidden(self.config.variant.activation, up, gate, xielu, elementwise)

    def gate(self, x: Array, h: Array, weight: Any) -> Array:
        logits = tree_sum(h.astype(jnp.float32) * weight[:, 0].astype(jnp.float32))
        return x * barrier(elementwise(jax.nn.sigmoid, logits).astype(h.dtype))[..., None]

    def attend_latent(self, q: LatentQueries, latent: Array, kv_b: Any, attend: Attend) -> Array:
        heads, nope = q.plain.shape[-2:]
        rank = len(kv_b)
        by_head = kv_b.reshape(rank, heads, -1).swapaxes(0, 1)
        of_latent = _by_head(q.plain, by_head[..., :nope].swapaxes(1, 2))
        queries = barrier(q.joined(of_latent))[..., None, :, :]
        attended = attend(queries, latent[..., None, :], latent[..., None, :rank])
        return _by_head(attended.reshape(*q.plain.shape[:-1], rank), by_head[..., nope:])[..., None, :]

    def fix[X](self, x: X) -> X:
        return barrier(x)

    def blocks(self, local: int) -> int:
        """The number of blocks of an axis that the devices of a replica split, of which this one has ``local``."""
        return blocks_of(local * self.decode_mesh.tensor) // self.decode_mesh.tensor


def _by_head(x: Float[Array, "*row head inputs"], weight: Float[Array, "head inputs columns"]) -> Array:
    """The product of each head with its own weight ``[*row, head, columns]``, head after head: many at once would be
    added in another order than those of a device that has some.
    """

    def multiply(operands: tuple[Array, Array]) -> Array:
        return jnp.asarray(barrier(product(*barrier(operands)).astype(x.dtype)))

    return jnp.moveaxis(jax.lax.map(multiply, (jnp.moveaxis(x, -2, 0), weight)), 0, -2)
