import inspect

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lockstep.errors import ConfigError
from lockstep.models import LoraConfig, Qwen3MoeConfig
from lockstep.training import OptimizerConfig, Trainer, TrainerConfig, lm_loss, state_structs
from lockstep.training.step.optimizer import DEFAULTS, _matrix, completed_updates, decay_mask
from tests import tiny
from tests.unit.training.bigrams import Bigrams
from tests.unit.training.loop.test_trainer import rows


def rates(config, steps):
    schedule = config.schedule(steps)
    return [float(schedule(step)) for step in range(steps)]


def test_warmup_rises_from_0_and_cosine_falls_to_the_minimum():
    found = rates(OptimizerConfig(learning_rate=1.0, warmup=4, min_lr_ratio=0.1), 101)
    np.testing.assert_allclose(found[:5], [0.0, 0.25, 0.5, 0.75, 1.0], rtol=1e-6)
    assert found[5] < 1.0 and found == sorted(found[:5]) + sorted(found[5:], reverse=True)
    assert found[-1] == pytest.approx(0.1, abs=2e-3)


def test_fractions_linear_decay_and_a_stable_phase():
    config = OptimizerConfig(learning_rate=1.0, warmup=0.1, decay=0.5, lr_schedule="linear", min_lr_ratio=0.0)
    found = rates(config, 20)
    assert found[2:10] == [1.0] * 8
    np.testing.assert_allclose(found[10:], [1 - i / 10 for i in range(10)], rtol=1e-6)


def test_constant():
    assert rates(OptimizerConfig(learning_rate=0.5, warmup=0, lr_schedule="constant"), 5) == [0.5] * 5


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"learning_rate": -1.0}, "optimizer.learning_rate is -1.0; it must be at least 0"),
        *(({name: 1.0}, rf"optimizer\.{name} is 1\.0; ") for name in ("beta1", "beta2", "epsilon", "ema_decay")),
        ({"type": "muon", "momentum": 1.0}, r"optimizer\.momentum is 1\.0"),
        ({"min_lr_ratio": 1.1}, "optimizer.min_lr_ratio is 1.1; it must be at least 0 and at most 1"),
        ({"max_grad_norm": 0.0}, "Use null for no clipping"),
        ({"decay": 0.0}, "lr_schedule: constant"),
        ({"decay": 0.5, "lr_schedule": "constant"}, "decay is 0.5, for which .*constant has no use"),
        ({"type": "lion", "epsilon": 1e-6}, "epsilon is 1e-06, for which lion has no use; it has beta1, beta2"),
        ({"adam_lr": 0.1}, "optimizer.adam_lr is 0.1, for which adamw has no use"),
        ({"warmup": 2.5}, "optimizer.warmup is 2.5; it must be a fraction of the run, up to 1, or a whole number of"),
        ({"momentum": 0.9}, "optimizer.momentum is 0.9, for which adamw has no use"),
        ({"type": "adafactor", "beta1": 0.9}, "adafactor has no use"),
    ],
)
def test_values_out_of_range_or_without_an_effect(values, text):
    with pytest.raises(ConfigError, match=text):
        OptimizerConfig(**values)


def test_a_schedule_longer_than_the_run():
    with pytest.raises(ConfigError, match=r"warmup \(30 steps\).*num_train_steps = 20"):
        OptimizerConfig(warmup=30).schedule(20)


def test_embedding_norms_and_biases_are_not_decayed():
    parameters = {"attn_norm": jnp.ones((2, 3)), "q_bias": jnp.ones(3), "embed": jnp.ones((4, 3)), "mlp": {"up": 1.0}}
    assert decay_mask(parameters) == {"attn_norm": False, "q_bias": False, "embed": False, "mlp": {"up": True}}
    assert decay_mask({"unembed": 1.0, "lm_head": 1.0}) == {"unembed": True, "lm_head": True}


@pytest.fixture(scope="module")
def levanter():
    """Levanter's own optimizers, which its users know the words of."""
    pytest.importorskip("levanter", reason="the extra [levanter] is not installed")
    from levanter.optim import config, muon

    return {"adam": config.AdamConfig, "lion": config.LionConfig, "muon": muon.MuonConfig}


