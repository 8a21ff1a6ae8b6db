"""The forward pass of every family that is read from Hugging Face, in NumPy and float64: an oracle of its own.

`forward(directory, ids)` reads ``config.json`` and the safetensors as they are, with transformers' names. It is written
from the papers and from transformers' documentation, as plainly as it can be: no cache, no batching of experts, no
fused weights. Whoever adds a family adds its row to `FAMILIES`.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (NumPy learns bfloat16)
import numpy as np
from safetensors.numpy import load_file

type Array = np.ndarray
type Config = Mapping[str, Any]


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def gelu_tanh(x: Array) -> Array:
    """Hendrycks and Gimpel 2016, the approximation by tanh."""
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def soft_cap(x: Array, limit: float | None) -> Array:
    return limit * np.tanh(x / limit) if limit else x


def linear(tensors: "Tensors", name: str, x: Array) -> Array:
    return x @ tensors[f"{name}.weight"].T + tensors.get(f"{name}.bias", 0.0)


@dataclasses.dataclass(frozen=True)
class Family:
    """What a family does otherwise than Llama; a bias, a q-norm or a sink is used where the checkpoint has it."""

    activation: Callable[[Array], Array] = silu
    norm_plus_one: bool = False  # Gemma: the weight of a norm is stored less 1
    centered: bool = False  # Cohere: LayerNorm
    parallel: bool = False  # Cohere: the MLP reads what attention reads
    norms: tuple[str | None, ...] = ("input_layernorm", None, "post_attention_layernorm", None)
    """The norms before and after attention, before and after the MLP."""
    norm_over_heads: bool = False  # OLMo 2: one norm over all heads of q, and of k
    norm_after_rope: bool = False  # Hunyuan
    scaled_embedding: bool = False
    interleaved: bool = False  # GLM, Cohere, ERNIE: neighbouring elements of a head are a pair
    rotates_full: bool = True  # Cohere, EXAONE: layers without a window have no positions
    norms_values: bool = False  # Gemma 4: RMSNorm without a weight; and scores are not divided
    gated: bool = False  # Qwen3-Next: q_proj has a query and a gate of each head
    mlp: Callable[["Family", Config, "Tensors", Array], Array] | None = None


class Tensors(dict[str, Array]):
    """Tensors in float64 by their names."""

    def below(self, prefix: str) -> "Tensors":
        """Those whose names begin with ``prefix.``, without it."""
        start = f"{prefix}."
        return Tensors({name.removeprefix(start): value for name, value in self.items() if name.startswith(start)})


def gated(family: Family, tensors: Tensors, x: Array, names: tuple[str, str, str]) -> Array:
    """Shazeer 2020: ``down(activation(gate(x)) * up(x))``."""
    gate, up, down = names
    return linear(tensors, down, family.activation(linear(tensors, gate, x)) * linear(tensors, up, x))


PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def dense(family: Family, config: Config, tensors: Tensors, x: Array) -> Array:
    mlp = tensors.below("mlp")
    if "gate_up_proj.weight" in mlp:  # Phi 3, GLM: gate above up
        gate, up = np.split(mlp.pop("gate_up_proj.weight"), 2)
        mlp |= {"gate_proj.weight": gate, "up_proj.weight": up}
    return gated(family, mlp, x, PROJECTIONS)


def squared(family: Family, config: Config, tensors: Tensors, x: Array) -> Array:
    """Arcee: So et al. 2021, the square of ReLU, without a gate."""
    return linear(tensors, "mlp.down_proj", np.maximum(linear(tensors, "mlp.up_proj", x), 0) ** 2)


def routed(
    scores: Array, top: int, expert: Callable[[int, Array], Array], weights: Callable[[Array], Array], x: Array
) -> Array:
    """The sum over the ``top`` experts of each token, weighted by ``weights`` of their scores; token by token."""
    out = np.zeros_like(x)
    for place in np.ndindex(x.shape[:-1]):
        chosen = np.argsort(-scores[place], kind="stable")[:top]
        share = weights(scores[place][chosen])
        out[place] = sum(w * expert(int(index), x[place]) for w, index in zip(share, chosen, strict=True))
    return out


def mixtral(family: Family, config: Config, tensors: Tensors, x: Array) -> Array:
    """Jiang et al. 2024, equation 2: the softmax is over the chosen experts' logits."""
    moe = tensors.below("block_sparse_moe")

    def expert(index: int, token: Array) -> Array:
        return gated(family, moe.below(f"experts.{index}"), token, ("w1", "w3", "w2"))

    return routed(linear(moe, "gate", x), config["num_experts_per_tok"], expert, softmax, x)


