"""The floating-point operations of a train step."""

import dataclasses
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax.interpreters import partial_eval

from lockstep.models import POLICIES, LoraConfig, join_trained, split_trained
from lockstep.placement import make_mesh
from lockstep.plan.step_flops import step_flops
from lockstep.plan.train_step import init_trained
from lockstep.training import TrainerConfig
from tests.unit.engine.models import FAMILIES
from tests.unit.plan.test_train_step import workload_of


def traced_flops(workload):
    """The operations of all products in the gradient as it is traced, without those whose results nothing uses."""
    training = workload.training

    def parts():
        trained, frozen = split_trained(init_trained(workload)(jax.random.key(0)))
        return (*eqx.partition(trained, eqx.is_array), frozen)

    def gradient(arrays, batch):
        _, rest, frozen = parts()
        return jax.grad(lambda one: training.loss(join_trained(eqx.combine(one, rest), frozen), batch).total)(arrays)

    batch = {name: jnp.zeros((8, *column.shape), column.dtype) for name, column in training.columns.items()}
    jaxpr = jax.make_jaxpr(gradient)(jax.eval_shape(lambda: parts()[0]), batch).jaxpr
    return products_in(partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0])


def products_in(jaxpr):
    total = 0
    for equation in jaxpr.eqns:
        parameters = equation.params
        if equation.primitive.name == "dot_general":
            summed, _ = parameters["dimension_numbers"][0]
            left = equation.invars[0].aval.shape
            total += 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[axis] for axis in summed)
        elif equation.primitive.name == "cond":  # between kinds of layers, whose products are equally large
            total += max(products_in(branch.jaxpr) for branch in parameters["branches"])
        else:
            inner = [getattr(value, "jaxpr", value) for value in parameters.values()]
            total += parameters.get("length", 1) * sum(products_in(each) for each in inner if hasattr(each, "eqns"))
    return total


@pytest.mark.parametrize(
    ("family", "policy"),
    [
        *(("llama", policy) for policy in POLICIES if policy != "offload"),
        ("sinks", "dots"),
        *((family, "full") for family in ("gemma", "olmo", "gemma3", "sinks", "apertus", "cohere")),
    ],
)
def test_operations_are_those_of_the_gradient_as_it_is_traced(family, policy):
    """Attention is computed again by every policy but nothing; the last product of a layer by none, without a norm."""
    workload = workload_of(model=FAMILIES[family], remat=policy)
    assert step_flops(workload, vocab_blocks=False) == traced_flops(workload)


def test_operations_of_a_step_are_two_per_weight_and_token_three_times():
    # A layer: q and o 16 x 32 each, k and v 16 x 16 each, the MLP 3 x 16 x 24; and all pairs of 32 positions.
    weights = 2 * 16 * 32 + 2 * 16 * 16 + 3 * 16 * 24
    pairs = 2 * 2 * 4 * 8 * 32
    layers, output = 2 * (2 * weights + pairs), 2 * 16 * 40
    assert step_flops(workload_of(), vocab_blocks=False) == 3 * (layers + output) * 8 * 32


def test_frozen_weights_cost_two_operations_backward_and_adapters_four():
    lora = LoraConfig(r=4, target_modules=("q_proj", "down_proj"), base_dtype="float32")
    adapters = 2 * 4 * (16 + 32 + 24 + 16)
    whole, ours = (step_flops(workload_of(lora=one), vocab_blocks=False) for one in (None, lora))
    pairs = 2 * 2 * 4 * 8 * 32
    tokens = 8 * 32
    frozen = (whole - 2 * 3 * pairs * tokens) * 2 / 3 + 2 * 3 * pairs * tokens
    assert ours == pytest.approx(frozen + 2 * 3 * adapters * tokens)


def test_layers_that_are_computed_twice_cost_a_third_more_without_their_last_product_and_the_output_does_not():
    twice, once = (step_flops(workload_of(remat=remat), vocab_blocks=False) for remat in (True, False))
    output, last = 3 * 2 * 16 * 40 * 8 * 32, 2 * 2 * 16 * 24 * 8 * 32
    assert (twice + last - output) / (once - output) == pytest.approx(4 / 3)


def test_a_row_of_two_sequences_costs_twice_as_much():
    one, two = (step_flops(workload_of(sequences_per_row=n), vocab_blocks=False) for n in (1, 2))
    assert two == 2 * one


def test_logits_in_blocks_are_computed_twice():
    blocks, whole = (step_flops(workload_of(), vocab_blocks=blocks) for blocks in (True, False))
    assert blocks - whole == 2 * 16 * 40 * 8 * 32


def test_a_stage_computes_in_the_bubble_too():
    """The bubble, (p - 1) / (v m + p - 1): layers are computed so much more often, the output layer is not."""

    def idle(mesh_shape, repeats=1):
        trainer = TrainerConfig(train_batch_size=12, per_device_parallelism=2, pipeline_repeats=repeats)
        training = dataclasses.replace(workload_of().training, trainer=trainer)
        return training.bubble(make_mesh(mesh_shape, jax.devices()[:3]))

    assert [idle("1,3,1"), idle("pp=3"), idle("pp=3", repeats=3)] == [0, 2 / 8, 2 / 20]
    output = 3 * 2 * 16 * 40 * 8 * 32
    whole, staged = (step_flops(workload_of(), vocab_blocks=False, idle=idle) for idle in (0.0, 0.25))
    assert staged - output == pytest.approx((whole - output) / 0.75)