@pytest.mark.parametrize("shape", ["cosine", "linear", "constant", "inv_sqrt"])
@pytest.mark.parametrize(
    ("steps", "lengths"),
    [
        (20_000, {}),
        (12_000, {"warmup": 500, "decay": 0.3}),
        (300, {"warmup": 0.1, "decay": 50, "min_lr_ratio": 0.0}),
        (300, {"warmup": 0, "decay": 1, "min_lr_ratio": 0.3}),
        (300, {"warmup": 1}),
        (20_000, {"min_lr_ratio": 0.8}),
        (40_000, {"warmup": 0, "decay": 0.5}),
        (100, {"warmup": 0.009, "decay": 0.009}),
    ],
)
def test_learning_rates_are_levanters_at_every_step(levanter, shape, steps, lengths):
    own = {name: value for name, value in lengths.items() if shape != "constant" or name != "decay"}  # it is refused
    ours = OptimizerConfig(lr_schedule=shape, **own).schedule(steps)
    theirs = levanter["adam"](lr_schedule=shape, **lengths).lr_scheduler(steps)
    at = jnp.arange(steps)
    np.testing.assert_allclose(jax.vmap(ours)(at), jax.vmap(theirs)(at), rtol=2e-6, atol=1e-12)


@pytest.mark.parametrize("tied", [False, True])
def test_the_parameters_that_decay_are_levanters(levanter, tied):
    from levanter.models.qwen import Qwen3Config

    sizes = {"hidden_dim": 16, "intermediate_dim": 24, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
    config = Qwen3Config(max_seq_len=16, **sizes, tie_word_embeddings=tied)
    model = config.model_type.init(hax.Axis("vocab", 32), config, key=jax.random.key(0))
    theirs = levanter["adam"]().build_weight_decay_mask()(model)
    ours = decay_mask(model)
    leaves = zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), jax.tree.leaves(model), strict=True)
    found = [(one, bool(other)) for one, other, _ in leaves]
    assert {one for one, _ in found} == {True, False} and all(one == other for one, other in found)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [("adam", {}), ("adam", {"max_grad_norm": 0.3, "weight_decay": 0.3, "beta2": 0.9, "epsilon": 1e-3}), ("lion", {})],
)
def test_updates_are_levanters_step_by_step(levanter, kind, settings):
    """Ten steps, with warm-up and gradients that are clipped in some of them."""
    shared = {"learning_rate": 1e-2, "warmup": 3, **settings}
    optimizers = [OptimizerConfig(type=kind, **shared).build(10), levanter[kind](**shared).build(10)]
    parameters = [{"up": jnp.linspace(-1, 1, 12).reshape(3, 4)} for _ in optimizers]
    states = [each.init(one) for each, one in zip(optimizers, parameters, strict=True)]
    update = [jax.jit(each.update) for each in optimizers]
    for step in range(10):
        gradients = {"up": jax.random.normal(jax.random.key(step), (3, 4)) * (0.05 + step % 3)}
        for index in range(2):
            updates, states[index] = update[index](gradients, states[index], parameters[index])
            parameters[index] = optax.apply_updates(parameters[index], updates)
        np.testing.assert_allclose(parameters[0]["up"], parameters[1]["up"], rtol=1e-6, atol=1e-8)
    assert np.abs(parameters[0]["up"] - np.linspace(-1, 1, 12).reshape(3, 4)).max() > 1e-2


def test_defaults_are_levanters(levanter):
    for kind, theirs in {**levanter, "adamw": levanter["adam"]}.items():
        ours, other = OptimizerConfig(type=kind), theirs()
        for name in ("learning_rate", "min_lr_ratio", "warmup", "decay", "lr_schedule", "max_grad_norm"):
            assert getattr(ours, name) == getattr(other, name), (kind, name)
        for name, value in DEFAULTS[kind].items():
            assert value == (getattr(other, name) or 0.0), (kind, name)


def test_defaults_of_adafactor_are_optaxs():
    given = inspect.signature(optax.adafactor).parameters
    own = {"beta2": given["decay_rate"].default, "epsilon": given["eps"].default}
    assert {**DEFAULTS["adafactor"]} == own | {"weight_decay": DEFAULTS["adamw"]["weight_decay"]}


