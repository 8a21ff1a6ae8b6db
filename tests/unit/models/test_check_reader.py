"""A reader that is wrong in one place is told which, by log-probabilities of the model's own forward pass."""

import dataclasses
import inspect
import math
import sys

import haliax as hax
import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from lockstep.errors import PeerError
from lockstep.models import (
    Experts,
    LinearAttention,
    LlamaConfig,
    Qwen2MoeConfig,
    ReaderMismatchError,
    Variant,
    check_reader,
    from_names,
    read_decoder,
    reader_search,
)
from lockstep.models.families.qwen3_next import Qwen3NextConfig
from lockstep.models.layer_kinds import rotary_frequencies
from lockstep.models.rope import Llama3Scaling, RotaryConfig, YarnScaling
from lockstep.placement import place
from tests.tiny import numpy_weights, placed_weights
from tests.unit.engine.models import FAMILIES, SIZES, mesh_of, model_on

CONFIG = LlamaConfig(
    max_seq_len=64,
    hidden_dim=16,
    intermediate_dim=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    gradient_checkpointing=False,
    initializer_range=0.3,
)
LENGTH, VOCAB = 32, 40
HOST = numpy_weights(CONFIG, vocab=VOCAB)


def numpy_forward(ids, weights=HOST, config=CONFIG, **what):
    """The logits of a Llama, written for this test; ``what`` it does otherwise."""
    layers, length = weights.layers, ids.shape[1]
    half = config.head_size // 2
    eps, plus = what.get("eps", config.layer_norm_epsilon), what.get("plus", 0.0)
    frequencies = what.get("frequencies", rotary_frequencies(config))
    of_layers = np.broadcast_to(frequencies, (config.num_layers, half)).astype(np.float64)
    windows = np.broadcast_to(what.get("window", length), config.num_layers)
    scales = np.broadcast_to(what.get("scale", config.head_size**-0.5), config.num_layers)
    distance = np.arange(length)[:, None] - np.arange(length)
    growth = np.broadcast_to(what.get("growth", 1.0), length)[:, None]

    def norm(x, weight):
        return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps) * (weight + plus)

    def rotate(x):
        if what.get("neighbours"):
            one, other = x[..., 0::2], x[..., 1::2]
            return np.stack([one * cos - other * sin, other * cos + one * sin], -1).reshape(x.shape)
        one, other = x[..., :half], x[..., half:]
        return np.concatenate([one * cos - other * sin, other * cos + one * sin], -1)

    def cap(x, limit):
        return x if limit is None else limit * np.tanh(x / limit)

    x = weights.embed[ids].astype(np.float64) * what.get("embed_scale", 1.0)
    activation = what.get("activation", lambda a: a / (1 + np.exp(-a)))
    for i in range(config.num_layers)[:: -1 if what.get("reverse") else 1]:
        angles = np.arange(length)[:, None] * of_layers[i]
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        seen = (distance >= 0) & (distance < windows[i])
        w = {field.name: getattr(layers, field.name) for field in dataclasses.fields(layers)}
        w = {name: array[i].astype(np.float64) for name, array in w.items() if array is not None}
        for one, other in what.get("swap", ()):
            w[one], w[other] = w[other], w[one]
        h = norm(x, w["attn_norm"])
        q, k, v = (np.tensordot(h, w[name], 1) for name in "qkv")
        q = q.reshape(*q.shape[:2], -1, config.head_size)
        group = config.q_heads_per_group
        kv_of = [n % config.num_kv_heads if what.get("interleaved_heads") else n // group for n in range(q.shape[2])]
        q, k, v = rotate(q), rotate(k)[:, :, kv_of], v[:, :, kv_of]
        scores = np.einsum("btnh,bsnh->bnts", q, k) * scales[i] * growth
        scores = np.where(seen, cap(scores, what.get("score_cap")), -np.inf)
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        out = np.einsum("bnts,bsnh->btnh", scores / scores.sum(-1, keepdims=True), v).reshape(*x.shape[:2], -1)
        o = w["o"].reshape(-1, x.shape[-1])
        x = x + out @ (o.T if what.get("transposed_o") else o)
        h = norm(x, w["mlp_norm"])
        x = x + (activation(h @ w["gate"]) * (h @ w["up"])) @ w["down"]
    logits = norm(x, weights.final_norm) @ (weights.embed.T if what.get("tied") else weights.lm_head)
    return cap(logits, what.get("logit_cap")).astype(np.float32)


def rope(**fields):
    return {"frequencies": rotary_frequencies(dataclasses.replace(CONFIG, rope=RotaryConfig(**fields)))}


def gelu(x):
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


WRONG = {
    "rope base": (rope(theta=1e6), r"rope\.theta is 10000: it should be 1e\+06"),
    "no rope": ({"frequencies": np.zeros(2)}, "rotary embeddings: the model has none"),
    "neighbours": ({"neighbours": True}, "rotates neighbouring elements"),
    "epsilon": ({"eps": 1e-3}, r"layer_norm_epsilon is 1e-05: it should be 0\.001"),
    "norm plus one": ({"plus": 1.0}, r"variant\.norm_plus_one is False: it should be True"),
    "embedding scale": ({"embed_scale": 4.0}, r"variant\.embed_scale is None: it should be 4\.0"),
    "attention scale": ({"scale": 1.0}, r"variant\.attention_scale is None: it should be 1"),
    "attention cap": ({"score_cap": 20.0}, r"variant\.attention_soft_cap is None: it should be 20\.0"),
    "logit cap": ({"logit_cap": 30.0}, r"variant\.logit_soft_cap is None: it should be 30\.0"),
    "activation": ({"activation": gelu}, r"variant\.activation is silu: it should be gelu"),
    "tied": ({"tied": True}, "lm_head: the output layer of the model is the embedding"),
    "heads": ({"interleaved_heads": True}, "q and o: the model's query head i belongs to kv head i % num_kv_heads"),
    "gate": ({"swap": [("gate", "up")]}, "gate and up are swapped"),
    "values": ({"swap": [("k", "v")]}, "k and v are swapped"),
    "norms": ({"swap": [("attn_norm", "mlp_norm")]}, "attn_norm and mlp_norm are swapped"),
    "o": ({"transposed_o": True}, "o is transposed"),
    "layers": ({"reverse": True}, "the layers are in reverse order"),
}
IN_SLOW = {
    *("no rope", "neighbours", "embedding scale", "attention cap", "logit cap", "activation", "values", "norms"),
}
"""Found as another one is: by rotary frequencies, a scale, a cap, a function, and two arrays that are swapped."""


@pytest.fixture(scope="module")
def compiled():
    """Programs by name and shapes: only what the model's own forward pass returns changes from test to test."""
    module, kept = sys.modules["lockstep.models.check_reader"], {}
    compile_program = module.compile_program

    def once(name, function, arguments, **options):
        check = inspect.getclosurevars(function).nonlocals["self"]
        key = (name, check.config, str(check.specs), str(jax.tree.map(np.shape, arguments)), str(options["mesh"]))
        if key not in kept:
            kept[key] = compile_program(name, function, arguments, **options)
        return kept[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "compile_program", once)
        yield


def placed(mesh="1,1,1", config=CONFIG):
    return config, placed_weights(mesh_of(mesh), config=CONFIG, vocab=VOCAB)


def test_a_reader_that_is_right_passes(compiled):
    found = check_reader(placed(), lambda ids: numpy_forward(np.asarray(ids)), length=LENGTH)
    assert found.gap < 2e-5 and found.tolerance == 5e-4 and found.unseen == ()
    assert len(found.tried) > 30 and "gate and up are swapped" in found.tried
    tried = {text: text.replace(": it should be ", " or ") for text in found.tried}
    told = [text for text, or_that in tried.items() if not any(each.startswith(or_that) for each in found.cannot_tell)]
    assert "rope.theta is 10000: it should be 1e+06" in told
    assert "layer_norm_epsilon is 1e-05: it should be 1e-06" in told
    assert found.cannot_tell and all(each.startswith("rope.scaling is None") for each in found.cannot_tell), LENGTH


@pytest.mark.slow
def test_an_epsilon_ten_times_too_large_is_named_or_listed(compiled):
    """Rounding could make either difference: of the first it does not, since hardly any is left with the right one."""

    def check(have, right):
        config = dataclasses.replace(CONFIG, layer_norm_epsilon=have)
        return check_reader(placed(config=config), lambda ids: numpy_forward(np.asarray(ids), eps=right), length=LENGTH)

    with pytest.raises(ReaderMismatchError, match=r"up to 0.000.*1e-06: it should be 1e-07") as error:
        check(1e-6, 1e-7)
    # 1e-08 is no further than this CPU's rounding on some machines: it is then said too, after the nearer one.
    first, *others = error.value.likely
    assert first.startswith("layer_norm_epsilon is 1e-06: it should be 1e-07") and len(error.value.tried) > 30
    assert all(each.startswith("layer_norm_epsilon is 1e-06: it should be 1e-08") for each in others)
    found = check(1e-7, 1e-8)
    (listed,) = [each for each in found.cannot_tell if each.startswith("layer_norm_epsilon is 1e-07 or 1e-08 (")]
    assert f"cannot tell whether {listed}" in str(found)


@pytest.mark.slow
@pytest.mark.parametrize("firsts", [(0, 4, 6), (0, 6, 4)])
def test_a_model_with_joint_arrays_is_read_by_a_table_and_told_of_a_wrong_order(compiled, firsts):
    mesh, layers = mesh_of("1,1,1"), HOST.layers
    heads = {"q": CONFIG.num_heads, "k": CONFIG.num_kv_heads, "v": CONFIG.num_kv_heads}

    def put(array):
        return place(np.ascontiguousarray(array), NamedSharding(mesh, PartitionSpec()))

    model = {"wte": put(HOST.embed), "out": put(HOST.lm_head), "norm": put(HOST.final_norm), "h": []}
    for i in range(CONFIG.num_layers):
        attention = np.concatenate([getattr(layers, name)[i].reshape(CONFIG.hidden_dim, -1) for name in "qkv"], axis=1)
        fused = np.concatenate([layers.gate[i], layers.up[i]], axis=1)
        rest = {"o": layers.o[i], "down": layers.down[i], "n1": layers.attn_norm[i], "n2": layers.mlp_norm[i]}
        model["h"].append({name: put(each) for name, each in {"attn": attention, "mlp": fused, **rest}.items()})
    table = {"embed": "wte", "lm_head": "out", "final_norm": "norm", "attn_norm": "h.{}.n1", "mlp_norm": "h.{}.n2"}
    table |= {"o": "h.{}.o", "down": "h.{}.down"}
    table |= {
        name: ("h.{}.mlp", "embed (two mlp) -> embed mlp", {"two": (at, 2)}) for at, name in enumerate(("gate", "up"))
    }
    for name, first in zip("qkv", firsts, strict=True):
        part = {"part": slice(first, first + heads[name]), "head": CONFIG.head_size}
        table[name] = ("h.{}.attn", "embed (part head) -> embed part head", part)
    pair = CONFIG, from_names(table)(model)
    if firsts == (0, 4, 6):
        assert check_reader(pair, lambda ids: numpy_forward(np.asarray(ids)), length=LENGTH).gap < 2e-5
        return
    with pytest.raises(ReaderMismatchError, match="k and v are swapped"):
        check_reader(pair, lambda ids: numpy_forward(np.asarray(ids)), length=LENGTH)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in IN_SLOW)) for name in WRONG])
