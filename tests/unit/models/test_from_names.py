"""Reading through a table of names: the arrays themselves, adapters merged, nothing left out."""

import re

import jax
import numpy as np
import pytest

from lockstep.errors import ConfigError
from lockstep.models import LoraNames, UnreadParameterError, from_names
from lockstep.placement import LazyWeight, is_lazy, sources, weight_specs

LAYERS, EMBED, HEADS, HEAD, MLP, RANK = 2, 6, 2, 4, 5, 3
TABLE = {
    "embed": "embed",
    "final_norm": "norm",
    "lm_head": "head",
    "q": "blocks.{}.q",
    "k": ("blocks.{}.kv", "two embed heads head -> embed heads head", {"two": 0}),
    "v": ("blocks.{}.kv", "two embed heads head -> embed heads head", {"two": 1}),
    "o": ("blocks.{}.o", "heads head embed -> heads head embed"),
    "up": ("blocks.{}.up", "mlp embed -> embed mlp"),
    "down": "blocks.{}.down",
    "gate": "blocks.{}.gate",
    "attn_norm": "blocks.{}.norm",
    "q_norm": "blocks.{}.q_norm",
}


def draw(*shape, seed=[0]):  # noqa: B006 - another seed at each call
    seed[0] += 1
    return np.random.default_rng(seed[0]).standard_normal(shape).astype(np.float32)


def block():
    return {
        "q": draw(EMBED, HEADS, HEAD),
        "kv": draw(2, EMBED, HEADS, HEAD),
        "o": draw(HEADS, HEAD, EMBED),
        "up": draw(MLP, EMBED),
        "down": draw(MLP, EMBED),
        "gate": draw(EMBED, MLP),
        "norm": draw(EMBED),
    }


def model(**more):
    return {"embed": draw(7, EMBED), "norm": draw(EMBED), "blocks": [block() for _ in range(LAYERS)], **more}


def made(weight):
    """A weight as the decoder will have it."""
    return np.asarray(jax.tree.map(lambda spec, parts: spec.make(parts), weight_specs(weight), sources(weight)))


def test_every_weight_is_found_and_nothing_is_copied():
    theirs = model()
    with jax.no_execution(True):
        weights = from_names(TABLE)(theirs)
    assert weights.embed is theirs["embed"] and weights.final_norm is theirs["norm"]
    assert weights.lm_head is None and weights.layers.q_norm is None, "what the model lacks"
    every = [theirs["blocks"][i] for i in range(LAYERS)]
    for name, get in {
        "q": lambda b: b["q"],
        "k": lambda b: b["kv"][0],
        "v": lambda b: b["kv"][1],
        "o": lambda b: b["o"],
        "up": lambda b: b["up"].T,
        "down": lambda b: b["down"],
        "attn_norm": lambda b: b["norm"],
    }.items():
        np.testing.assert_array_equal(made(getattr(weights.layers, name)), np.stack([get(b) for b in every]), name)


def test_layers_may_be_in_one_array():
    theirs = model()
    stacked = jax.tree.map(lambda *layers: np.stack(layers), *theirs["blocks"])
    table = {name: entry if isinstance(entry, str) else entry[0] for name, entry in TABLE.items()}
    table = {name: entry.replace("{}.", "") for name, entry in table.items()}
    for name, index in (("k", 0), ("v", 1)):
        table[name] = ("blocks.kv", "layer two embed heads head -> layer embed heads head", {"two": index})
    table["up"] = ("blocks.up", "layer mlp embed -> layer embed mlp")
    weights = from_names(table)({**theirs, "blocks": stacked})
    assert weights.layers.q is stacked["q"]
    np.testing.assert_array_equal(made(weights.layers.v), stacked["kv"][:, 1])


def test_layers_have_an_mlp_or_experts():
    theirs, mlp = model(), ("up", "down", "gate")
    theirs["blocks"] = [block() for _ in range(5)]
    for layer in (0, 1, 3):
        for name in mlp:
            del theirs["blocks"][layer][name]
        theirs["blocks"][layer] |= {"router": draw(EMBED, 3), "w": draw(3, EMBED, MLP), "w2": draw(3, MLP, EMBED)}
    rows = {"router": "blocks.{}.router", "expert_gate": "blocks.{}.w", "expert_up": "blocks.{}.w"}
    weights = from_names({**TABLE, **rows, "expert_down": "blocks.{}.w2"})(theirs)
    blocks = theirs["blocks"]
    np.testing.assert_array_equal(made(weights.layers.q), np.stack([each["q"] for each in blocks]))
    np.testing.assert_array_equal(made(weights.layers.down), np.stack([blocks[layer]["down"] for layer in (2, 4)]))
    for name, own in {"router": "router", "expert_up": "w", "expert_down": "w2"}.items():
        stacked = np.stack([blocks[layer][own] for layer in (0, 1, 3)])
        np.testing.assert_array_equal(made(getattr(weights.layers, name)), stacked)