def test_muons_first_step_is_levanters_in_both_groups(levanter):
    """With Jordan's coefficients; later steps differ while optax's correction of the momentum's bias fades."""
    shared = {"learning_rate": 0.5, "adam_lr": 0.125, "warmup": 0, "lr_schedule": "constant", "weight_decay": 0.25}
    E, M, V = hax.Axis("embed", 8), hax.Axis("mlp", 12), hax.Axis("vocab", 16)
    keys = iter(jax.random.split(jax.random.key(0), 4))
    weight, gradient = (hax.random.normal(next(keys), (M, E)) for _ in range(2))
    head, of_head = (hax.random.normal(next(keys), (V, E)) for _ in range(2))
    optimizer = OptimizerConfig(type="muon", **shared).build(10)
    parameters = {"up": weight.rearrange((E, M)), "lm_head": head}
    ours = first_update(optimizer, {"up": gradient.rearrange((E, M)), "lm_head": of_head}, parameters)

    def linear(array, Out):
        return hax.nn.Linear(weight=array, bias=None, In=E, Out=Out)

    theirs = levanter["muon"](coefficient_type="simple", **shared).build(10)
    parameters = {"up": linear(weight, M), "lm_head": linear(head, V)}
    updates = first_update(theirs, {"up": linear(gradient, M), "lm_head": linear(of_head, V)}, parameters)
    for name, axes in (("up", (M, E)), ("lm_head", (V, E))):
        np.testing.assert_allclose(
            ours[name].rearrange(axes).array, updates[name].weight.array, rtol=2e-3, atol=2e-3, err_msg=name
        )


def test_large_gradients_are_clipped():
    parameters = {"embed": jnp.zeros(2)}
    config = OptimizerConfig(learning_rate=1.0, warmup=0, lr_schedule="constant", weight_decay=0.0, epsilon=1e-2)

    def first_update(scale):
        optimizer = config.build(10)
        gradients = {"embed": jnp.array([0.6, 0.8]) * scale}
        return jax.tree.leaves(optimizer.update(gradients, optimizer.init(parameters), parameters)[0])[0]

    np.testing.assert_allclose(first_update(100.0), first_update(1.0), rtol=1e-6)


def layers(key=0):
    """Parameters as those of a model's layers, with axes as `lockstep.models.weights` orders them."""
    rng = np.random.default_rng(key)
    L, E, H, D, M, V = (
        hax.Axis(name, size)
        for name, size in (("layer", 2), ("embed", 8), ("kv_head", 2), ("head_size", 4), ("mlp", 12), ("vocab", 16))
    )
    axes = {
        "q": (L, E, H, D),
        "o": (L, H, D, E),
        "up": (L, E, M),
        "norm": (L, E),
        "q_bias": (L, H, D),
        "embed": (V, E),
        "lm_head": (E, V),
    }
    return {
        name: hax.named(jnp.asarray(rng.standard_normal([axis.size for axis in each]), jnp.float32), each)
        for name, each in axes.items()
    }


def first_update(optimizer, gradients, parameters):
    """Updates of the first step, by one program: alone each operation would be compiled on its own."""
    return jax.jit(lambda g, p: optimizer.update(g, optimizer.init(p), p)[0])(gradients, parameters)


def first_updates(config):
    """The updates of the first step and the gradients, as plain arrays."""
    parameters, gradients = layers(0), layers(1)
    updates = first_update(config.build(10), gradients, parameters)
    return ({name: np.asarray(each.array) for name, each in tree.items()} for tree in (parameters, gradients, updates))


PLAIN = {"learning_rate": 0.5, "warmup": 0, "lr_schedule": "constant", "max_grad_norm": None, "weight_decay": 0.25}


@pytest.mark.slow
def test_muon_is_optaxs_for_each_matrix_of_the_layers_and_adamw_for_the_rest():
    parameters, gradients, updates = first_updates(OptimizerConfig(type="muon", adam_lr=0.25, **PLAIN))
    for name, shape in (("q", (8, 8)), ("o", (8, 8)), ("up", (8, 12))):
        muon = optax.contrib.muon(0.5, weight_decay=0.25)
        for layer in range(2):
            matrix, gradient = parameters[name][layer].reshape(shape), gradients[name][layer].reshape(shape)
            expected = muon.update(gradient, muon.init(matrix), matrix)[0]
            np.testing.assert_allclose(updates[name][layer].reshape(shape), expected, rtol=1e-5, atol=1e-6)
    adamw = optax.adamw(0.25, b2=0.95, weight_decay=0.25, mask=decay_mask)
    rest = {name: parameters[name] for name in ("norm", "q_bias", "embed", "lm_head")}
    expected, _ = adamw.update({name: gradients[name] for name in rest}, adamw.init(rest), rest)
    for name in rest:
        np.testing.assert_allclose(updates[name], expected[name], rtol=1e-5)