def test_what_is_wrong_is_named(compiled, name):
    what, text = WRONG[name]
    with pytest.raises(ReaderMismatchError, match=text) as error:
        check_reader(placed(), lambda ids: numpy_forward(np.asarray(ids), **what), length=LENGTH)
    assert len(error.value.likely) == 1, error.value.likely


def test_what_no_guess_explains_is_placed_at_least(compiled):
    both = {**rope(theta=3e4), "scale": 0.3}
    with pytest.raises(ReaderMismatchError, match=r"The first position agrees .*rotary embeddings, the scale") as error:
        check_reader(placed(), lambda ids: numpy_forward(np.asarray(ids), **both), length=LENGTH)
    assert error.value.likely == () and f"None of {len(error.value.tried)} single changes" in str(error.value)
    other = {"embed_scale": 1.7}
    with pytest.raises(ReaderMismatchError, match=r"The first position differs already .*embedding and its scale"):
        check_reader(placed(), lambda ids: numpy_forward(np.asarray(ids), **other), length=LENGTH)


def test_weights_that_are_all_equal_are_said_to_be_unseen():
    config, weights = placed()
    neutral = jax.device_put(np.ones_like(HOST.layers.mlp_norm), weights.layers.mlp_norm.sharding)
    ones = dataclasses.replace(weights, layers=dataclasses.replace(weights.layers, mlp_norm=neutral))
    host = dataclasses.replace(HOST, layers=dataclasses.replace(HOST.layers, mlp_norm=np.asarray(neutral)))
    found = check_reader((config, ones), lambda ids: numpy_forward(np.asarray(ids), host), length=LENGTH)
    assert found.unseen == ("mlp_norm",)


