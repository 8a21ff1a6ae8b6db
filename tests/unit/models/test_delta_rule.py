"""The gated delta rule in chunks is the recurrence, whatever a row is divided into, and documents are apart."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from lockstep.errors import ConfigError
from lockstep.models import LinearAttention, LlamaConfig, Variant
from lockstep.models.delta_rule import CHUNK, DeltaGates, DeltaState, gated_delta
from lockstep.models.families.qwen3_next import Qwen3NextConfig

SIZES = LinearAttention(key_heads=2, value_heads=6, key_head_dim=5, value_head_dim=7, conv_width=3)
gated = jax.jit(gated_delta, static_argnums=0)


def operands(rows: int, length: int, seed: int = 0) -> tuple[Any, Any, DeltaGates]:
    """Inputs, taps and gates; of the second head all keys are one, nothing decays and all is written."""
    rng = np.random.default_rng(seed)
    inputs = rng.standard_normal((rows, length, SIZES.key_heads, SIZES.qkv))
    taps = rng.standard_normal((SIZES.key_heads, SIZES.qkv, SIZES.conv_width))
    write = rng.uniform(0, 1, (rows, length, SIZES.key_heads, SIZES.group))
    decay = -rng.exponential(0.3, write.shape)
    inputs[:, :, 1, SIZES.key_head_dim : 2 * SIZES.key_head_dim] = 1.0
    write[:, :, 1], decay[:, :, 1] = 1.0, 0.0
    return (
        *(x.astype(np.float32) for x in (inputs, taps)),
        DeltaGates(*(x.astype(np.float32) for x in (write, decay))),
    )


def empty(rows: int) -> DeltaState:
    return DeltaState.zeros(SIZES, rows, SIZES.key_heads, np.float32)


def recurrence(inputs: Any, taps: Any, gates: DeltaGates) -> np.ndarray:
    """Equation 10 of the paper in float64, position by position."""
    rows, length = inputs.shape[:2]
    past = np.pad(inputs.astype(np.float64), ((0, 0), (SIZES.conv_width - 1, 0), (0, 0), (0, 0)))
    x = sum(past[:, tap : tap + length] * taps[..., tap] for tap in range(SIZES.conv_width))
    x = x / (1 + np.exp(-x))
    q, k, v = np.split(x, [SIZES.key_head_dim, 2 * SIZES.key_head_dim], -1)
    q, k = (part / np.sqrt(np.sum(part**2, -1, keepdims=True) + 1e-6) for part in (q, k))
    v = v.reshape(rows, length, SIZES.key_heads, SIZES.group, SIZES.value_head_dim)
    memory = np.zeros((rows, SIZES.key_heads, SIZES.group, SIZES.key_head_dim, SIZES.value_head_dim))
    out = np.zeros(v.shape)
    for at in range(length):
        memory = memory * np.exp(gates.log_decay[:, at].astype(np.float64))[..., None, None]
        correction = v[:, at] - np.einsum("rhgkv,rhk->rhgv", memory, k[:, at])
        memory += np.einsum("rhg,rhk,rhgv->rhgkv", gates.write[:, at], k[:, at], correction)
        out[:, at] = np.einsum("rhgkv,rhk->rhgv", memory, q[:, at]) / SIZES.key_head_dim**0.5
    return out


def test_chunks_are_the_recurrence_with_any_keys() -> None:
    inputs, taps, gates = operands(2, 2 * CHUNK + 3)
    ours, _ = gated(SIZES, inputs, taps, gates, empty(2))
    np.testing.assert_allclose(ours, recurrence(inputs, taps, gates), atol=2e-5)


def test_documents_of_a_packed_row_know_nothing_of_each_other() -> None:
    inputs, taps, gates = operands(1, 2 * CHUNK + 3)
    # At the border of a chunk and inside; of one position, and shorter than the convolution.
    borders = [0, 1, 3, CHUNK, CHUNK + 20, 2 * CHUNK + 1, 2 * CHUNK + 3]
    begins = np.repeat(borders[:-1], np.diff(borders))[None].astype(np.int32)
    ours, after = gated(SIZES, inputs, taps, gates, empty(1), begins=begins)
    for first, last in zip(borders, borders[1:], strict=False):
        alone = [x[:, first:last] for x in (inputs, *gates)]
        expected = recurrence(alone[0], taps, DeltaGates(*alone[1:]))
        np.testing.assert_allclose(ours[:, first:last], expected, atol=2e-5, err_msg=f"{first} to {last}")
    _, alone_after = gated(
        SIZES, inputs[:, borders[-2] :], taps, DeltaGates(*(x[:, borders[-2] :] for x in gates)), empty(1)
    )
    np.testing.assert_allclose(after.memory, alone_after.memory, atol=2e-5)


def test_a_row_in_pieces_is_the_row_and_what_is_not_there_changes_nothing() -> None:
    """As the engine has it: pages of a prompt, of which the last is not full, then steps."""
    inputs, taps, gates = operands(2, 40)
    whole, last = gated(SIZES, inputs, taps, gates, empty(2))
    state, out, page = empty(2), [], 16
    for first in range(0, 32, page):
        part = [x[:, first : first + page] for x in (inputs, *gates)]
        count = np.full(2, min(page, 30 - first), np.int32)
        read, state = gated(SIZES, part[0], taps, DeltaGates(*part[1:]), state, count=count)
        out.append(read[:, : count[0]])
    for at in range(30, 40):
        step = [x[:, at : at + 1] for x in (inputs, *gates)]
        read, state = gated(SIZES, step[0], taps, DeltaGates(*step[1:]), state, count=np.array([1, 1], np.int32))
        out.append(read)
        _, idle = gated(SIZES, step[0], taps, DeltaGates(*step[1:]), state, count=np.array([0, 0], np.int32))
        assert all(np.array_equal(before, after) for before, after in zip(state, idle, strict=True))
    np.testing.assert_allclose(np.concatenate(out, axis=1), whole, atol=2e-5)
    for ours, expected in zip(state, last, strict=True):
        np.testing.assert_allclose(ours, expected, atol=2e-5)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda: LinearAttention(key_heads=3, value_heads=4), "key_heads is 3 and value_heads is 4.*multiple"),
        (lambda: LinearAttention(conv_width=0), r"linear_attention\.conv_width is 0.*at least 1"),
        (lambda: Qwen3NextConfig(num_layers=3), "3 of 3 layers have it.*some have attention over all"),
        (
            lambda: LlamaConfig(num_layers=1, variant=Variant(layer_types=("linear_attention",))),
            "in 1 of 1 layers, and",
        ),
        (
            lambda: Qwen3NextConfig(numerics="exact"),
            "exact and linear_attention is set: the sums.*Set numerics to fast",
        ),
        (
            lambda: dataclasses.replace(Qwen3NextConfig(), linear_attention=None, numerics="exact"),
            "numerics is exact and variant.gated_attention is True",
        ),
    ],
)
def test_what_cannot_work_is_refused(change: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        change()