def qwen_moe(family: Family, config: Config, tensors: Tensors, x: Array) -> Array:
    """Qwen 2 and 3: shares of a softmax over all experts, renormalised or not, and a gated expert for all tokens."""
    moe = tensors.below("mlp")
    if "gate.wg.weight" in moe:  # Hunyuan
        moe["gate.weight"] = moe["gate.wg.weight"]
    if "gate.weight" not in moe:  # a layer without experts
        return dense(family, config, tensors, x)

    def expert(index: int, token: Array) -> Array:
        return gated(family, moe.below(f"experts.{index}"), token, PROJECTIONS)

    def share(chosen: Array) -> Array:
        return chosen / chosen.sum() if config.get("norm_topk_prob", True) else chosen

    top = config["moe_topk"] if "moe_topk" in config else config["num_experts_per_tok"]
    out = routed(softmax(linear(moe, "gate", x)), top, expert, share, x)
    if "shared_mlp.up_proj.weight" in moe:
        out += gated(family, moe.below("shared_mlp"), x, PROJECTIONS)
    if "shared_expert_gate.weight" in moe:
        shared = gated(family, moe.below("shared_expert"), x, PROJECTIONS)
        out += shared / (1 + np.exp(-linear(moe, "shared_expert_gate", x)))
    return out


def gpt_oss(family: Family, config: Config, tensors: Tensors, x: Array) -> Array:
    """gpt-oss: gate and up are the even and odd columns, clamped at 7, with sigmoid(1.702 gate) and up + 1."""
    moe = tensors.below("mlp")

    def expert(index: int, token: Array) -> Array:
        both = token @ moe["experts.gate_up_proj"][index] + moe["experts.gate_up_proj_bias"][index]
        gate, up = np.minimum(both[0::2], 7), np.clip(both[1::2], -7, 7)
        hidden = (up + 1) * gate / (1 + np.exp(-1.702 * gate))
        return hidden @ moe["experts.down_proj"][index] + moe["experts.down_proj_bias"][index]

    return routed(linear(moe, "router", x), config["num_experts_per_tok"], expert, softmax, x)


def glm_moe(family: Family, config: Config, tensors: Tensors, x: Array) -> Array:
    """GLM-4.5, as DeepSeek V3: sigmoids, and a bias that chooses and does not weigh; an expert for all tokens."""
    moe = tensors.below("mlp")
    if "gate.weight" not in moe:  # a layer without experts
        return dense(family, config, tensors, x)
    scores = 1 / (1 + np.exp(-linear(moe, "gate", x)))
    out = gated(family, moe.below("shared_experts"), x, PROJECTIONS)
    for place in np.ndindex(x.shape[:-1]):
        own, top = scores[place], config["num_experts_per_tok"]
        choice = in_best_groups(own + moe["gate.e_score_correction_bias"], config)
        chosen = np.argsort(-choice, kind="stable")[:top]
        shares = own[chosen] / (own[chosen].sum() if config["norm_topk_prob"] else 1)
        for share, index in zip(config["routed_scaling_factor"] * shares, chosen, strict=True):
            out[place] += share * gated(family, moe.below(f"experts.{index}"), x[place], PROJECTIONS)
    return out


def gemma4_moe(family: Family, config: Config, tensors: Tensors, x: Array) -> Array:
    """Gemma 4: ``x`` is the stream before the norm; an MLP and experts, each between norms of its own, are added."""

    def norm(name: str, values: Array) -> Array:
        return normalised(family, config, values, tensors[f"{name}.weight"])

    out = dense(family, config, tensors, norm("pre_feedforward_layernorm", x))
    if not config["enable_moe_block"]:
        return out
    router, width = tensors.below("router"), x.shape[-1]
    inputs = normalised(family, config, x, np.ones(width)) * router["scale"] * width**-0.5
    gate_up, down = tensors["experts.gate_up_proj"], tensors["experts.down_proj"]
    routed_inputs, answers = norm("pre_feedforward_layernorm_2", x), np.zeros_like(x)
    shares = softmax(linear(router, "proj", inputs))
    for place in np.ndindex(x.shape[:-1]):
        chosen = np.argsort(-shares[place], kind="stable")[: config["top_k_experts"]]
        for index in chosen:
            gate, up = np.split(gate_up[index] @ routed_inputs[place], 2)
            share = shares[place][index] / shares[place][chosen].sum() * router["per_expert_scale"][index]
            answers[place] += share * (down[index] @ (family.activation(gate) * up))
    return norm("post_feedforward_layernorm_1", out) + norm("post_feedforward_layernorm_2", answers)