def test_lion_takes_the_sign():
    parameters, gradients, updates = first_updates(OptimizerConfig(type="lion", **PLAIN))
    expected = -0.5 * (np.sign(gradients["up"]) + 0.25 * parameters["up"])
    np.testing.assert_allclose(updates["up"], expected, rtol=1e-6)
    np.testing.assert_allclose(updates["norm"], -0.5 * np.sign(gradients["norm"]))


def test_adafactor_is_optaxs_with_decay_by_the_learning_rate():
    parameters, gradients, updates = first_updates(OptimizerConfig(type="adafactor", **PLAIN))
    expected = first_update(optax.adafactor(0.5, multiply_by_parameter_scale=False), gradients, parameters)
    np.testing.assert_allclose(updates["up"], expected["up"] - 0.5 * 0.25 * parameters["up"], rtol=1e-5)
    np.testing.assert_allclose(updates["norm"], expected["norm"], rtol=1e-5)


def test_adafactor_keeps_rows_and_columns_of_large_matrices_instead_of_moments():
    large = {"up": hax.named(jnp.ones((2, 256, 512)), (hax.Axis("layer", 2), hax.Axis("embed", 256), "mlp"))}
    state = jax.eval_shape(OptimizerConfig(type="adafactor").build(10).init, large)
    assert sum(leaf.size for leaf in jax.tree.leaves(state)) < 0.01 * large["up"].array.size


def test_muon_takes_both_factors_of_an_adapter_as_matrices():
    experts = LoraConfig(r=2, target_modules=("up_proj", "down_proj")).shapes(Qwen3MoeConfig())
    adapters = LoraConfig(r=2).shapes(tiny.CONFIG) | experts
    for name, (a, b) in {
        "expert_up_proj": (((2,), (3,)), ((2,), (3,))),  # of each expert
        "expert_down_proj": (((2,), (3,)), ((2,), (3,))),
        "q_proj": (((1,), (2,)), ((1,), (2, 3, 4))),
        "o_proj": (((1, 2, 3), (4,)), ((1,), (2,))),
        "down_proj": (((1,), (2,)), ((1,), (2,))),
    }.items():
        for part, axes in ((adapters[name].a, a), (adapters[name].b, b)):
            found = _matrix(part)
            assert (tuple(found.reduction_axis), tuple(found.output_axis)) == axes, name


@pytest.mark.parametrize(
    "kind", ["lion", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("muon", "adafactor"))]
)
def test_every_optimizer_trains_on_a_mesh_and_its_large_arrays_are_sharded(kind):
    rate = {"lion": 3e-3, "muon": 1e-2, "adafactor": 3e-2}[kind]
    config = TrainerConfig(num_train_steps=8, train_batch_size=8, mesh_shape="1,2,2", on_nan="skip")
    optimizer = OptimizerConfig(type=kind, learning_rate=rate, warmup=0)
    trainer = Trainer(config, optimizer.build(8), lm_loss, schedule=optimizer.schedule(8))
    losses = []
    trainer.add_hook(lambda info: losses.append(info.loss))
    trainer.train(trainer.init_model(Bigrams.init), rows())
    assert trainer.train_step_traces == 1
    assert losses[-1] < losses[0] - 0.02
    structs, _ = state_structs(Bigrams.init, optimizer.build(8), trainer.mesh, config.precision)
    moments = [leaf for leaf in jax.tree.leaves(structs.opt_state) if leaf.shape == (16, 16)]
    assert all(leaf.sharding.shard_shape(leaf.shape) == (8, 8) for leaf in moments if kind != "adafactor")


def test_the_number_of_updates_that_the_schedule_has_counted():
    optimizer, parameters = OptimizerConfig().build(10), {"embed": jnp.zeros(2)}
    _, state = optimizer.update(parameters, optimizer.init(parameters), parameters)
    assert int(completed_updates(state)) == 1
    assert completed_updates(optax.sgd(0.1).init(parameters)) is None
