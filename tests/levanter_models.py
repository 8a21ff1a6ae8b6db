"""Tiny Levanter models and what their own dense forward answers: the oracle of everything that reads them."""

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh
from levanter.layers.attention import AttentionMask
from levanter.models.llama import LlamaConfig
from levanter.models.snowball import SnowballConfig
from levanter.utils.tree_utils import inference_mode

from lockstep.types import FinishReason, Request
from tests.oracle import Expected
from tests.sampling_oracle import log_softmax, step_of

SIZES: dict[str, Any] = {
    "max_seq_len": 64,
    "hidden_dim": 32,
    "intermediate_dim": 48,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "gradient_checkpointing": False,
}
LLAMA = LlamaConfig(**SIZES)
SNOWBALL = SnowballConfig(
    hidden_dim=32,
    intermediate_dim=16,
    shared_expert_intermediate_dim=24,
    num_experts=6,
    num_experts_per_token=3,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=12,
    max_seq_len=64,
    sliding_window=9,
    initializer_std=0.1,
)
LENGTH, ROWS = 64, 8


def snowball_mesh(*sizes: int) -> Mesh:
    """A mesh of explicit axes, as Levanter makes them for Snowball: replica_dcn, data, context, expert, model."""
    names, devices = ("replica_dcn", "data", "context", "expert", "model"), jax.local_devices()[: math.prod(sizes)]
    return Mesh(np.array(devices).reshape(sizes), names, axis_types=(AxisType.Explicit,) * 5)


def on_this_host(model: Any) -> Any:
    """A model of any number of processes with its arrays in NumPy. Every process makes this call."""
    arrays, rest = eqx.partition(model, eqx.is_array)
    return eqx.combine(multihost_utils.process_allgather(arrays, tiled=True), rest)


def _mesh_of_experts(model: Any) -> contextlib.AbstractContextManager[Any]:
    """A mesh of this process's first device where Levanter routes in a shard_map; else the context that there is."""
    if model.config.requires_explicit_mesh_axes:
        return jax.set_mesh(snowball_mesh(1, 1, 1, 1, 1))
    if not hasattr(model.config, "num_experts_per_tok"):
        return contextlib.nullcontext()
    return jax.set_mesh(jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,), devices=jax.local_devices()[:1]))


def build(config: Any, vocab: int = 64, *, scale: float = 1.0, seed: int = 0) -> Any:
    """A model with random weights, every one of them away from its neutral value."""

    @eqx.filter_jit  # one program, where eager calls would compile one for every shape and operation
    def make() -> Any:
        model = config.build(hax.Axis("vocab", vocab), key=jax.random.key(seed))
        leaves, tree = jax.tree.flatten(model)
        keys = jax.random.split(jax.random.key(seed + 1), len(leaves))
        pairs = zip(leaves, keys, strict=True)  # a layer of experts has a switch among its leaves
        noisy = [
            leaf + scale * 0.3 * jax.random.normal(k, leaf.shape) if eqx.is_array(leaf) else leaf for leaf, k in pairs
        ]
        return jax.tree.unflatten(tree, noisy)

    return inference_mode(make(), True)


def dense_completions(model: Any, requests: Sequence[Request]) -> list[Expected]:
    """Greedy answers by one full forward pass of Levanter's own per token, on one device."""
    expected = []
    for first in range(0, len(requests), ROWS):
        batch = requests[first : first + ROWS]
        answers: list[list[int]] = [[] for _ in batch]
        logits_of: list[list[np.ndarray]] = [[] for _ in batch]
        for _ in range(max(request.params.max_new_tokens for request in batch)):
            ids = np.zeros((ROWS, LENGTH), np.int32)
            known = [[*request.prompt_tokens, *answer] for request, answer in zip(batch, answers, strict=True)]
            for row, tokens in enumerate(known):
                ids[row, : len(tokens)] = tokens
            with _mesh_of_experts(model):
                logits = np.asarray(_forward(model, ids))
            for row, (request, answer) in enumerate(zip(batch, answers, strict=True)):
                done = len(answer) == request.params.max_new_tokens or (answer and answer[-1] in request.params.stops)
                if not done:
                    logits_of[row].append(logits[row, len(known[row]) - 1])
                    answer.append(int(np.argmax(logits_of[row][-1])))
        for request, answer, rows in zip(batch, answers, logits_of, strict=True):
            logprobs = tuple(float(log_softmax(row)[token]) for row, token in zip(rows, answer, strict=True))
            drawn = [step_of(row, request.params, request.prompt_tokens, []) for row in rows]
            expected.append(
                Expected(
                    prompt_id=request.prompt_id,
                    generation_id=0,
                    tokens=tuple(answer),
                    logprobs=logprobs,
                    finish_reason=FinishReason.STOP if answer[-1] in request.params.stops else FinishReason.LENGTH,
                    scores=np.stack(rows),
                    largest=tuple(float(np.abs(row[np.isfinite(row)]).max()) for row in rows),
                    sampled_logprobs=tuple(float(s.logprobs[t]) for s, t in zip(drawn, answer, strict=True)),
                    top_logprobs=(),
                )
            )
    return expected


@eqx.filter_jit
def _forward(model: Any, ids: np.ndarray) -> jax.Array:
    logits = model(hax.named(ids, ("batch", "position")), attn_mask=AttentionMask.causal())
    return logits.rearrange(("batch", "position", "vocab")).array.astype(jnp.float32)
