"""The proof of ``numerics: exact``: its operations as training has them and as decode has them, compared bit by bit.

Whether XLA gives a row the same bits alone and beside others depends on its version, its flags and the machine
(docs/adr/0038-exact-numerics.md). So each process computes, before the first program that relies on it, products of the
model's shapes, attention and functions: of all rows at once, as in training; and of one row after the other in a loop,
with half of the blocks, as on one of two devices that decode.
"""

import dataclasses
import functools
import importlib.metadata
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from lockstep.errors import ConfigError
from lockstep.hosts import digest
from lockstep.models import LlamaConfig, block
from lockstep.models.attention import ScoreModifier, attend_exact, contiguous_blocks
from lockstep.placement.device import MOST_ROWS, add_blocks, blocks_of, elementwise, own_settings, product

AGREED: Final = "bits of numerics exact, of which machines of another kind have others"
"""The name under which hosts agree on the digest of a proof."""

_ROWS: Final = MOST_ROWS
"""Rows of training: the largest tile of a product in 16 bits."""
_STEPS: Final = 4
_KEYS: Final = _ROWS + 32
"""Positions that attention looks at: more than one block."""
_LARGEST: Final = 1024
"""Terms and columns of a product at most: larger ones are cut to a multiple of their blocks."""
_QUERY_HEADS: Final = 16
"""Query heads of a latent at most."""
_WIDTH: Final = 72
"""Numbers of a row that functions are applied to: rows begin within a vector of 128, and end within one."""


class ProductShape(NamedTuple):
    """A product with a weight ``[terms, columns]``, either in blocks."""

    terms: int
    columns: int
    inner: int = 1  # blocks of the terms
    outer: int = 1  # blocks of the columns
    transposed: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Numerics:
    """Shapes, functions and type of a model with ``numerics: exact``."""

    products: tuple[ProductShape, ...]
    heads: tuple[int, int, int, int]  # kv heads, query heads of each, the size of a key and of a value
    soft_cap: float | None  # of attention
    activation: str
    dtype: str

    @classmethod
    def of(cls, config: LlamaConfig, vocab: int, dtype: Any) -> "Numerics":
        """Those of a model whose embedding has ``vocab`` rows."""
        embed, size, kv_heads, latent = config.hidden_dim, config.head_size, config.num_kv_heads, config.latent
        heads = kv_heads, config.q_heads_per_group, size, size
        widths = {config.expert_dim} | ({config.intermediate_dim} if config.mixes_mlps else set())
        if config.experts is not None and config.experts.shared_intermediate_dim:
            widths.add(config.experts.shared_intermediate_dim)
        if latent is None:
            shapes = [_wide(embed, count, size) for count in {config.num_heads: 0, kv_heads: 0}]
        else:
            queries, nope, rank = latent.q_lora_rank, latent.qk_nope_head_dim, latent.kv_lora_rank
            plain = [(embed, latent.size), (nope, rank), (rank, latent.v_head_dim)]
            plain += [] if queries is None else [(embed, queries)]
            shapes = [ProductShape(min(terms, _LARGEST), min(columns, _LARGEST)) for terms, columns in plain]
            shapes.append(_wide(queries or embed, config.num_heads, size))
            heads = 1, min(config.num_heads, _QUERY_HEADS), latent.size, rank
        shapes += [_wide(embed, width) for width in sorted(widths)]
        shapes.append(_deep(config.num_heads, embed, config.value_size))
        shapes += [_deep(width, embed) for width in sorted(widths)]
        shapes.append(_wide(embed, vocab)._replace(transposed=config.tie_word_embeddings))
        return cls(
            products=tuple(dict.fromkeys(shapes)),
            heads=heads,
            soft_cap=config.variant.attention_soft_cap,
            activation=config.variant.activation,
            dtype=jnp.dtype(dtype).name,
        )


def _wide(terms: int, things: int, size: int = 1) -> ProductShape:
    """A product whose columns are ``things`` of a size, which the devices of a replica split."""
    return ProductShape(min(terms, _LARGEST), _cut(things, size), outer=blocks_of(things))


def _deep(things: int, columns: int, size: int = 1) -> ProductShape:
    """A product whose terms are ``things`` of a size, which the devices of a replica split."""
    return ProductShape(_cut(things, size), min(columns, _LARGEST), inner=blocks_of(things))


