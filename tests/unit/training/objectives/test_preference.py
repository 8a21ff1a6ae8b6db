"""What all preference objectives have in common, and one of a user's own."""

import dataclasses
import sys
import textwrap

import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.config_fields import encode_config
from lockstep.main.arguments import parse_arguments
from lockstep.training import PreferenceObjective, TrainPreferenceConfig
from lockstep.training.objectives import DpoConfig, OrpoConfig, SimpoConfig

FILE = ["--config_path", "config/dpo_tiny.yaml"]


@pytest.mark.parametrize("objective", [DpoConfig(), DpoConfig(loss="ipo"), OrpoConfig(), SimpoConfig()])
def test_a_pair_without_targets_has_no_weight(objective):
    """It fills up the last batch of a validation: what its log-probabilities are, nan too, does not count."""
    logprobs = jnp.array([[[-0.5, -1.5], [-2.0, -3.0]], [[jnp.nan, -1.0], [-7.0, jnp.nan]]])
    mask = jnp.array([[[1, 1], [1, 1]], [[0, 0], [0, 0]]], bool)
    reference = jnp.array([[-2.5, -4.0], [jnp.nan, jnp.nan]])
    alone = objective.parts(logprobs[:1], mask[:1], reference[:1])
    both = objective.parts(logprobs, mask, reference)
    assert float(both.weight) == float(alone.weight) == 1
    assert float(both.total) == float(alone.total)
    assert {k: float(v) for k, v in both.metrics.items()} == {k: float(v) for k, v in alone.metrics.items()}


def test_one_of_a_users_own_is_a_file(tmp_path, monkeypatch):
    (tmp_path / "my_losses.py").write_text(
        textwrap.dedent(
            """
            import dataclasses
            import jax
            from lockstep.training import PairLosses, PreferenceObjective

            @dataclasses.dataclass(frozen=True, kw_only=True)
            class Hinge(PreferenceObjective):
                margin: float = 1.0

                def losses(self, pairs):
                    return PairLosses(jax.nn.relu(self.margin - pairs.mean[:, 0] + pairs.mean[:, 1]), pairs.mean)
            """
        )
    )
    monkeypatch.syspath_prepend(tmp_path)
    try:
        given = {"type": "my_losses:Hinge", "margin": 3.0}
        config = parse_arguments(TrainPreferenceConfig, [*FILE, "--objective", f"{given}"])
        assert encode_config(config)["objective"] == given
        parts = config.loss_fn.parts(np.array([[[-1.0, -1.0], [-2.0, -4.0]]], np.float32), np.ones((1, 2, 2), bool))
        assert float(parts.total) == 1.0 and float(parts.metrics["rewards/margins"]) == 2.0
    finally:
        sys.modules.pop("my_losses", None)


def test_a_subclass_must_have_losses():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Nothing(PreferenceObjective): ...

    with pytest.raises(NotImplementedError):
        Nothing().parts(np.zeros((1, 2, 2), np.float32), np.ones((1, 2, 2), bool))
