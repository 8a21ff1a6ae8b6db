"""On-policy distillation: its term against NumPy, and its gradient against that of the divergence itself."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.errors import ConfigError
from lockstep.main.arguments import parse_arguments
from lockstep.training import TrainGrpoConfig
from lockstep.training.objectives import GrpoConfig
from lockstep.training.run.teacher import check_teacher
from tests import rollouts as runs
from tests import tiny
from tests.adapters import save_base
from tests.unit.training.objectives.test_grpo import in_numpy, made_up, parts_of


@pytest.mark.parametrize("loss", ["grpo", "dapo", "gspo", "cispo"])
def test_the_advantage_of_a_token_has_what_the_teacher_says(loss):
    values = made_up() | {"teacher_logprobs": made_up(seed=1)["logprobs"]}
    config = GrpoConfig(loss=loss, teacher_coefficient=0.7)
    given = {name: values[name] for name in ("logprobs", "advantage", "mask")}
    wide = {name: value if name == "mask" else value.astype(np.float64) for name, value in values.items()}
    expected = in_numpy(
        config, **{name: wide[name] for name in given}, old=wide["rollout_logprobs"],
        drawn=wide["rollout_logprobs"], trainer_old=wide["logprobs"], teacher=wide["teacher_logprobs"],
    )  # fmt: skip
    parts = parts_of(config, **given, **{name: values[name] for name in ("rollout_logprobs", "teacher_logprobs")})
    assert float(parts.total / parts.weight) == pytest.approx(expected, rel=1e-5)


def test_the_mean_gradient_is_that_of_the_reverse_divergence():
    """Over all tokens that may be drawn, each as often as it is; nothing else is rewarded."""
    student, teacher = np.random.default_rng(0).normal(size=(2, 9)).astype(np.float32)
    fixed, config = jax.nn.log_softmax(student)[:, None], GrpoConfig(loss="dapo", teacher_coefficient=1.0)

    def mean_loss(logits):
        def loss_of(token):
            own, old, of_teacher = (x[token].reshape(1, 1) for x in (jax.nn.log_softmax(logits), fixed, wanted))
            given = {"logprobs": own, "rollout_logprobs": old, "teacher_logprobs": of_teacher}
            return parts_of(config, **given, advantage=jnp.zeros(1), mask=jnp.ones((1, 1), bool)).total

        return sum(jnp.exp(fixed[token, 0]) * loss_of(token) for token in range(9))

    def divergence(logits):
        own = jax.nn.log_softmax(logits)
        return jnp.sum(jnp.exp(own) * (own - wanted))

    wanted = jax.nn.log_softmax(teacher)
    np.testing.assert_allclose(jax.grad(mean_loss)(student), jax.grad(divergence)(student), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_a_student_comes_nearer_to_its_teacher_by_nothing_else():
    rewards = [runs.LengthReward(weight=0.0)]
    tracker = runs.Recorder()
    trainer, rollouts, model = runs.make(
        "auto", 16, tracker=tracker, loss={"loss": "dapo", "teacher_coefficient": 1.0}, run={"rewards": rewards}
    )
    runs.train(trainer, rollouts, model)
    divergences = [tracker.scalars[step]["train/teacher_kl"] for step in range(1, 17)]
    assert np.mean(divergences[-4:]) < 0.7 * np.mean(divergences[:4]), divergences
    assert rollouts.logprob_traces == {"teacher_logprobs": 1}


TINY = ["--config_path", "config/grpo_demo.yaml"]


def test_a_teacher_alone_may_be_learned_from(tmp_path):
    arguments = [*TINY, "--rewards", json.dumps([{"type": "gsm8k", "weight": 0}])]
    with pytest.raises(ConfigError, match="rewards has weights of 0 only"):
        parse_arguments(TrainGrpoConfig, arguments)
    config = parse_arguments(TrainGrpoConfig, [*arguments, "--teacher", "t", "--teacher_coefficient", "1"])
    assert config.columns(64)["teacher_logprobs"].shape == (config.data.max_seq_len or 64,)


@pytest.mark.parametrize("given", [["--teacher", "t"], ["--teacher_coefficient", "1"]])
def test_teacher_and_coefficient_go_together(given):
    with pytest.raises(ConfigError, match=r"teacher is .* and teacher_coefficient is .*: neither does anything alone"):
        parse_arguments(TrainGrpoConfig, [*TINY, *given])


def test_a_teacher_of_other_token_ids_or_shorter_rows_is_refused(tmp_path):
    save_base(str(tmp_path / "teacher"))
    length, tokenizer = tiny.CONFIG.max_seq_len, tiny.tokenizer()
    check_teacher(str(tmp_path / "teacher"), tokenizer, length)
    with pytest.raises(ConfigError, match=f"sequences of {length} tokens, and the run has .* and {length + 1}"):
        check_teacher(str(tmp_path / "teacher"), tokenizer, length + 1)
    tokenizer.add_tokens(["<one more>"])
    with pytest.raises(ConfigError, match="has no id for '<one more>', and tokenizer has .*of the same vocabulary"):
        check_teacher(str(tmp_path / "teacher"), tokenizer, length)