def minimax_moe(family: Family, config: Config, tensors: Tensors, x: Array) -> Array:
    """MiniMax-M2: as GLM-4.5 with one group and no expert for all tokens, and the names of Mixtral."""
    moe = tensors.below("block_sparse_moe")
    logits = linear(moe, "gate", x)
    biased = 1 / (1 + np.exp(-logits)) + moe["e_score_correction_bias"]

    def expert(index: int, token: Array) -> Array:
        return gated(family, moe.below(f"experts.{index}"), token, ("w1", "w3", "w2"))

    out = np.zeros_like(x)
    for place in np.ndindex(x.shape[:-1]):
        chosen = np.argsort(-biased[place], kind="stable")[: config["num_experts_per_tok"]]
        own = 1 / (1 + np.exp(-logits[place][chosen]))
        out[place] = sum(w * expert(int(index), x[place]) for w, index in zip(own / own.sum(), chosen, strict=True))
    return out


def deepseek_v2(family: Family, config: Config, tensors: Tensors, x: Array) -> Array:
    """DeepSeek-AI 2024, https://arxiv.org/abs/2405.04434, section 2.2: a softmax; groups by their best expert."""
    moe = tensors.below("mlp")
    if "gate.weight" not in moe:  # a layer without experts
        return dense(family, config, tensors, x)
    scores = softmax(linear(moe, "gate", x))
    if config["topk_method"] == "group_limited_greedy":
        groups = scores.reshape(*scores.shape[:-1], config["n_group"], -1)
        least = np.sort(groups.max(-1), axis=-1)[..., -config["topk_group"], None, None]
        scores = np.where(groups.max(-1, keepdims=True) >= least, groups, 0).reshape(scores.shape)

    def expert(index: int, token: Array) -> Array:
        return gated(family, moe.below(f"experts.{index}"), token, PROJECTIONS)

    def share(chosen: Array) -> Array:
        return config["routed_scaling_factor"] * chosen

    shared = gated(family, moe.below("shared_experts"), x, PROJECTIONS)
    return shared + routed(scores, config["num_experts_per_tok"], expert, share, x)


def mistral4(family: Family, config: Config, tensors: Tensors, x: Array) -> Array:
    """As DeepSeek V2 with one group and shares of the chosen alone; the experts of a layer are one tensor each way."""
    moe = tensors.below("mlp")
    if "gate.weight" not in moe:  # a layer without experts
        return dense(family, config, tensors, x)

    def expert(index: int, token: Array) -> Array:
        gate, up = np.split(moe["experts.gate_up_proj"][index] @ token, 2)
        return moe["experts.down_proj"][index] @ (silu(gate) * up)

    def share(chosen: Array) -> Array:
        return config["routed_scaling_factor"] * chosen / (chosen.sum() if config["norm_topk_prob"] else 1)

    shared = gated(family, moe.below("shared_experts"), x, PROJECTIONS)
    return shared + routed(softmax(linear(moe, "gate", x)), config["num_experts_per_tok"], expert, share, x)


def in_best_groups(scores: Array, config: Config) -> Array:
    """DeepSeek-AI 2024, section 2.1.2: scores of groups whose two best have no large sum are no scores."""
    groups = scores.reshape(config["n_group"], -1)
    sums = np.sort(groups, axis=1)[:, -2:].sum(axis=1)
    best = np.argsort(-sums, kind="stable")[: config["topk_group"]]
    return np.where(np.isin(np.arange(len(groups)), best)[:, None], groups, -np.inf).reshape(scores.shape)


