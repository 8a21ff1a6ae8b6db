"""Readers by class, and parameters that a reader leaves out."""

import dataclasses
from types import SimpleNamespace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lockstep.models import UnreadableModelError, UnreadParameterError, check_all_read, named_parameters, read_decoder
from lockstep.models.registry import class_name, has_reader, read_registered, register_reader, registered_classes
from tests.tiny import CONFIG, numpy_weights


class Theirs:
    """A model of somebody else's."""


class Special(Theirs):
    pass


PAIR = CONFIG, numpy_weights(CONFIG)


@register_reader(Theirs, parameters=lambda model: None)
def _read(model):
    return PAIR


def test_a_reader_reads_subclasses_too():
    assert has_reader(Special) and read_registered(Special())[1] is PAIR[1]


def test_a_closer_reader_comes_first():
    class Closest(Special):
        pass

    closest = dataclasses.replace(CONFIG, max_seq_len=32)
    register_reader(Closest, parameters=lambda model: None)(lambda model: (closest, PAIR[1]))
    assert read_registered(Closest())[0] is closest and read_registered(Special())[0] is CONFIG


@pytest.mark.parametrize(
    ("reader", "text"),
    [
        (lambda model: {}["nope"], r"reader <lambda> of a .*Wrong raised KeyError: 'nope'\. Correct it"),
        (lambda model: None, r"reader <lambda> of a .*Wrong returned builtins.NoneType; it must return a pair \(Llama"),
        (lambda model: PAIR[1], r"returned lockstep.models.weights.DecoderWeights; it must return a pair"),
        (lambda model: PAIR[::-1], r"returned lockstep.*DecoderWeights, lockstep.*LlamaConfig; it must return a pair"),
    ],
)
def test_a_reader_that_raises_or_returns_no_pair_is_named(reader, text):
    class Wrong:
        pass

    register_reader(Wrong, parameters=lambda model: None)(reader)
    with pytest.raises(UnreadableModelError, match=text):
        read_registered(Wrong())


def test_a_class_without_a_reader_is_named_with_the_supported_ones():
    assert not has_reader(dict) and Theirs in set(registered_classes())
    with pytest.raises(UnreadableModelError, match=r"class builtins\.dict cannot be read; supported are .*Theirs"):
        read_registered({})


def test_what_is_supported_is_listed_without_tuple_and_object():
    with pytest.raises(UnreadableModelError) as caught:
        read_registered(1)
    assert "builtins.tuple" not in str(caught.value) and "builtins.object" not in str(caught.value)


def test_a_class_is_named_with_its_module():
    assert class_name(Theirs) == f"{__name__}.Theirs"


SMALL = dataclasses.replace(CONFIG, hidden_dim=8, intermediate_dim=8)


def weights():
    return numpy_weights(SMALL, vocab=4)


class Model(nnx.Module):
    """A parameter, an adapter, and what is no parameter."""

    def __init__(self):
        self.blocks = nnx.List([nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.Linear(2, 3, use_bias=False, rngs=nnx.Rngs(1))])
        self.lora = nnx.LoRAParam(jnp.ones(2))
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
        self.cache = nnx.Cache(jnp.ones(2))
        self.seen = nnx.Intermediate(jnp.ones(2))
        self.steps = nnx.Variable(jnp.int32(3))


def test_parameters_of_a_flax_model_are_named_by_their_paths():
    model = Model()
    found = named_parameters(model)
    assert sorted(found) == ["blocks.0.bias", "blocks.0.kernel", "blocks.1.kernel", "lora"]
    assert found["lora"] is model.lora.get_value()
    assert sorted(named_parameters(nnx.state(model))) == sorted(found)
    assert list(named_parameters(nnx.state(model, nnx.LoRAParam))) == ["lora"]


def test_parameters_are_floats_and_quantized_numbers():
    tree = {"a": [np.ones(1, np.float32)], "b": jnp.ones(1, jnp.bfloat16), "c": np.ones(1, np.int8), "n": None}
    others = {"key": jax.random.key(0), "count": np.ones(1, np.int32), "mask": np.ones(1, bool), "f": len, "x": 1.0}
    assert list(named_parameters(tree | others)) == ["a.0", "b", "c"]
    struct = jax.eval_shape(lambda: tree["b"])
    assert named_parameters({"b": struct}) == {"b": struct}
    assert named_parameters(object()) == {}


def test_what_nothing_reads_is_named():
    read = weights()
    check_all_read(read, read)
    model = {"weights": read, "bias": np.ones(2), **{f"extra{i}": np.ones(1) for i in range(9)}}
    with pytest.raises(UnreadParameterError, match=r"10 of the 22 parameters .*: bias, extra0, .*extra6 and 2 more"):
        check_all_read(model, read)
    with pytest.raises(UnreadParameterError, match=r"1 of the 22 parameters .*: bias\. Samples .* Read them, or"):
        check_all_read(model, read, ignore=["extra*"])
    check_all_read(model, read, ignore=["extra*", "bias"])
    assert issubclass(UnreadParameterError, UnreadableModelError)


@pytest.mark.parametrize(
    ("name", "fix"),
    [("q_lora_a", "lockstep.models.merge_lora"), ("experts", "Experts are router, expert_gate"), ("b", "Read")],
)
def test_the_error_says_what_to_do(name, fix):
    with pytest.raises(UnreadParameterError, match=fix):
        check_all_read({name: np.ones(1)}, weights())


def test_an_equal_copy_is_not_the_parameter():
    read = weights()
    copied = dataclasses.replace(read, final_norm=read.final_norm.copy())
    with pytest.raises(UnreadParameterError, match="1 of the 12 .*: final_norm"):
        check_all_read(read, copied)


class Adapted(eqx.Module):
    """A client's model: what a reader reads of it, and something beside."""

    weights: object
    beside: object


class Ignoring(Adapted):
    pass


class NoTree(SimpleNamespace):
    pass


def test_every_registered_reader_is_checked():
    def read(model):
        return SMALL, model.weights

    register_reader(Adapted)(read)
    register_reader(Ignoring, ignore=("beside.*",))(read)
    register_reader(NoTree, parameters=lambda model: [model.weights, model.beside])(read)
    beside = {"lora_a": np.ones(2)}
    assert read_decoder(Adapted(weights(), None))[0] is SMALL
    with pytest.raises(UnreadParameterError, match=r"of a .*Adapted are .*beside\.lora_a"):
        read_decoder(Adapted(weights(), beside))
    assert read_decoder(Ignoring(weights(), beside))[0] is SMALL
    with pytest.raises(UnreadParameterError, match=r"1\.lora_a"):
        read_decoder(NoTree(weights=weights(), beside=beside))


def test_a_model_whose_parameters_nobody_can_see_is_warned_of(caplog):
    class Hidden(SimpleNamespace):
        pass

    register_reader(Hidden)(lambda model: (SMALL, model.weights))
    assert read_decoder(Hidden(weights=weights()))[0] is SMALL
    assert "Hidden is no pytree with parameters" in caplog.text and "parameters=" in caplog.text
