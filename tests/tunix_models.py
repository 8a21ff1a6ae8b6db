"""Tiny Tunix models with random weights, on any mesh, and what their own forward answers."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from tunix.models.gemma import model as gemma
from tunix.models.gemma3 import model as gemma3
from tunix.models.llama3 import model as llama3
from tunix.models.qwen2 import model as qwen2
from tunix.models.qwen3 import model as qwen3

from lockstep.types import Completion

SIZES: dict[str, Any] = {
    "num_layers": 2,
    "vocab_size": 64,
    "embed_dim": 32,
    "hidden_dim": 48,
    "num_heads": 4,
    "head_dim": 8,
    "num_kv_heads": 2,
    "rope_theta": 500_000,
    "norm_eps": 1e-5,
}


def dense(module: Any, cls: Any, vocab: int, **values: Any) -> Any:
    """A model of the Llama kind, without values."""
    config = module.ModelConfig(**SIZES | {"vocab_size": vocab} | values)
    return nnx.eval_shape(lambda: cls(config, rngs=nnx.Rngs(0)))  # nothing is compiled, which takes seconds


def gemma_model(vocab: int, *, layers: Sequence[str], **values: Any) -> Any:
    """A Gemma with these kinds of attention, without values."""
    sizes = {name: size for name, size in SIZES.items() if name not in ("vocab_size", "rope_theta", "norm_eps")}
    config = gemma.ModelConfig(
        **sizes
        | {
            "num_embed": vocab,
            "num_layers": len(layers),
            "attention_types": tuple(gemma.AttentionType[kind] for kind in layers),
            "final_logit_softcap": None,
            "use_post_attn_norm": False,
            "use_post_ffw_norm": False,
        }
        | values
    )
    return nnx.eval_shape(lambda: gemma.Gemma(config, rngs=nnx.Rngs(0)))


def gemma3_model(vocab: int = 64, **values: Any) -> Any:
    """A Gemma 3, without values: five layers with a window and one without, with rotary bases of their own."""
    sizes = {name: size for name, size in SIZES.items() if name not in ("vocab_size", "rope_theta", "norm_eps")}
    config = gemma3.ModelConfig(
        **sizes
        | {
            "num_embed": vocab,
            "num_layers": 6,
            "sliding_window_size": 8,
            "local_base_frequency": 100,
            "global_base_frequency": 1_000,
            "global_scale_factor": 4.0,
            "param_dtype": jnp.float32,
        }
        | values
    )
    return nnx.eval_shape(lambda: gemma3.Gemma3(config, rngs=nnx.Rngs(0)))


GEMMA2: dict[str, Any] = {
    "layers": ("LOCAL_SLIDING", "GLOBAL"),
    "sliding_window_size": 6,
    "use_post_attn_norm": True,
    "use_post_ffw_norm": True,
    "final_logit_softcap": 30.0,
    "attn_logits_soft_cap": 50.0,
}

MODELS = {
    "qwen3": lambda vocab=64: dense(qwen3, qwen3.Qwen3, vocab),
    "qwen3-tied": lambda vocab=64: dense(qwen3, qwen3.Qwen3, vocab, use_tied_embedding=True),
    "qwen3-moe": lambda vocab=64: dense(qwen3, qwen3.Qwen3, vocab, hidden_dim=22, num_experts=6, num_experts_per_tok=3),
    "qwen2": lambda vocab=64: dense(qwen2, qwen2.Qwen2, vocab, rope_theta=10_000),
    "llama3": lambda vocab=64: dense(llama3, llama3.Llama3, vocab),
    "gemma": lambda vocab=64: gemma_model(vocab, layers=("GLOBAL", "GLOBAL"), num_kv_heads=4),
    "gemma2": lambda vocab=64: gemma_model(vocab, **GEMMA2),
    "gemma3": gemma3_model,
    "gemma3-qkv": lambda vocab=64: gemma3_model(
        vocab,
        num_kv_heads=4,
        query_pre_attn_norm=gemma3.QueryPreAttentionNormalisation.BY_ONE_OVER_SQRT_EMBED_DIM_DIV_NUM_HEADS,
        embed_dim=48,
    ),
}
"""How to make one of each family, without values."""


def mesh(fsdp: int, tp: int) -> Mesh:
    """A mesh as Tunix wants it, of the first devices."""
    return mesh_of(jax.devices()[: fsdp * tp], fsdp, tp)


def mesh_of(devices: Sequence[jax.Device], fsdp: int, tp: int) -> Mesh:
    """A mesh of these devices."""
    return Mesh(np.array(devices).reshape(fsdp, tp), ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2)


def randomise(model: Any, on: Mesh | None = None, *, seed: int = 0) -> Any:
    """The model with every parameter away from its neutral value, sharded over a mesh as its configuration says.

    Args:
        model: Only its shapes count.
        on: The mesh; None for one device.
        seed: The seed of the values.
    """
    state = nnx.state(model, nnx.Param)
    specs = dict(nnx.to_flat_state(nnx.get_partition_spec(state)))
    rng = np.random.default_rng(seed)
    for path, variable in nnx.to_flat_state(state):
        old = variable.get_value()
        size = 0.5 if path[-1] == "input_embedding" else 0.3 if old.ndim == 1 else old.shape[0] ** -0.5
        value = (path[-1] == "w" and old.ndim == 1) + size * rng.standard_normal(old.shape)
        value = value.astype(old.dtype)
        if on is None:
            placed = jnp.asarray(value)
        else:
            placed = jax.device_put(value, NamedSharding(on, fits(specs[path], old.shape, on)))
        variable.set_value(placed)
    nnx.update(model, state)
    return model


def fits(variable: Any, shape: tuple[int, ...], on: Mesh) -> PartitionSpec:
    """The spec of a parameter without the entries that do not divide its axes."""
    spec = variable.get_value() if isinstance(variable, nnx.Variable) else variable
    entries = [*(spec or ()), *[None] * len(shape)][: len(shape)]
    return PartitionSpec(
        *(name if name and size % on.shape[name] == 0 else None for name, size in zip(entries, shape, strict=True))
    )


@nnx.jit
def _logits(model: Any, tokens: jax.Array) -> jax.Array:
    rows, length = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(length), tokens.shape)
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((length, length), bool)), (rows, length, length))
    return model(tokens, positions, None, mask)[0].astype(jnp.float32)


def logprobs(model: Any, rows: Sequence[Sequence[int]], length: int = 40) -> np.ndarray:
    """Log-probabilities ``[row, position, vocab]`` of the token after each position, by Tunix's own forward."""
    tokens = np.zeros((len(rows), length), np.int32)
    for row, ids in zip(tokens, rows, strict=True):
        row[: len(ids)] = ids
    return np.asarray(jax.nn.log_softmax(_logits(model, jnp.asarray(tokens)), axis=-1))


@dataclasses.dataclass(frozen=True)
class Gap:
    """How far completions are from the model's own forward."""

    logprob: float
    """The largest difference of a token's log-probability."""
    greedy: float
    """How much likelier than the token the likeliest one is, at most."""


def gap(model: Any, prompts: Sequence[Sequence[int]], completions: Sequence[Completion]) -> Gap:
    """Compare greedy completions with the model's own forward."""
    rows = [[*prompt, *each.tokens] for prompt, each in zip(prompts, completions, strict=True)]
    own = logprobs(model, rows)
    worst, greedy = 0.0, 0.0
    for scores, prompt, each in zip(own, prompts, completions, strict=True):
        assert each.tokens
        for step, (token, logprob) in enumerate(zip(each.tokens, each.logprobs, strict=True)):
            at = scores[len(prompt) - 1 + step]
            worst, greedy = max(worst, abs(at[token] - logprob)), max(greedy, at.max() - at[token])
    return Gap(float(worst), float(greedy))
