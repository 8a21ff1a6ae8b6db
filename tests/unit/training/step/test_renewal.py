"""A reference model that is renewed: TRL's numbers, and a loss that compares a model with itself."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lockstep.errors import ConfigError
from lockstep.main.arguments import parse_arguments
from lockstep.training import OptimizerConfig, TrainGrpoConfig, TrainPreferenceConfig
from lockstep.training.step.renewal import ReferenceRenewal, reference_of
from tests import rollouts as runs
from tests.adapters import LORA
from tests.unit.training.objectives.test_preference import FILE

GOLDEN = Path(__file__).parents[3] / "golden" / "trl_losses.npz"


def test_the_reference_is_that_of_trls_callback():
    golden = np.load(GOLDEN)
    models, references = jnp.asarray(golden["renewal/models"]), golden["renewal/references"]
    renewal = ReferenceRenewal(every=2, mixup=0.6, dtype=jnp.dtype(jnp.float32))
    optimizer = optax.chain(optax.identity(), renewal.transformation())
    state = optimizer.init(models[0])
    for step in range(1, len(models)):
        _, state = optimizer.update(models[step] - models[step - 1], state, models[step - 1])
        np.testing.assert_allclose(reference_of(state), references[step], rtol=1e-5, atol=1e-6)
    assert len(np.unique(references, axis=0)) == 3, "renewed twice in five steps"


def test_it_is_kept_in_the_compute_type_and_a_copy_is_exact():
    renewal = ReferenceRenewal(every=1, mixup=1.0, dtype=jnp.dtype(jnp.bfloat16)).transformation()
    start, updates = jnp.array([1.0, 3.0]), jnp.array([0.01, -0.7])
    _, state = renewal.update(updates, renewal.init(start), start)
    assert reference_of((state, ())).tolist() == (start + updates).astype(jnp.bfloat16).tolist()


@pytest.mark.slow
@pytest.mark.parametrize(("every", "lora"), [pytest.param(1, None, marks=pytest.mark.nightly), (None, None), (1, LORA)])
def test_the_divergence_of_grpo_is_from_the_renewed_model(every, lora):
    """A model that is its own reference in every rollout has no divergence; from the first model it moves away."""
    renewal = every and ReferenceRenewal(every=every, mixup=1.0, dtype=jnp.dtype(jnp.float32))
    optimizer, tracker = OptimizerConfig(learning_rate=1e-2, warmup=0).build(3, renewal), runs.Recorder()
    trainer, rollouts, model = runs.make(
        "auto", 3, tracker=tracker, loss={"kl_coefficient": 0.1}, optimizer=optimizer, lora=lora
    )
    runs.train(trainer, rollouts, model)
    divergences = [values["train/kl"] for values in tracker.scalars.values() if "train/kl" in values]
    assert len(divergences) == 3 and divergences[0] < 1e-6
    assert (max(divergences) < 1e-6) == (every == 1)
    assert trainer.train_step_traces == 1 and set(rollouts.logprob_traces.values()) == {1}


RENEWED = ["--reference_every", "2"]
GRPO = ["--config_path", "config/grpo_demo.yaml"]
ADAPTERS = ["--model", "null", "--initialize_from_hf", "x", "--lora.r", "4", "--lora.alpha", "8"]


@pytest.mark.parametrize(
    ("cls", "arguments", "text"),
    [
        (TrainPreferenceConfig, [*FILE, "--reference_every", "0"], "reference_every is 0; it must be at least 1"),
        (TrainPreferenceConfig, [*FILE, "--reference_mixup", "0.5"], "reference_every is null: it would do nothing"),
        (TrainPreferenceConfig, [*FILE, *RENEWED, "--reference_mixup", "1.5"], "it must be more than 0 and at most 1"),
        (TrainPreferenceConfig, [*FILE, *RENEWED, "--objective", "{type: simpo}"], "the loss has no reference model"),
        (
            TrainPreferenceConfig,
            [*FILE, *RENEWED, "--data.format", "preference_with_reference"],
            "the loss has no reference model on the devices",
        ),
        (TrainGrpoConfig, [*GRPO, *RENEWED], "reference_every is 2, and the loss has no reference model"),
        (
            TrainPreferenceConfig,
            [*FILE, *ADAPTERS, *RENEWED, "--reference_mixup", "0.6"],
            "reference_mixup is 0.6 and lora is given",
        ),
    ],
)
def test_settings_that_cannot_work(cls, arguments, text):
    with pytest.raises(ConfigError, match=text):
        parse_arguments(cls, arguments)