def latent_attention(family: Family, config: Config, tensors: Tensors, x: Array, kind: str) -> Array:
    """DeepSeek-AI 2024, https://arxiv.org/abs/2405.04434, section 2.1: each head has keys and values of the latent."""
    batch, length, _ = x.shape
    heads, nope, rope_size = (config[name] for name in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim"))
    latents, config = x, {**config, "rms_norm_eps": 1e-6}  # that of the norms here, whatever the file says
    if config["q_lora_rank"]:
        latents = normalised(family, config, linear(tensors, "q_a_proj", x), tensors["q_a_layernorm.weight"])
    q = linear(tensors, "q_b_proj" if config["q_lora_rank"] else "q_proj", latents).reshape(batch, length, heads, -1)
    latent, key = np.split(linear(tensors, "kv_a_proj_with_mqa", x), [config["kv_lora_rank"]], -1)
    latent = normalised(family, config, latent, tensors["kv_a_layernorm.weight"])
    kv = linear(tensors, "kv_b_proj", latent).reshape(batch, length, heads, -1)
    rope = {**config["rope_parameters"], "partial_rotary_factor": 1.0}  # of the rotated part, not of the head
    q_rotated, key = (
        rotate(part, rope, config.get("rope_interleave", True)) for part in (q[..., nope:], key[:, :, None])
    )
    scores = np.einsum("bqnh,bknh->bnqk", q[..., :nope], kv[..., :nope])
    scores = scores + np.einsum("bqnh,bkh->bnqk", q_rotated, key[:, :, 0])
    all_dims = 0.1 * rope.get("mscale_all_dim", 0) * math.log(rope.get("factor", 1.0)) + 1
    scores = scores * query_factors(rope, length) * all_dims**2 * (nope + rope_size) ** -0.5
    scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
    return linear(
        tensors, "o_proj", np.einsum("bnqk,bknh->bqnh", softmax(scores), kv[..., nope:]).reshape(batch, length, -1)
    )


def query_factors(rope: Config, length: int) -> Array:
    """Ministral 3 and Mistral 4: the factor of each position's query, ``[length, 1]``."""
    contexts = np.arange(length)[:, None] // rope.get("original_max_position_embeddings", length)
    return 1 + (rope.get("llama_4_scaling_beta") or 0.0) * np.log(1 + contexts)


GEMMA_NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
GEMMA4 = Family(
    gelu_tanh, norms=(*GEMMA_NORMS[:2], None, GEMMA_NORMS[3]), scaled_embedding=True, norms_values=True, mlp=gemma4_moe
)
GEMMA = Family(gelu_tanh, norm_plus_one=True, norms=GEMMA_NORMS, scaled_embedding=True)
OLMO_NORMS = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")
GLM_NORMS = ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
FAMILIES: dict[str, Family] = {
    **dict.fromkeys(
        ("granite", "llama", "ministral3", "mistral", "phi3", "qwen2", "qwen3", "seed_oss", "smollm3"), Family()
    ),
    "arcee": Family(mlp=squared),
    "gemma": Family(gelu_tanh, norm_plus_one=True, scaled_embedding=True),
    **dict.fromkeys(("gemma2", "gemma3_text"), GEMMA),
    "gemma4_text": GEMMA4,
    **dict.fromkeys(("olmo2", "olmo3"), Family(norms=OLMO_NORMS, norm_over_heads=True)),
    "exaone4": Family(norms=OLMO_NORMS, rotates_full=False),
    "ernie4_5": Family(interleaved=True),
    "hunyuan_v1_dense": Family(norm_after_rope=True),
    "hunyuan_v1_moe": Family(norm_after_rope=True, mlp=qwen_moe),
    "glm4": Family(norms=GLM_NORMS, interleaved=True),
    **dict.fromkeys(("glm4_moe", "glm4_moe_lite", "deepseek_v3"), Family(mlp=glm_moe)),
    "deepseek_v2": Family(mlp=deepseek_v2),
    "mistral4": Family(mlp=mistral4),
    "cohere2": Family(
        centered=True, parallel=True, norms=("input_layernorm", None, None, None), interleaved=True, rotates_full=False
    ),
    "mixtral": Family(mlp=mixtral),
    **dict.fromkeys(("qwen2_moe", "qwen3_moe"), Family(mlp=qwen_moe)),
    "olmoe": Family(mlp=qwen_moe, norm_over_heads=True),
    "minimax_m2": Family(mlp=minimax_moe, norm_over_heads=True),
    "gpt_oss": Family(mlp=gpt_oss),
    **dict.fromkeys(("qwen3_next", "qwen3_5_moe_text"), Family(norm_plus_one=True, gated=True, mlp=qwen_moe)),
    "qwen3_5_text": Family(norm_plus_one=True, gated=True),
}
"""By the ``model_type`` of ``config.json``."""


def frequencies(rope: Config, head: int) -> tuple[Array, float]:
    """The angle per position of each pair of a head (those that are not rotated have 0), and the factor of q and k."""
    rotated = int(head * rope.get("partial_rotary_factor", 1.0))
    exponents = np.arange(0, rotated, 2) / rotated
    angles = rope["rope_theta"] ** -exponents
    factor, attention = rope.get("factor", 1.0), 1.0
    match rope["rope_type"]:
        case "proportional":  # Gemma 4: the frequencies of a whole head, of which the slow ones are none
            angles = rope["rope_theta"] ** -(np.arange(0, head, 2) / head)
            angles[int(rope.get("partial_rotary_factor", 1.0) * head / 2) :] = 0
        case "linear":
            angles /= factor
        case "llama3":  # kept above the high band, slowed below the low one, blended between
            turns = rope["original_max_position_embeddings"] * angles / (2 * math.pi)
            low, high = rope["low_freq_factor"], rope["high_freq_factor"]
            kept = np.clip((turns - low) / (high - low), 0, 1)
            angles = kept * angles + (1 - kept) * angles / factor
        case "yarn":  # Peng et al. 2023, section 3.2, and the temperature of 3.4
            original, base = rope["original_max_position_embeddings"], math.log(rope["rope_theta"])

            def pair(turns: float) -> float:
                return rotated * math.log(original / (turns * 2 * math.pi)) / (2 * base)

            low, high = pair(rope.get("beta_fast", 32.0)), pair(rope.get("beta_slow", 1.0))
            if rope.get("truncate", True):
                low, high = math.floor(low), math.ceil(high)
            low, high = max(low, 0), min(high, rotated - 1)
            slowed = np.clip((np.arange(rotated // 2) - low) / max(high - low, 0.001), 0, 1)
            angles = slowed * angles / factor + (1 - slowed) * angles
            attention = 0.1 * math.log(factor) + 1
            attention = rope.get("attention_factor", attention)
            if rope.get("mscale_all_dim"):  # DeepSeek multiplies scores instead
                attention = (0.1 * rope["mscale"] * math.log(factor) + 1) / (
                    0.1 * rope["mscale_all_dim"] * math.log(factor) + 1
                )
        case "dynamic" if "alpha" in rope:  # Hunyuan: another base
            angles = (rope["rope_theta"] * rope["alpha"] ** (rotated / (rotated - 2))) ** -exponents
        case kind:
            assert kind == "default", kind
    return angles, attention


def rotate(x: Array, rope: Config, interleaved: bool) -> Array:
    """Su et al. 2021, of ``[batch, position, head, element]``; elements of a pair are half the rotated part apart."""
    if interleaved:
        half = len(frequencies(rope, x.shape[-1])[0])
        pairs = x[..., : 2 * half].reshape(*x.shape[:-1], half, 2)
        turned = rotate(np.concatenate([pairs[..., 0], pairs[..., 1], x[..., 2 * half :]], -1), rope, False)
        neighbours = np.stack([turned[..., :half], turned[..., half : 2 * half]], -1).reshape(*x.shape[:-1], -1)
        return np.concatenate([neighbours, turned[..., 2 * half :]], -1)
    angles, attention = frequencies(rope, x.shape[-1])
    half = len(angles)
    turn = np.arange(x.shape[1])[:, None, None] * angles
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = attention * np.cos(turn), attention * np.sin(turn)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], -1)


def attention(family: Family, config: Config, tensors: Tensors, x: Array, kind: str, rotates: bool = True) -> Array:
    """Causal attention of one layer, of ``kind`` "full_attention" or "sliding_attention"."""
    batch, length, width = x.shape
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    size = config.get("head_dim") or width // heads
    if kind == "full_attention" and "per_layer_config" in config:  # Gemma 4
        size, kv_heads = next(iter(config["per_layer_config"].values())).values()
    if "qkv_proj.weight" in tensors:  # Phi 3
        q, k, v = np.split(linear(tensors, "qkv_proj", x), [heads * size, (heads + kv_heads) * size], -1)
    else:
        q, k = (linear(tensors, f"{name}_proj", x) for name in "qk")
        v = linear(tensors, "v_proj", x) if "v_proj.weight" in tensors else k

    gate = np.inf
    if family.gated:
        q, gate = (x.reshape(batch, length, -1) for x in np.split(q.reshape(batch, length, heads, 2 * size), 2, -1))

    def normed(name: str, values: Array, count: int) -> Array:
        split = (batch, length, count, size)
        weight = tensors.get(f"{name}_norm.weight")
        if weight is None:
            return values.reshape(split)
        if family.norm_over_heads:
            return normalised(family, config, values, weight).reshape(split)
        return normalised(family, config, values.reshape(split), weight)

    rope = config["rope_parameters"]
    rope = rope.get(kind, rope)
    q, k = normed("q", q, heads), normed("k", k, kv_heads)
    if rotates and (family.rotates_full or kind == "sliding_attention"):
        q, k = (rotate(x, rope, family.interleaved) for x in (q, k))
    if family.norm_after_rope:
        q = normalised(family, config, q, tensors["query_layernorm.weight"])
        k = normalised(family, config, k, tensors["key_layernorm.weight"])
    q = q * query_factors(rope, length)[:, None]
    group, v = heads // kv_heads, v.reshape(batch, length, kv_heads, size)
    v = normalised(family, config, v, np.ones(size)) if family.norms_values else v
    k, v = np.repeat(k, group, axis=2), np.repeat(v, group, axis=2)
    scale = config.get("attention_multiplier") or config.get("query_pre_attn_scalar", size) ** -0.5
    scale = 1.0 if family.norms_values else scale
    scores = soft_cap(np.einsum("bqnh,bknh->bnqk", q, k) * scale, config.get("attn_logit_softcapping"))
    distance = np.arange(length)[:, None] - np.arange(length)
    window = config["sliding_window"] if kind == "sliding_attention" else length
    scores = np.where((distance >= 0) & (distance < window), scores, -np.inf)
    if "sinks" in tensors:  # a score of each head that takes its share of the softmax, and has no value
        sinks = np.broadcast_to(tensors["sinks"][:, None, None], (*scores.shape[:3], 1))
        shares = softmax(np.concatenate([scores, sinks], -1))[..., :-1]
    else:
        shares = softmax(scores)
    attended = np.einsum("bnqk,bknh->bqnh", shares, v).reshape(batch, length, heads * size)
    return linear(tensors, "o_proj", attended / (1 + np.exp(-gate)))


def delta_net(config: Config, tensors: Tensors, x: Array) -> Array:
    """Yang et al. 2024, equation 10, position by position: the state of a head decays, and a token writes the part of
    its value that the state does not answer to its key yet.
    """
    batch, length, _ = x.shape
    heads, group = config["linear_num_key_heads"], config["linear_num_value_heads"] // config["linear_num_key_heads"]
    key, value = config["linear_key_head_dim"], config["linear_value_head_dim"]
    if "in_proj_qkv.weight" in tensors:  # Qwen3.5: all queries, all keys, all values
        qkv, z, b, a = (linear(tensors, f"in_proj_{name}", x) for name in ("qkv", "z", "b", "a"))
    else:
        by_head = linear(tensors, "in_proj_qkvz", x).reshape(batch, length, heads, -1)
        qkv, z = np.split(by_head, [2 * key + group * value], -1)
        qkv = np.concatenate(
            [part.reshape(batch, length, -1) for part in np.split(qkv, [key, 2 * key], -1)], -1
        )  # in the order of the convolution
        b, a = np.split(linear(tensors, "in_proj_ba", x).reshape(batch, length, heads, -1), 2, -1)
    taps = tensors["conv1d.weight"][:, 0]
    past = np.pad(qkv, ((0, 0), (taps.shape[1] - 1, 0), (0, 0)))
    qkv = silu(sum(past[:, tap : tap + length] * taps[:, tap] for tap in range(taps.shape[1])))
    q, k, v = np.split(qkv, [heads * key, 2 * heads * key], -1)
    q, k = (part.reshape(batch, length, heads, key).repeat(group, 2) for part in (q, k))
    q, k = (part / np.sqrt(np.sum(part * part, -1, keepdims=True) + 1e-6) for part in (q, k))
    v = v.reshape(batch, length, heads * group, value)
    b, a = (part.reshape(batch, length, heads * group) for part in (b, a))
    decay = np.exp(-np.exp(tensors["A_log"]) * np.log1p(np.exp(a + tensors["dt_bias"])))
    state, out = np.zeros((batch, heads * group, key, value)), np.zeros_like(v)
    for at in range(length):
        state = state * decay[:, at, :, None, None]
        answer = np.einsum("bhkv,bhk->bhv", state, k[:, at])
        correction = (v[:, at] - answer) / (1 + np.exp(-b[:, at, :, None]))
        state = state + k[:, at, :, :, None] * correction[:, :, None]
        out[:, at] = np.einsum("bhkv,bhk->bhv", state, q[:, at]) / math.sqrt(key)
    rms = np.sqrt(np.mean(out * out, -1, keepdims=True) + config["rms_norm_eps"])
    gated_out = out / rms * tensors["norm.weight"] * silu(z.reshape(out.shape))
    return linear(tensors, "out_proj", gated_out.reshape(batch, length, -1))


def normalised(family: Family, config: Config, x: Array, weight: Array) -> Array:
    """Zhang and Sennrich 2019; centered Ba et al. 2016."""
    x = x - np.mean(x, -1, keepdims=True) if family.centered else x
    epsilon = config["layer_norm_eps" if family.centered else "rms_norm_eps"]
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + epsilon) * (weight + family.norm_plus_one)


def layer_kind(config: Config, layer: int) -> str:
    kinds = config.get("layer_types")
    return kinds[layer] if kinds else "sliding_attention" if config.get("sliding_window") else "full_attention"


def read_tensors(directory: Path) -> Tensors:
    """All tensors of a checkpoint."""
    files = sorted(directory.glob("*.safetensors"))
    return Tensors({name: value.astype(np.float64) for file in files for name, value in load_file(file).items()})


def forward(directory: Path, ids: Array) -> Array:
    """The logits of a checkpoint, float64 ``[batch, position, vocab]``, of tokens ``[batch, position]``."""
    return logits_of(json.loads((directory / "config.json").read_text()), read_tensors(directory), ids)


def logits_of(config: Config, tensors: Tensors, ids: Array) -> Array:
    """`forward` of a checkpoint that was read."""
    family = FAMILIES[config["model_type"]]

    def norm(scope: Tensors, name: str | None, x: Array) -> Array:
        return x if name is None else normalised(family, config, x, scope[f"{name}.weight"])

    embed = tensors["model.embed_tokens.weight"]
    x = embed[ids] * (math.sqrt(config["hidden_size"]) if family.scaled_embedding else 1.0)
    x, residual = x * config.get("embedding_multiplier", 1.0), config.get("residual_multiplier", 1.0)  # Granite
    rotated = config.get("no_rope_layers") or [True] * config["num_hidden_layers"]  # SmolLM3
    before_attention, after_attention, before_mlp, after_mlp = family.norms
    for index in range(config["num_hidden_layers"]):
        layer = tensors.below(f"model.layers.{index}")
        h = norm(layer, before_attention, x)
        kind = layer_kind(config, index)
        if kind == "linear_attention":
            out = delta_net(config, layer.below("linear_attn"), h)
        else:
            attend = latent_attention if "kv_lora_rank" in config else partial(attention, rotates=bool(rotated[index]))
            out = attend(family, config, layer.below("self_attn"), h, kind)
        x = x + residual * norm(layer, after_attention, out)
        out = (family.mlp or dense)(family, config, layer, h if family.parallel else norm(layer, before_mlp, x))
        x = (x + residual * norm(layer, after_mlp, out)) * layer.get("layer_scalar", 1.0)
    head = embed if config["tie_word_embeddings"] else tensors["lm_head.weight"]
    logits = normalised(family, config, x, tensors["model.norm.weight"]) @ head.T
    logits = logits * config.get("logit_scale", 1.0) / config.get("logits_scaling", 1.0)
    return soft_cap(logits, config.get("final_logit_softcapping"))