def test_a_forward_pass_that_returns_something_else_is_refused(compiled):
    with pytest.raises(PeerError, match=r"returned ndarray of shape \(2, 40\) for ids of shape \(2, 32\)"):
        check_reader(placed(), lambda ids: numpy_forward(np.asarray(ids))[:, -1], length=LENGTH)
    with pytest.raises(PeerError, match="length is 65; it must be from 2 to max_seq_len, 64"):
        check_reader(placed(), lambda ids: ids, length=65)


@pytest.mark.slow
def test_a_scaling_of_long_wavelengths_is_named():
    config = dataclasses.replace(CONFIG, rope=RotaryConfig(theta=5e5))
    scaled = rope(theta=5e5, scaling=Llama3Scaling(factor=8.0))
    with pytest.raises(ReaderMismatchError, match=r"rope\.scaling is None: it should be .*factor=8\.0"):
        check_reader((config, placed()[1]), lambda ids: numpy_forward(np.asarray(ids), **scaled), length=64)


@pytest.mark.slow
def test_a_model_on_several_devices_is_checked_too():
    with pytest.raises(ReaderMismatchError, match="gate and up are swapped"):
        check_reader(placed("1,2,2"), lambda ids: numpy_forward(np.asarray(ids), swap=[("gate", "up")]), length=LENGTH)