def _cut(things: int, size: int) -> int:
    multiple = blocks_of(things) * size
    return things * size if things * size <= _LARGEST else max(1, _LARGEST // multiple) * multiple


def prove_exact(config: LlamaConfig, vocab: int, dtype: Any, platform: str) -> str | None:
    """Refuse ``numerics: exact`` where it is not; proved once in a process, in about a second.

    It may be called while a program is traced: what it launches are small programs of one device of this process.

    Args:
        vocab: The number of rows of the embedding.
        dtype: The type that is computed in.
        platform: That of the devices; nothing is proved where this process only compiles for them.

    Returns:
        The digest of all bits, which is the same on machines of the same kind; None where nothing was proved.

    Raises:
        ConfigError: A row has other bits alone than beside others; names the operation.
    """
    if platform not in {"cpu", jax.default_backend()}:
        return None
    return _prove(Numerics.of(config, vocab, dtype), platform)


@functools.cache
def _prove(numerics: Numerics, platform: str) -> str:
    device = jax.local_devices(backend=platform)[0]
    rows, weights = _numbers(numerics)
    last = jax.tree.map(lambda array: array[-_STEPS:, None], rows)
    together = functools.partial(_operations, numerics, training=True)

    def in_a_loop(rows: Any, weights: Any) -> dict[str, Array]:
        return jax.lax.map(lambda row: _operations(numerics, row, weights, training=False), rows)

    def compile(function: Any, rows: Any) -> Any:
        with own_settings():
            sharding = jax.sharding.SingleDeviceSharding(device)
            return jax.jit(function, in_shardings=sharding, out_shardings=sharding).lower(rows, weights).compile()

    def launch(program: Any, rows: Any) -> Mapping[str, np.ndarray]:
        with own_settings():
            return jax.device_get(program(rows, weights))

    # Other threads have neither a mesh nor a trace, whatever the caller is in. All processes launch in the same order.
    with ThreadPoolExecutor(2) as threads:
        programs = list(threads.map(compile, (together, in_a_loop), (rows, last)))
        trained, decoded = (
            threads.submit(launch, *program_and_rows).result()
            for program_and_rows in zip(programs, (rows, last), strict=True)
        )
    for name, numbers in decoded.items():
        alone = numbers[:, 0]
        beside = trained[name][-_STEPS:, -alone.shape[1] :]
        different = np.any(_bits(alone) != _bits(beside), axis=1)
        if different.any():
            jaxlib = importlib.metadata.version("jaxlib")
            raise ConfigError(
                f"numerics is exact, and here it is not: {name} in {numerics.dtype} on {platform} gives "
                f"{different.sum()} of {_STEPS} rows other bits alone than beside others, with jaxlib {jaxlib} "
                "on this machine. Set numerics to fast; or take away what differs from a machine where it is exact: "
                "XLA_FLAGS, the version of jaxlib, the kind of CPU (docs/exact.md)."
            )
    return digest(*(np.ascontiguousarray(numbers).tobytes() for numbers in trained.values()))


def _bits(numbers: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(numbers).view(f"u{numbers.itemsize}")


def _numbers(numerics: Numerics) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The same numbers in each process: rows, and what all rows have in common."""
    rng, dtype = np.random.default_rng(0), jnp.dtype(numerics.dtype)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32).astype(dtype)

    kv_heads, group, size, _ = numerics.heads
    inputs = {terms: normal(_ROWS, terms) for terms in {shape.terms: 0 for shape in numerics.products}}
    rows = {
        "inputs": inputs,
        "queries": normal(_ROWS, kv_heads, group, size),
        "position": np.arange(_KEYS - _ROWS, _KEYS, dtype=np.int32),
        "numbers": normal(_ROWS, _WIDTH),
    }
    products = [normal(*_stored(shape)) for shape in numerics.products]
    return rows, {"products": products, "keys": normal(2, kv_heads, _KEYS, size)}


def _stored(shape: ProductShape) -> tuple[int, int]:
    return (shape.columns, shape.terms) if shape.transposed else (shape.terms, shape.columns)


def _operations(numerics: Numerics, rows: Any, weights: Any, *, training: bool) -> dict[str, Array]:
    """The results by operation, each ``[row, number]``.

    Args:
        training: Whether the rows are one sequence, and weights whole; else each row is the last position of its own,
            and only the second half of the columns of a weight are there, or its blocks one by one.
    """
    results = {}
    for shape, weight in zip(numerics.products, weights["products"], strict=True):
        name = f"a product of {shape.terms} terms for {shape.columns} columns"
        results[name] = _product(shape, rows["inputs"][shape.terms], weight, whole=training)
    queries, position, (k, v) = rows["queries"], rows["position"], weights["keys"]
    axis, sequences = (0, 1) if training else (1, len(queries))
    k, v = (jnp.broadcast_to(part, (sequences, *part.shape)) for part in (k, v[..., : numerics.heads[3]]))
    attended = attend_exact(
        jnp.expand_dims(queries, axis), jnp.expand_dims(position, axis), *contiguous_blocks(k, v),
        ScoreModifier(soft_cap=numerics.soft_cap),
    )  # fmt: skip
    results["attention"] = attended.reshape(len(queries), -1)
    x = rows["numbers"]
    results["an activation"] = _activation(numerics.activation, x)
    wide = x.astype(jnp.float32)
    functions = (jnp.cos, jnp.sin, jax.nn.sigmoid, lambda x: jnp.log(jnp.abs(x)))
    results["a function"] = jnp.concatenate([elementwise(function, wide) for function in functions], axis=1)
    return results


def _product(shape: ProductShape, x: Array, weight: Array, *, whole: bool) -> Array:
    if shape.inner > 1:  # two blocks stand for all, which are added in pairs
        blocks = [jnp.split(operand, shape.inner, axis=axis)[:2] for operand, axis in ((x, 1), (weight, 0))]
        if whole:
            return product(jnp.concatenate(blocks[0], axis=1), jnp.concatenate(blocks[1]), inner=2)
        return add_blocks(jnp.stack([product(*pair) for pair in zip(*blocks, strict=True)]))
    columns = shape.outer
    if columns > 1 and not whole:
        columns, weight = columns // 2, jnp.split(weight, 2, axis=0 if shape.transposed else 1)[1]
    return product(x, weight, columns=columns, transposed=shape.transposed)


def _activation(name: str, x: Array) -> Array:
    gate = x if name in block.ACTIVATIONS else None
    parameters = (
        tuple(jnp.asarray(parameter, x.dtype) for parameter in (0.8, -1.0, 0.5, -1e-6)) if name == "xielu" else ()
    )
    return block.hidden(name, x, gate, parameters, elementwise)
