"""What a step changes, and what is frozen beside it: runs that train adapters."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lockstep.errors import ConfigError
from lockstep.models import LoraConfig, LoraModel, save_hf
from lockstep.models.trainable import skeleton
from lockstep.placement import make_mesh
from lockstep.training import CheckpointerConfig, OptimizerConfig, Trainer, TrainerConfig, lm_loss, state_structs
from lockstep.training.checkpoints.config import KeepConfig
from lockstep.training.step.train_state import TrainState, average_of, average_parameters, cast_floats, parse_precision
from tests import tiny
from tests.unit.training.bigrams import Bigrams
from tests.unit.training.loop.test_trainer import losses, rows

LORA = LoraConfig(r=4, alpha=16.0)
STEPS = 4


def make(mesh_shape="1,2,2", optimizer=None, **values):
    config = TrainerConfig(num_train_steps=STEPS, train_batch_size=8, mesh_shape=mesh_shape, **values)
    settings = OptimizerConfig(**({"learning_rate": 1e-2, "warmup": 0, "ema_decay": 0.5} | (optimizer or {})))
    return Trainer(config, settings.build(STEPS), lm_loss)


def init(key):
    return LORA.init(tiny.CONFIG, key)


def train(trainer, *, resume=False):
    """Losses by step, the base before, and the result; weight of averages are taken after each step."""
    base = tiny.init_model(trainer)
    frozen = LoraModel(base=base, adapters=None, scale=LORA.scale)
    state = trainer.restore(init, frozen) if resume else None
    model = LoraModel(base=base, adapters=trainer.init_model(init), scale=LORA.scale) if state is None else state
    seen = {}

    def see(info):
        adapters, average = info.model.pairs, None if info.average is None else info.average.pairs
        seen[info.next_step] = (info.loss, *(jax.tree.map(np.asarray, each) for each in (adapters, average)))

    trainer.add_hook(see)
    return seen, base, trainer.train(model, tiny.rows())


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("run")
    trainer = make(checkpointer=CheckpointerConfig(every=2, keep=KeepConfig(newest=9)), log_dir=str(path), run_id="run")
    return path, trainer, *train(trainer)


@pytest.mark.slow
def test_only_adapters_change(run):
    _, trainer, seen, base, result = run
    assert trainer.train_step_traces == 1 and isinstance(result.model, LoraModel)
    for mine, theirs in zip(jax.tree.leaves(result.model.base), jax.tree.leaves(base), strict=True):
        assert mine is theirs and not mine.is_deleted()
    np.testing.assert_array_equal(base.embed.array, tiny.init_model(trainer).embed.array)
    first, last = seen[1][1], seen[STEPS][1]
    assert all(np.abs(a - b).max() > 1e-3 for a, b in zip(*map(jax.tree.leaves, (first, last)), strict=True))


@pytest.mark.slow
def test_the_first_loss_is_that_of_the_model_to_the_bit(run):
    full = make()
    losses = []
    full.add_hook(lambda info: losses.append(info.loss))
    full.train(tiny.init_model(full), tiny.rows())
    assert run[2][1][0] == losses[0] and run[2][2][0] != losses[1]


def test_optimizer_and_checkpoint_have_adapters_alone(run):
    path, *_ = run
    shapes = json.loads((path / "run/checkpoints/step-4/metadata.json").read_text())["shapes"]
    adapters = {f"model.{name}.{part}.0" for name in LORA.modules_of(tiny.CONFIG) for part in "ab"}
    assert {name for name in shapes if name.startswith("model.")} == adapters
    numbers = sum(np.prod(json.loads(text[text.index("[") :])) for text in shapes.values())
    ours = sum(np.prod(leaf.shape) for leaf in jax.tree.leaves(LORA.shapes(tiny.CONFIG)))
    assert 4 * ours <= numbers <= 4 * ours + 8, "themselves, two moments, the average, and counts of steps"


@pytest.mark.slow
def test_the_average_is_of_the_adapters_beside_the_same_weights(run):
    *_, seen, base, result = run
    average = result.eval_model
    assert isinstance(average, LoraModel) and average.base.embed.array is base.embed.array
    expected = [0.5 * old + 0.5 * new for old, new in zip(*map(jax.tree.leaves, (seen[3][2], seen[4][1])), strict=True)]
    for mine, theirs in zip(jax.tree.leaves(average.pairs), expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-7)


def test_a_run_goes_on_bit_for_bit(run):
    path, _, seen, *_ = run
    (path / "run/checkpoints/step-4/metadata.json").rename(path / "kept.json")
    again, _, result = train(make(checkpointer=CheckpointerConfig(), log_dir=str(path), run_id="run"), resume=True)
    assert sorted(again) == [3, 4] and result.completed_steps == STEPS
    for step, values in again.items():
        for mine, theirs in zip(jax.tree.leaves(values), jax.tree.leaves(seen[step]), strict=True):
            np.testing.assert_array_equal(mine, theirs)


@pytest.mark.slow
@pytest.mark.parametrize(
    "values",
    [
        {"mesh_shape": "1,4,1", "per_device_parallelism": 1},
        pytest.param({"optimizer": {"type": "muon", "learning_rate": 1e-2}}, marks=pytest.mark.nightly),
        pytest.param({"optimizer": {"type": "adafactor"}, "on_nan": "skip"}, marks=pytest.mark.nightly),
        pytest.param({"mp": "p=f32,c=bf16"}, marks=pytest.mark.nightly),
    ],
)
def test_adapters_are_trained_whatever_the_settings(run, values):
    seen, _, result = train(make(**values))
    expected = [run[2][step][0] for step in sorted(run[2])]
    rtol = 2e-2 if "mp" in values else 1e-5
    np.testing.assert_allclose([seen[step][0] for step in sorted(seen)][:1], expected[:1], rtol=rtol)
    if "mp" in values or "mesh_shape" in values:
        np.testing.assert_allclose([seen[step][0] for step in sorted(seen)], expected, rtol=max(rtol, 1e-4))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(result.model.pairs)} == {"float32"}


def test_a_model_that_is_trained_as_a_whole_has_nothing_frozen():
    state = TrainState(step=np.int32(1), model=skeleton(8, tiny.CONFIG), opt_state=())
    changing, frozen = state.split()
    assert frozen is None and changing.model is state.model and changing.join(None).model is state.model


@pytest.mark.slow
def test_a_model_with_adapters_is_saved_merged(run, tmp_path):
    from safetensors.numpy import load_file

    from tests.adapters import numpy_merged

    model = run[-1].model
    save_hf(model, tmp_path / "hf")
    stored = load_file(tmp_path / "hf" / "model.safetensors")
    merged = numpy_merged(model)
    np.testing.assert_allclose(
        stored["model.layers.1.mlp.down_proj.weight"], merged["down_proj"][1].T, rtol=1e-5, atol=1e-6
    )
    q = merged["q_proj"][0].reshape(tiny.CONFIG.hidden_dim, -1)
    np.testing.assert_allclose(stored["model.layers.0.self_attn.q_proj.weight"], q.T, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(stored["model.embed_tokens.weight"], model.base.embed.array)


DECAY = 0.75


def train_averaged(path, steps=STEPS, **values):
    settings = {"checkpointer": CheckpointerConfig(every=1), "log_dir": str(path), "run_id": "run"} | values
    config = TrainerConfig(num_train_steps=steps, train_batch_size=8, **settings)
    optimizer = OptimizerConfig(learning_rate=1e-2, warmup=0, ema_decay=DECAY)
    trainer = Trainer(config, optimizer.build(STEPS), lm_loss, schedule=optimizer.schedule(STEPS))
    seen = []

    class Seeing:
        def on_step(self, info, force=False):
            both = [np.asarray(each.head.array) for each in (info.model, info.eval_model)]
            if not force:
                seen.append((info.loss, *both))

    trainer.add_hook(Seeing())
    state = trainer.restore(Bigrams.init)
    result = trainer.train(trainer.init_model(Bigrams.init) if state is None else state, rows())
    np.testing.assert_array_equal(np.asarray(result.eval_model.head.array), seen[-1][2])
    return seen


def test_the_average_follows_the_parameters_and_changes_no_loss(tmp_path):
    seen = train_averaged(tmp_path)
    assert [loss for loss, _, _ in seen[1:]] == losses()[0]
    expected = seen[0][1]
    np.testing.assert_array_equal(seen[0][2], expected)
    for _, parameters, average in seen[1:]:
        expected = DECAY * expected + (1 - DECAY) * parameters
        np.testing.assert_allclose(average, expected, rtol=1e-6)
    assert np.abs(seen[-1][1] - seen[-1][2]).max() > 1e-3


def test_a_run_that_goes_on_has_the_same_average(tmp_path):
    whole = train_averaged(tmp_path / "whole", checkpointer=None)
    first = train_averaged(tmp_path, steps=2)
    second = train_averaged(tmp_path)
    for one, other in zip(whole[1:], [*first[1:], *second], strict=True):
        for a, b in zip(one, other, strict=True):
            np.testing.assert_array_equal(a, b)


def test_it_is_sharded_as_the_parameters_and_wide_whatever_their_type():
    optimizer = OptimizerConfig(ema_decay=DECAY).build(3)
    state, _ = state_structs(Bigrams.init, optimizer, make_mesh("1,2,2"), parse_precision("p=bf16"))
    average = average_of(state.opt_state)
    for one, other in zip(jax.tree.leaves(average), jax.tree.leaves(state.model), strict=True):
        assert (one.shape, one.sharding) == (other.shape, other.sharding)
        assert (one.dtype, other.dtype) == (jnp.float32, jnp.bfloat16)


def test_an_optimizer_without_one_has_none():
    parameters = {"a": jnp.ones(2)}
    assert average_of(optax.adam(1e-3).init(parameters)) is None
    assert average_of(optax.chain(optax.sgd(0.1), average_parameters(0.5)).init(parameters)) is not None


@pytest.mark.parametrize(
    ("policy", "param", "compute"),
    [
        ("f32", "float32", "float32"),
        ("bf16", "bfloat16", "bfloat16"),
        ("p=f32,c=bf16", "float32", "bfloat16"),
        ("compute=bfloat16, params=full", "float32", "bfloat16"),
        ("p=bf16", "bfloat16", "bfloat16"),
        ("c=bf16", "float32", "bfloat16"),
    ],
)
def test_a_policy_names_both_types(policy, param, compute):
    found = parse_precision(policy)
    assert (found.param.name, found.compute.name) == (param, compute)


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        ("int8", "mp is 'int8': 'int8' is not a known float type"),
        ("p=f32,c=", "'' is not a known float type"),
        ("p=f32,o=bf16", "'o=bf16' is not one of p= and c=, each once"),
        ("p=f32,params=bf16", "'params=bf16' is not one of p= and c=, each once"),
        ("x=f32", "'x=f32' is not one of p= and c=, each once"),
        ("", "mp is ''"),
    ],
)
def test_what_is_not_a_policy_is_refused_with_the_types(policy, text):
    with pytest.raises(ConfigError, match=f"{text}.*types: f32, float32"):
        parse_precision(policy)


@pytest.mark.parametrize("policy", ["f16", "half", "p=f32,c=float16", "p=f16,c=f32"])
def test_float16_is_refused_whose_range_loses_gradients(policy):
    with pytest.raises(ConfigError, match=f"mp is '{policy}', and float16 cannot train.* Use bf16 .* or f32"):
        parse_precision(policy)


def test_only_floats_are_cast():
    tree = {"weight": np.ones(2, np.float32), "token": np.ones(2, np.int32), "mask": np.ones(2, bool)}
    cast = cast_floats(tree, jnp.dtype(jnp.bfloat16))
    assert {name: leaf.dtype.name for name, leaf in cast.items()} == {
        "weight": "bfloat16",
        "token": "int32",
        "mask": "bool",
    }


def test_parameters_and_arithmetic_have_types_of_their_own():
    precision = parse_precision("p=f32,c=bf16")
    weight = np.ones(2, np.float16)
    assert precision.cast_to_compute(weight).dtype == jnp.bfloat16
    assert precision.cast_to_param(weight).dtype == np.float32
