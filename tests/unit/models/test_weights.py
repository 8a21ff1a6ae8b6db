"""The axes of the weights, written once: on the fields of the classes."""

import dataclasses

from lockstep.models import STACKED, TENSOR_DIMS, WEIGHT_AXES, DecoderWeights, LayerWeights
from lockstep.models.weights import haliax_axes, tensor_dims


def test_every_weight_has_axes_of_its_own() -> None:
    layers = {field.name for field in dataclasses.fields(LayerWeights)}
    outer = {field.name for field in dataclasses.fields(DecoderWeights)} - {"layers"}
    assert not layers & outer, "a name must say which weight is meant"
    assert set(WEIGHT_AXES) == layers | outer and layers == STACKED
    assert WEIGHT_AXES["o"] == ("layer", "kv_head", "group", "head", "embed")
    assert WEIGHT_AXES["final_norm"] == ("embed",)
    assert haliax_axes("q") == ("layer", "embed", "kv_head", "q_heads_per_group", "head_size")


def test_every_weight_is_split_or_small() -> None:
    # A weight without a tensor axis is copied to every device, and is wrong where its neighbours are split.
    norms = {"attn_norm", "mlp_norm", "attn_post_norm", "mlp_post_norm", "final_norm", "embed_norm", "q_norm", "k_norm"}
    norms |= {"linear_norm", "wide_q_norm", "wide_k_norm"}  # of a head, the same for all heads
    gates = {f"{norm}_norm_{side}" for norm in ("attn", "mlp", "embed", "final") for side in ("down", "up")}
    norms |= {"shared_post_norm", "routed_norm", "routed_post_norm", "router_scale"}
    scalars = {"router_factors", "layer_scalar", "xielu_p", "xielu_n", "xielu_beta", "xielu_eps"}
    latents = {"q_a", "q_a_norm", "kv_a", "kv_a_norm"}
    assert set(WEIGHT_AXES) - set(TENSOR_DIMS) == norms | gates | scalars | latents | {
        "router",
        "router_bias",
        "shared_router",
        "o_bias",
        "expert_down_bias",
    }
    assert TENSOR_DIMS == {
        "embed": 0,
        "lm_head": 1,
        **dict.fromkeys(("wide_q", "wide_k", "wide_v", "q", "k", "v", "q_b", "kv_b", "gate", "up", "head_gate"), 2),
        **{"expert_gate": 3, "expert_up": 3, "expert_gate_up": 3, "expert_gate_up_bias": 2, "expert_down": 2},
        **{"shared_gate": 2, "shared_up": 2, "shared_down": 1},
        **dict.fromkeys(("gated_q", "linear_qkvz", "linear_gates", *(f"linear_{part}" for part in "qkvzba")), 2),
        **dict.fromkeys([f"linear_{name}" for name in ("conv_q", "conv_k", "conv_v", "decay", "decay_bias", "o")], 1),
        **dict.fromkeys(
            ("wide_o", "o", "down", "q_bias", "k_bias", "v_bias", "sinks", "q_wide_norm", "k_wide_norm"), 1
        ),
    }
    experts = {name: 1 for name in WEIGHT_AXES if name.startswith("expert_")}
    assert tensor_dims(whole_experts=True) == TENSOR_DIMS | experts
    assert tensor_dims(whole_experts=False) == TENSOR_DIMS
