"""The operations of XLA whose bits depend on what is computed beside them, and the price of those that do not.

    python -m benchmarks.exact [--only bits|price] [--json PATH]

``numerics: exact`` is built on the first table: each row is an operation on some rows of a batch, or some columns of a
weight, the same numbers beside others, compared bit by bit with the largest. The second has rates of ``exact`` over
those of ``fast``, measured side by side.
"""

import argparse
import dataclasses
import functools
import math
import operator
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.contestants import Ours, one_device, side_by_side
from benchmarks.shapes import MODEL, VOCAB, Load
from benchmarks.workers import write_json
from lockstep.models import DecoderWeights, as_trainable
from lockstep.training.objectives import token_logprobs

ROWS = (1, 2, 3, 16, 64, 256)
TILE = 16
SPLITS = (1, 2, 4, 8)
SIZES = (1, 2, 3, 4, 5, 8, 12, 15, 16, 24, 48)
LOAD = Load(8, 64, 32)
FORWARD = (8, 128)
"""Rows and positions of the training forward."""
GOALS = {"decode_exact_vs_fast": 0.7, "prefill_exact_vs_fast": 0.7, "forward_exact_vs_fast": 0.7}
PRODUCTS = ((64, 96), (512, 512), (512, 1376), (1376, 512))
IN_TURN = ((64, 96), (128, 512), (128, 1376), (512, 1376))
"""Terms and columns of products that are compared with sums of one term after the other."""
IN_TURN_ROWS = (16, 24, 48, 96, 256, 512)


class Finding(NamedTuple):
    """An operation, what is changed beside it, and where its bits are not those of the reference."""

    operation: str
    dtype: str
    shape: str
    varied: str
    differs_at: tuple[int, ...]


