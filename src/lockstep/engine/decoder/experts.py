"""The experts of a layer of the decoder, of which each device of a replica has some, or a part of the width of all."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from lockstep.models import ExactSum, ExpertWeights, LayerWeights, LlamaConfig, Routing, mixture, route
from lockstep.placement import DecodeMesh
from lockstep.placement.device import blocks_of


def answer_of_experts(
    config: LlamaConfig,
    decode_mesh: DecodeMesh,
    w: LayerWeights,
    tokens: Float[Array, "token embed"],
    *,
    valid: Bool[Array, " token"],
    layer: Int[Array, ""] | None,
    replayed: Int[Array, "token choice"] | None = None,
    of_router: Float[Array, "token embed"] | None = None,
) -> tuple[Float[Array, "token embed"], Routing]:
    """Return the weighted sum of what each token's experts answer, and which they are.

    Fast, it is the part of this device, which the devices of the replica add up; exact, it is the whole.

    Args:
        w: The weights of the layer; those of experts are stacked where ``layer`` is not None (`mixture`).
        valid: Which tokens matter.
        replayed: The experts to take (`route`).
        of_router: The router's inputs; None for the tokens.
    """
    experts = config.experts
    assert experts is not None and w.router is not None
    inputs = tokens if of_router is None else of_router
    routing = route(inputs, w.router, w.router_bias, experts, replayed, factors=w.router_factors, exact=config.exact)
    count = jax.tree.leaves(w.expert_down)[0].shape[0 if layer is None else 1]
    whole = count < experts.num_experts
    device = jax.lax.axis_index(decode_mesh.tensor_axes) if decode_mesh.tensor > 1 else 0
    bias, exact = w.expert_down_bias, None
    if config.exact:
        blocks = blocks_of(config.expert_dim)
        shared = decode_mesh.tensor if not whole else 1
        exact = ExactSum(blocks // shared, decode_mesh.tensor_axes if decode_mesh.tensor > 1 else (), whole)
    elif bias is not None and not whole:  # in the sum of the devices once
        bias = jnp.where(device == 0, bias, 0)
    up = w.expert_gate_up if w.expert_up is None else w.expert_up
    weights = ExpertWeights(w.expert_gate, up, w.expert_down, w.expert_gate_up_bias, bias)
    answers = mixture(
        tokens, routing, weights, config.variant.activation,
        first=device * count if whole else 0, valid=valid, layer=layer, exact=exact,
    )  # fmt: skip
    return answers, routing