@pytest.mark.parametrize("adapted", [False, True])
def test_a_row_may_be_a_part_of_a_joint_axis_with_its_adapter(adapted):
    theirs, both = model(), []
    for each in theirs["blocks"]:
        del each["gate"], each["up"]
        each["fused"] = draw(EMBED, 2 * MLP)
        both.append(each["fused"])
        if adapted:
            each |= {"fused_lora_a": draw(EMBED, RANK), "fused_lora_b": draw(RANK, 2 * MLP)}
            both[-1] = each["fused"] + 2.0 * each["fused_lora_a"] @ each["fused_lora_b"]
    rows = {
        name: ("blocks.{}.fused", "embed (two mlp) -> embed mlp", {"two": (at, 2)})
        for at, name in enumerate(("gate", "up"))
    }
    weights = from_names({**TABLE, **rows}, lora=LoraNames(scale=2.0) if adapted else None)(theirs)
    np.testing.assert_allclose(made(weights.layers.gate), np.stack(both)[..., :MLP], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(made(weights.layers.up), np.stack(both)[..., MLP:], rtol=1e-5, atol=1e-5)


def test_what_no_row_reads_is_named():
    theirs = model(value_head={"kernel": draw(3)})
    theirs["blocks"][1]["q_bias"] = draw(HEADS, HEAD)
    with pytest.raises(UnreadParameterError, match=re.escape("2 of the 18 ")) as error:
        from_names(TABLE)(theirs)
    assert "blocks.1.q_bias, value_head.kernel" in str(error.value)
    with pytest.raises(UnreadParameterError, match=re.escape("blocks.1.q_bias.")):
        from_names(TABLE, ignore=["value_head.*"])(theirs)


def test_a_layer_that_the_rest_does_not_have_is_named():
    theirs = model()
    del theirs["blocks"][1]["norm"]
    theirs["blocks"].append({"norm": draw(EMBED)})
    with pytest.raises(UnreadParameterError, match=r"blocks\.2\.norm"):
        from_names(TABLE)(theirs)


def test_a_row_without_a_parameter_is_named_with_the_nearest():
    theirs = model()
    with pytest.raises(ConfigError, match=r"q is layers\.0\.q, and .* 16 parameters .*near are .*blocks\.0\.q"):
        from_names({**TABLE, "q": "layers.{}.q"})(theirs)
    theirs["embed"] = theirs["embed"][None]
    with pytest.raises(ConfigError, match=r"the row 'embed' \(embed\): the pattern .* does not fit an array of"):
        from_names(TABLE)(theirs)
    with pytest.raises(ConfigError, match="a row 'wq'; the decoder has no such weight"):
        from_names({**TABLE, "wq": "x"})
    with pytest.raises(ConfigError, match="no row for embed, o, which every model has"):
        from_names({name: row for name, row in TABLE.items() if name not in ("embed", "o")})


ADAPTERS = {
    "q": ((EMBED, RANK), (RANK, HEADS, HEAD), lambda a, b: np.einsum("er,rnh->enh", a, b)),
    "o": ((HEADS * HEAD, RANK), (RANK, EMBED), lambda a, b: (a @ b).reshape(HEADS, HEAD, EMBED)),
    "up": ((EMBED, RANK), (RANK, MLP), lambda a, b: (a @ b).T),
    "down": ((MLP, RANK), (RANK, EMBED), lambda a, b: a @ b),
}


def adapted():
    theirs = model()
    for one in theirs["blocks"]:
        for name, (a, b, _) in ADAPTERS.items():
            one[f"{name}_lora_a"], one[f"{name}_lora_b"] = draw(*a), draw(*b)
    return theirs


def test_adapters_are_merged():
    theirs = adapted()
    with pytest.raises(UnreadParameterError, match=r"16 of the 32 .*down_lora_a.*merge_lora"):
        from_names(TABLE)(theirs)
    with jax.no_execution(True):
        weights = from_names(TABLE, lora=LoraNames(scale=0.5))(theirs)
    for name, (_, _, product) in ADAPTERS.items():
        every = [one[name] + 0.5 * product(one[f"{name}_lora_a"], one[f"{name}_lora_b"]) for one in theirs["blocks"]]
        wanted = np.stack([each.T if name == "up" else each for each in every])
        got = getattr(weights.layers, name)
        assert isinstance(got, LazyWeight) and got.shape == wanted.shape
        np.testing.assert_allclose(made(got), wanted, atol=1e-5, err_msg=name)
    assert is_lazy(weights.layers.k), "of an array with both"


@pytest.mark.parametrize("axis", [0, 1])
def test_adapters_are_merged_where_the_layer_is_any_axis_of_stacked_arrays(axis):
    theirs = adapted()
    stacked = {name: np.stack([block[name] for block in theirs["blocks"]], axis) for name in theirs["blocks"][0]}
    axes = {"q": "embed heads head", "down": "mlp embed", "gate": "embed mlp", "attn_norm": "embed"}
    table = {name: row for name, row in TABLE.items() if "{}" not in str(row)}
    for name in TABLE.keys() - table.keys() - {"q_norm"}:
        row = TABLE[name]
        path, pattern, *picks = (row, f"{axes[name]} -> {axes[name]}") if isinstance(row, str) else row
        have, want = pattern.split(" -> ")
        names = have.split()
        names.insert(axis, "layer")
        table[name] = (path.replace(".{}", ""), f"{' '.join(names)} -> layer {want}", *picks)
    weights = from_names(table, lora=LoraNames(scale=0.5))({**theirs, "blocks": stacked})
    listed = from_names(TABLE, lora=LoraNames(scale=0.5))(theirs)
    for name in (*ADAPTERS, "k", "gate", "attn_norm"):
        np.testing.assert_array_equal(made(getattr(weights.layers, name)), made(getattr(listed.layers, name)), name)


def test_an_adapter_that_only_some_layers_have_is_named():
    theirs = adapted()
    del theirs["blocks"][1]["q_lora_b"]
    with pytest.raises(ConfigError, match=r"blocks\.1\.q has no LoRA factors and another layer of blocks\.\{\}\.q has"):
        from_names(TABLE, lora=LoraNames(scale=0.5))(theirs)


def test_a_model_that_is_no_pytree_is_named():
    class Params(dict):
        """JAX takes a subclass of dict for a leaf."""

    with pytest.raises(ConfigError, match=r"a .*Params is no pytree with parameters\. Pass one, such as a plain dict"):
        from_names(TABLE)(Params(embed=draw(2, 2)))
