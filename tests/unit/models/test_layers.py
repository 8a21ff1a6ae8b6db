"""A layer is the same with the operations of training, of decoding, of exact numerics, and of the search."""

import dataclasses
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.engine.decoder.ops import Exact, Sharded
from lockstep.models import (
    LayerWeights,
    RotaryConfig,
    Variant,
    YarnScaling,
    layer_kinds,
    read_decoder,
    rotary,
    rotary_angles,
)
from lockstep.models.adjustable import Searched, settings_of
from lockstep.models.layers import feed_forward, layer
from lockstep.models.train_ops import Train
from lockstep.placement import make_decode_mesh
from tests.unit.engine.models import FAMILIES, LLAMA, mesh_of, model_on

GROWING = RotaryConfig(yarn=YarnScaling(original_max_position_embeddings=2, llama_4_scaling_beta=0.5))
SNOWBALL = Variant(gated_norm_rank=4, unit_qk_norm=1e-6, exclusive_attention=True, head_gates=True)
CONFIGS = {name: FAMILIES[name] for name in ("llama", "qwen2", "gemma", "olmo", "apertus", "sinks", "cohere")} | {
    "snowball": dataclasses.replace(LLAMA, variant=SNOWBALL),
    "latent": dataclasses.replace(FAMILIES["latent"], experts=None, layer_norm_epsilon=0.1, rope=GROWING),
    "ministral": dataclasses.replace(LLAMA, rope=GROWING),
}
ROWS = (hax.Axis("batch", 2), hax.Axis("position", 6))


def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    scores = jnp.einsum("btkgh,bskh->bkgts", q, k) * q.shape[-1] ** -0.5
    past = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    return jnp.einsum("bkgts,bskh->btkgh", jax.nn.softmax(jnp.where(past, scores, -jnp.inf)), v)


IN_SLOW = ("gemma", "olmo", "apertus")
"""`make test` has the others, the widest choice of what a layer may have (snowball, latent) among them."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in IN_SLOW)) for name in CONFIGS])
def test_all_operations_compute_the_same_layer(name: str) -> None:
    config, mesh = CONFIGS[name], mesh_of("1,1,1")
    model = model_on("1,1,1", config)
    _, weights = read_decoder(model)
    arrays = jax.tree.map(lambda leaf: leaf[0], weights.layers)
    stacked = model.layers.stacked
    parts = {**vars(stacked), **vars(stacked.attention), **vars(stacked.mlp)}
    named = {key: leaf["layer", 0] for key, leaf in parts.items() if isinstance(leaf, hax.NamedArray)}
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 6, config.hidden_dim)), jnp.float32)
    turns = rotary(config, rotary_angles(config, layer_kinds(config)[:1], jnp.arange(6)))

    def run(ops: Any, w: Any) -> jax.Array:
        def mlp(h: jax.Array) -> Any:
            return feed_forward(ops, config, w, h, lambda h, of_router: pytest.fail("there are no experts"))

        stream, chosen = layer(ops, config, w, x, turns, attend, mlp)
        assert chosen is None and stream.shape == x.shape
        return stream

    def loss(named: Any) -> Any:
        out = run(Train(config, ROWS), LayerWeights(**({"q": None, "k": None, "v": None, "o": None} | named)))
        return jnp.square(out).sum(), out

    gradients, trained = jax.jit(jax.grad(loss, has_aux=True))(named)
    assert not np.allclose(trained, x)
    for weight in gradients.keys() - {"sinks"}:  # which `attend` leaves out
        assert np.any(gradients[weight].array), f"{weight} is not trained"
    decode_mesh = make_decode_mesh(mesh, 1)
    for ops in (Sharded(config, decode_mesh), Searched(config, settings_of(config)), Exact(config, decode_mesh)):
        np.testing.assert_allclose(run(ops, arrays), trained, rtol=1e-4, atol=1e-4, err_msg=type(ops).__name__)