BASES = np.stack([rope(theta=100.0)["frequencies"], rope(theta=1e6)["frequencies"]])
"""Rotary frequencies: a layer with a window of 8 uses the first, one without a window the second."""


@pytest.mark.parametrize(
    ("variant", "text"),
    [
        pytest.param({"sliding_rope": RotaryConfig(theta=100.0)}, None, marks=pytest.mark.nightly),
        ({"sliding_rope": RotaryConfig(theta=1e4)}, r"variant\.sliding_rope\.theta is 10000: it should be 100 "),
        pytest.param(
            {"sliding_rope": RotaryConfig(theta=100.0), "sliding_window": 9},
            r"variant\.sliding_window is 9: it should be 8",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            {"sliding_rope": RotaryConfig(theta=100.0), "layer_types": ("full_attention", "sliding_attention")},
            r"variant\.layer_types: the layers with a window",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_layers_may_differ(compiled, variant, text):
    fields = {"sliding_window": 8, "layer_types": ("sliding_attention", "full_attention")} | variant
    config = dataclasses.replace(CONFIG, rope=RotaryConfig(theta=1e6), variant=Variant(**fields))

    def forward(ids):
        return numpy_forward(np.asarray(ids), frequencies=BASES, window=np.array([8, LENGTH]))

    if text is None:
        assert check_reader(placed(config=config), forward, length=LENGTH).gap < 2e-5
        return
    with pytest.raises(ReaderMismatchError, match=text):
        check_reader(placed(config=config), forward, length=LENGTH)


PLAIN, YARN = RotaryConfig(theta=1e6), RotaryConfig(theta=1e6, yarn=reader_search.YARNS[1])


@pytest.mark.parametrize(
    ("full", "sliding", "text"),
    [
        pytest.param(YARN, PLAIN, None, marks=pytest.mark.nightly),
        pytest.param(
            YARN,
            None,
            r"variant\.sliding_rope is None: it should be RotaryConfig\(theta=1000000\.0, .* yarn=None",
            marks=pytest.mark.slow,  # in make test: another base in layers with a window
        ),
        pytest.param(
            YARN, YARN, r"variant\.sliding_rope is Rot.* it should be Rot.* yarn=None", marks=pytest.mark.nightly
        ),
        pytest.param(PLAIN, None, r"rope\.yarn is None: .*factor=8.*, in layers without", marks=pytest.mark.slow),
    ],
)
def test_yarn_in_layers_without_a_window_alone_is_named(compiled, full, sliding, text):
    """As in OLMo 3: the other layers have neither its frequencies nor its factor of scores."""
    kinds = Variant(sliding_window=8, layer_types=("sliding_attention", "full_attention"), sliding_rope=sliding)
    config = dataclasses.replace(CONFIG, rope=full, variant=kinds)
    settings = {
        "frequencies": np.stack([rotary_frequencies(CONFIG, rope) for rope in (PLAIN, YARN)]),
        "scale": np.array([rope.score_factor for rope in (PLAIN, YARN)]) * CONFIG.head_size**-0.5,
        "window": np.array([8, LENGTH]),
    }

    def forward(ids):
        return numpy_forward(np.asarray(ids), **settings)

    if text is None:
        assert check_reader(placed(config=config), forward, length=LENGTH).gap < 2e-5
        return
    with pytest.raises(ReaderMismatchError, match=text):
        check_reader(placed(config=config), forward, length=LENGTH)


@pytest.mark.slow  # in make test: test_layers
def test_a_factor_of_later_queries_is_computed(compiled):
    """As in Ministral 3."""
    yarn = YarnScaling(original_max_position_embeddings=16, attention_factor=1.0, llama_4_scaling_beta=0.5)
    config = dataclasses.replace(CONFIG, rope=RotaryConfig(yarn=yarn))
    growth = 1 + 0.5 * np.log(1 + np.arange(LENGTH) // 16)

    def forward(ids):
        return numpy_forward(np.asarray(ids), frequencies=rotary_frequencies(config), growth=growth)

    assert check_reader(placed(config=config), forward, length=LENGTH).gap < 2e-5


@pytest.mark.slow
def test_a_base_for_all_layers_where_the_model_has_two_is_named(compiled):
    bases = np.stack([rope(theta=1e4)["frequencies"], rope(theta=1e6)["frequencies"]])
    config = dataclasses.replace(CONFIG, rope=RotaryConfig(theta=1e6))
    with pytest.raises(
        ReaderMismatchError, match=r"variant\.sliding_rope is None: all layers but every 2\. should have"
    ):
        check_reader(
            placed(config=config), lambda ids: numpy_forward(np.asarray(ids), frequencies=bases), length=LENGTH
        )


LINEAR = Qwen3NextConfig(
    **SIZES | {"num_layers": 4},
    rope=RotaryConfig(theta=1e7, partial_rotary_factor=0.5),
    linear_attention=LinearAttention(key_heads=2, value_heads=6, key_head_dim=5, value_head_dim=7, conv_width=3),
    experts=Experts(
        num_experts=4, num_experts_per_tok=2, intermediate_dim=12, shared_intermediate_dim=10, shared_router=True
    ),
)


SPLIT = dataclasses.replace(LINEAR, variant=dataclasses.replace(LINEAR.variant, split_delta=True))


def parts_moved(count, sizes, order):
    """Changes a weight so that the parts of each of ``count`` heads, its last axis, are in another order."""

    def move(weight):
        heads = weight.reshape(*weight.shape[:2], count, sum(sizes))
        parts = np.split(heads, np.cumsum(sizes)[:-1], axis=-1)
        return np.concatenate([parts[part] for part in order], axis=-1).reshape(weight.shape)

    return move


def parts_apart(count, sizes):
    """Changes a weight so that each part of all of ``count`` heads comes before the next part."""

    def move(weight):
        heads = weight.reshape(*weight.shape[:2], count, sum(sizes))
        parts = np.split(heads, np.cumsum(sizes)[:-1], axis=-1)
        return np.concatenate([part.reshape(*weight.shape[:2], -1) for part in parts], axis=-1).reshape(weight.shape)

    return move


def groups_first(weight):
    """A weight whose value heads, three to each of two key heads, are in the order of the other axis."""
    axis = next(axis for axis in range(weight.ndim) if weight.shape[axis : axis + 2] == (2, 3))
    return weight.swapaxes(axis, axis + 1).reshape(weight.shape)


def of_experts(**changed):
    return lambda config: dataclasses.replace(config, experts=dataclasses.replace(config.experts, **changed))


def of_variant(**changed):
    return lambda config: dataclasses.replace(config, variant=dataclasses.replace(config.variant, **changed))


def of_yarn(**changed):
    return lambda config: dataclasses.replace(
        config, rope=dataclasses.replace(config.rope, yarn=dataclasses.replace(config.rope.yarn, **changed))
    )


def negative(weight):
    return weight - 1


QKVZ = (5, 5, 21, 21)
MISREAD = {
    "latent, neighbours": (of_variant(interleaved_rope=False), "variant.interleaved_rope is False: it should be True"),
    "latent, yarn": (of_yarn(attention_factor=1.0), "rope.yarn.attention_factor is 1: it should be 1.13863"),
    "latent, scale": (of_variant(attention_scale=0.5), "variant.attention_scale is 0.5: it should be 0.316228"),
    "latent, groups": (of_experts(groups_per_tok=3), "experts.groups_per_tok is 3: it should be 2"),
    "latent, factor": (of_experts(routed_scaling_factor=2.5), "experts.routed_scaling_factor is 2.5: it should be 1.0"),
    "latent, scoring": (of_experts(scoring="sigmoid"), "experts.scoring is sigmoid: it should be biased_sigmoid"),
    "latent, queries": ({"q_b": parts_moved(4, (6, 4), (1, 0))}, "q_b: the model has the rotated part"),
    "latent, key": ({"kv_a": parts_moved(1, (12, 4), (1, 0))}, "kv_a: the model has the rotated key before the latent"),
    "latent, values": ({"kv_b": parts_moved(4, (6, 9), (1, 0))}, "kv_b: the model has the value of a head before"),
    "latent, keys": ({"kv_b": parts_apart(4, (6, 9))}, "kv_b: the model has the keys of all heads before their values"),
    "linear, norm": ({"linear_norm": negative}, "linear_norm: the model multiplies by 1 + weight"),
    "linear, decay": ({"linear_decay": np.exp}, "linear_decay: it is a rate; read its logarithm"),
    "linear, gates": ({"linear_gates": parts_moved(2, (3, 3), (1, 0))}, "linear_gates: writes and decays are swapped"),
    "linear, queries": ({"linear_qkvz": parts_moved(2, QKVZ, (1, 0, 2, 3))}, "linear_qkvz: queries and keys"),
    "linear, values": (
        {"linear_qkvz": parts_moved(2, QKVZ, (0, 1, 3, 2))},
        "linear_qkvz: values and gates are swapped",
    ),
    "linear, parts": ({"linear_qkvz": parts_apart(2, QKVZ)}, "linear_qkvz: the model has all queries, then keys"),
    "linear, all parts": (
        {"linear_qkvz": parts_apart(2, QKVZ), "linear_gates": parts_apart(2, (3, 3))},
        "linear_qkvz and linear_gates: the model has each part of all heads before the next part",
    ),
    "split, queries": (("linear_q", "linear_k"), "linear_q and linear_k are swapped"),
    "split, values": (("linear_v", "linear_z"), "linear_v and linear_z are swapped"),
    "split, gates": (("linear_b", "linear_a"), "linear_b and linear_a are swapped"),
    "split, decay": ({"linear_decay": np.exp}, "linear_decay: it is a rate; read its logarithm"),
    "split, heads": (
        {f"linear_{name}": groups_first for name in (*"vzbao", "conv_v", "decay", "decay_bias")},
        "linear_: the model's value head i belongs to key head i % linear_attention.key_heads",
    ),
    "linear, taps": (
        {f"linear_conv_{name}": lambda weight: weight[..., ::-1] for name in "qkv"},
        "linear_conv: the model has the token's own position first",
    ),
    "linear, gated": ({"gated_q": parts_moved(4, (8, 8), (1, 0))}, "gated_q: the model has the gate of a head before"),
    "linear, all gated": (
        {"gated_q": parts_apart(4, (8, 8))},
        "gated_q: the model has the queries of all heads before",
    ),
    "linear, layers": (
        of_variant(layer_types=("linear_attention", "linear_attention", "full_attention", "linear_attention")),
        "variant.layer_types are those of the layer before",
    ),
    "linear, norms": (of_variant(norm_plus_one=False), "variant.norm_plus_one is False: it should be True"),
    "linear, neighbours": (of_variant(interleaved_rope=True), "variant.interleaved_rope is True: it should be False"),
}
"""What a reader can have wrong of a model, as changes of its configuration or of its weights."""


@pytest.mark.nightly  # in make slow: an error in a model with experts
@pytest.mark.parametrize("name", MISREAD)
def test_what_is_wrong_with_a_latent_or_a_memory_is_named(compiled, name):
    model = model_on("1,1,1", {"latent": FAMILIES["latent"], "linear": LINEAR, "split": SPLIT}[name.partition(",")[0]])
    forward = jax.jit(lambda ids: model(hax.named(ids, ("batch", "position"))).array)
    config, weights = read_decoder(model)
    sound = check_reader((config, weights), forward, length=16)
    assert sound.gap <= sound.tolerance and len(sound.tried) > 40
    changes, likely = MISREAD[name]
    if callable(changes):
        config = changes(config)
    elif isinstance(changes, tuple):
        first, second = (getattr(weights.layers, weight) for weight in changes)
        swapped = dict(zip(changes, (second, first), strict=True))
        weights = dataclasses.replace(weights, layers=dataclasses.replace(weights.layers, **swapped))
    else:
        layers = {
            weight: jax.device_put(change(np.asarray(getattr(weights.layers, weight))), weights.embed.sharding)
            for weight, change in changes.items()
        }
        weights = dataclasses.replace(weights, layers=dataclasses.replace(weights.layers, **layers))
    with pytest.raises(ReaderMismatchError) as error:
        check_reader((config, weights), forward, length=16)
    assert error.value.likely[0].startswith(likely), error.value.likely


SHARED = Qwen2MoeConfig(
    **SIZES, experts=Experts(num_experts=5, num_experts_per_tok=2, shared_intermediate_dim=12, shared_router=True)
)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("model", "changed", "likely"),
    [
        (FAMILIES["experts"], {"norm_topk_prob": True}, "experts.norm_topk_prob is True: it should be False"),
        (FAMILIES["gpt_oss"], {"num_experts_per_tok": 1}, "experts.num_experts_per_tok is 1: it should be 2"),
        (SHARED, {"num_experts_per_tok": 3}, "experts.num_experts_per_tok is 3: it should be 2"),
    ],
    ids=["experts", "gpt_oss", "shared"],
)
def test_a_setting_of_experts_is_named(model, changed, likely):
    model = model_on("1,1,1", model)
    forward = jax.jit(lambda ids: model(hax.named(ids, ("batch", "position"))).array)
    found = check_reader(model, forward, length=16)
    assert found.gap <= found.tolerance and len(found.tried) > 20
    config, weights = read_decoder(model)
    wrong = dataclasses.replace(config, experts=dataclasses.replace(config.experts, **changed))
    with pytest.raises(ReaderMismatchError) as error:
        check_reader((wrong, weights), forward, length=16)
    assert error.value.likely[0].startswith(likely)
    if weights.layers.expert_gate is not None:
        swapped = dataclasses.replace(
            weights.layers, expert_gate=weights.layers.expert_up, expert_up=weights.layers.expert_gate
        )
        with pytest.raises(ReaderMismatchError, match="Likely wrong: expert_gate and expert_up are swapped"):
            check_reader((config, dataclasses.replace(weights, layers=swapped)), forward, length=16)


@pytest.mark.slow
def test_an_error_in_a_model_with_experts_in_some_layers_is_named(compiled):
    model = model_on("1,1,1", FAMILIES["mixed"])
    forward = jax.jit(lambda ids: model(hax.named(ids, ("batch", "position"))).array)
    found = check_reader(model, forward, length=8)
    assert found.gap <= found.tolerance and len(found.tried) > 20
    config, weights = read_decoder(model)
    layers = weights.layers
    wrong = dataclasses.replace(config, experts=dataclasses.replace(config.experts, norm_topk_prob=False))
    dense = dataclasses.replace(weights, layers=dataclasses.replace(layers, gate=layers.up, up=layers.gate))
    swapped = dataclasses.replace(layers, expert_gate=layers.expert_up, expert_up=layers.expert_gate)
    for pair, likely in (
        ((wrong, weights), "experts.norm_topk_prob is False: it should be True"),
        ((config, dense), "gate and up are swapped"),
        ((config, dataclasses.replace(weights, layers=swapped)), "expert_gate and expert_up are swapped"),
    ):
        with pytest.raises(ReaderMismatchError) as error:
            check_reader(pair, forward, length=8)
        assert error.value.likely[0].startswith(likely)