def main() -> int:
    """Compute, print a table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["bits", "price"], help="one of the two tables")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    given = parser.parse_args()
    figures: dict[str, Any] = {}
    if given.only != "bits":
        figures |= prices()
        table = Table("exact over fast", "goal", "bfloat16", "float32")
        for name, goal in GOALS.items():
            table.add_row(name, f">= {goal}", *(f"{figures[f'{name}{suffix}']:.2f}" for suffix in ("", "_float32")))
        Console().print(table)
    if given.only != "price":
        findings = list(all_findings())
        table = Table(
            "operation", "type", "shape", "varied", "bits differ at", title=f"bits on {jax.default_backend()}"
        )
        for each in findings:
            differs = ", ".join(map(str, each.differs_at)) or "-"
            table.add_row(each.operation, each.dtype, each.shape, each.varied, differs)
        Console().print(table)
        figures["bits"] = [each._asdict() for each in findings]
    if given.json:
        write_json(given.json, figures)
    return 0


def prices() -> dict[str, float]:
    """Rates of exact over those of fast; names end in ``_float32`` where they are not of bfloat16."""
    figures = {}
    for dtype, suffix in (("bfloat16", ""), ("float32", "_float32")):
        ours = {name: Ours(one_device(), dtype=dtype) for name in ("fast", "exact")}
        weights = ours["fast"].model[1]
        for name, one in ours.items():
            one.model = (dataclasses.replace(MODEL, numerics=name), weights)
        times = side_by_side(dict(ours), LOAD, 3)
        for phase in ("decode", "prefill"):
            exact, fast = (getattr(times[name], f"{phase}_rate")(LOAD) for name in ("exact", "fast"))
            figures[f"{phase}_exact_vs_fast{suffix}"] = exact / fast
        cast = jax.tree.map(operator.methodcaller("astype", dtype), weights)
        fast, exact = _forward_seconds(cast)
        figures[f"forward_exact_vs_fast{suffix}"] = fast / exact
    return figures


def _forward_seconds(weights: DecoderWeights) -> list[float]:
    """Seconds of the log-probabilities of a batch: fast and exact, the least of several."""
    tokens = jnp.asarray(_generator().integers(0, VOCAB, FORWARD), jnp.int32)

    def compute(weights: DecoderWeights, numerics: Any) -> Any:
        model = as_trainable(dataclasses.replace(MODEL, numerics=numerics), weights)
        return token_logprobs(model, {"tokens": tokens}).sum()

    programs = [jax.jit(functools.partial(compute, numerics=numerics)) for numerics in ("fast", "exact")]
    seconds = []
    for turn in range(4):  # the first compiles
        for program in programs:
            start = time.perf_counter()
            jax.block_until_ready(program(weights))
            seconds.append(time.perf_counter() - start if turn else math.inf)
    return [min(seconds[0::2]), min(seconds[1::2])]


def all_findings() -> Iterator[Finding]:
    """Every row of the table."""
    for dtype in ("bfloat16", "float32"):
        for inner, columns in PRODUCTS:
            x, w = _normal((max(ROWS), inner), dtype), _normal((inner, columns), dtype)
            shape = f"{inner} x {columns}"
            yield _by_rows("product", dtype, shape, lambda a, w=w: _dot(a, w), x)
            yield _by_rows(f"product, tiles of {TILE} rows", dtype, shape, lambda a, w=w: _tiled(a, w), x)
            yield _by_columns(f"product of {TILE} rows", dtype, shape, x[:TILE], w)
            yield _by_inner(f"product of {TILE} rows", dtype, shape, x[:TILE], w)
            yield _by_place(f"product of {TILE} rows", dtype, shape, x[:TILE], w)
        for inner, columns in IN_TURN:
            x, w = _normal((max(ROWS), inner), dtype), _normal((inner, columns), dtype)
            for name, dot in (("product", _dot), ("product, first operand transposed", _dot_transposed)):
                yield _in_turn(name, dtype, f"{inner} x {columns}", dot, x, w)
        q, k = _normal((max(ROWS), TILE, 64), dtype), _normal((max(ROWS), 64, 128), dtype)
        yield _by_rows("product for each sequence", dtype, "16 x 64 x 128", lambda a, k=k: _dot(a, k[: len(a)]), q)
        q, k = _normal((max(ROWS), TILE, 64), dtype), _normal((TILE, 64, 128), dtype)
        yield _by_rows(f"product for each of {TILE} sequences", dtype, "64 x 128", lambda a, k=k: _by_sequence(a, k), q)
    for name, function in _ROW_OPERATIONS.items():
        for width in (64, 172, 2004):
            yield _by_rows(name, "float32", str(width), function, _normal((max(ROWS), width), "float32"))
    for name, function in _ELEMENTWISE.items():
        yield _by_rows(name, "float32", "500", function, jnp.abs(_normal((max(ROWS), 500), "float32")))
        yield _by_size(name, "float32", function, jnp.abs(_normal((4080,), "float32")))


_ROW_OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "sum": lambda x: jnp.sum(x, axis=-1),
    "mean of squares": lambda x: jnp.mean(jax.lax.square(x), axis=-1),
    "sum of exp(x - max)": lambda x: jnp.sum(jnp.exp(x - jnp.max(x, axis=-1, keepdims=True)), axis=-1),
    "softmax": lambda x: jax.nn.softmax(x, axis=-1),
    "log-sum-exp": lambda x: jax.nn.logsumexp(x, axis=-1),
}
_ELEMENTWISE: dict[str, Callable[[Any], Any]] = {
    "exp": jnp.exp,
    "log": jnp.log,
    "rsqrt": jax.lax.rsqrt,
    "tanh": jnp.tanh,
    "cos": jnp.cos,
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": jax.nn.gelu,
    "x * y + x / y": lambda x: x * (x + 1.3) + x / (x + 1.7),
}


def _dot(a: Any, w: Any) -> Any:
    return jnp.matmul(a, w, preferred_element_type=jnp.float32)


def _dot_transposed(a: Any, w: Any) -> Any:
    transposed = jax.lax.optimization_barrier(a.T)
    return jax.lax.dot_general(transposed, w, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)


def _by_sequence(a: Any, k: Any) -> Any:
    return _dot(a.swapaxes(0, 1), k).swapaxes(0, 1)


def _tiled(a: Any, w: Any) -> Any:
    padded = jnp.pad(a, ((0, -len(a) % TILE), (0, 0))).reshape(-1, TILE, a.shape[1])
    return jax.lax.map(lambda tile: _dot(tile, w), padded).reshape(-1, w.shape[1])[: len(a)]


@functools.cache
def _generator() -> np.random.Generator:
    return np.random.default_rng(0)


def _normal(shape: tuple[int, ...], dtype: str) -> Any:
    return jnp.asarray(_generator().standard_normal(shape), dtype)


def _run(function: Callable[..., Any], *arguments: Any) -> np.ndarray:
    return np.asarray(jax.jit(function)(*arguments))


def _by_rows(operation: str, dtype: str, shape: str, function: Callable[[Any], Any], x: Any) -> Finding:
    whole = _run(function, x)
    differs = tuple(rows for rows in ROWS if not np.array_equal(_run(function, x[:rows]), whole[:rows]))
    return Finding(operation, dtype, shape, "rows", differs)


def _by_size(operation: str, dtype: str, function: Callable[[Any], Any], x: Any) -> Finding:
    whole, compiled, differs = _run(function, x), jax.jit(function), []
    for size in SIZES:
        parts = [np.asarray(compiled(part)) for part in np.split(np.asarray(x), len(x) // size)]
        if not np.array_equal(np.concatenate(parts), whole):
            differs.append(size)
    return Finding(operation, dtype, str(len(x)), "size of the array", tuple(differs))


def _by_columns(operation: str, dtype: str, shape: str, x: Any, w: Any) -> Finding:
    whole, differs = _run(_dot, x, w), []
    for split in SPLITS:
        parts = [_run(_dot, x, part) for part in jnp.split(w, split, axis=1)]
        if not np.array_equal(np.concatenate(parts, axis=1), whole):
            differs.append(split)
    return Finding(operation, dtype, shape, "columns split in", tuple(differs))


def _by_inner(operation: str, dtype: str, shape: str, x: Any, w: Any) -> Finding:
    whole, differs = _run(_dot, x, w), []
    for split in SPLITS:
        pairs = zip(jnp.split(x, split, axis=1), jnp.split(w, split, axis=0), strict=True)
        if not np.array_equal(sum(_run(_dot, *pair) for pair in pairs), whole):
            differs.append(split)
    return Finding(operation, dtype, shape, "contraction split in", tuple(differs))


def _in_turn(operation: str, dtype: str, shape: str, dot: Callable[[Any, Any], Any], x: Any, w: Any) -> Finding:
    """Compare with what FMA gives, one term after the other: in float64 each product of two float32 is exact."""
    wanted, wide = np.zeros((len(x), w.shape[1]), np.float32), [np.asarray(each, np.float64) for each in (x, w)]
    for row, column in zip(wide[0].T, wide[1], strict=True):
        wanted = (wanted + row[:, None] * column).astype(np.float32)
    differs = [rows for rows in IN_TURN_ROWS if not np.array_equal(_run(dot, x[:rows], w), wanted[:rows])]
    return Finding(operation, dtype, shape, "rows, against a sum in turn", tuple(differs))


def _by_place(operation: str, dtype: str, shape: str, x: Any, w: Any) -> Finding:
    whole = _run(_dot, x, w)
    moved = {by: np.roll(_run(_dot, jnp.roll(x, by, axis=0), w), -by, axis=0) for by in (1, 3, 7)}
    return Finding(
        operation,
        dtype,
        shape,
        "place in tile",
        tuple(by for by, found in moved.items() if not np.array_equal(found, whole)),
    )


if __name__ == "__main__":
    sys.exit(main())
