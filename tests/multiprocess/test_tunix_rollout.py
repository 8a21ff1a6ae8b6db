"""Our rollout for Tunix's learners on two processes: every one gets the answers that one process gets."""

import dataclasses

import jax
import pytest

from lockstep.errors import ConfigError, HostError
from tests import tiny
from tests import tunix_models as models
from tests.multiprocess.harness import run_processes

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


def setting():
    """A mesh, a configuration, and what a rollout is made of."""
    from tunix.rl.rollout.base_rollout import RolloutConfig

    mesh = models.mesh(2, 2)
    model = models.randomise(models.MODELS["qwen3"](tiny.vocab_size()), mesh, seed=0)
    config = RolloutConfig(max_tokens_to_generate=6, max_prompt_length=16, return_logprobs=True, seed=3)
    config = dataclasses.replace(config, temperature=0.7, top_p=1.0, top_k=20)
    return mesh, config, {"rollout_actor": model, "tokenizer": tiny.tokenizer(), "rollout_config": config}


def answers(hosts):
    """Tokens and log-probabilities of one rollout, and what other meshes and other prompts are told."""
    from lockstep.tunix import Rollout

    mesh, config, options = setting()
    made = Rollout(mesh=mesh, **options)
    with mesh:
        output = made.generate(["What is 12 plus 7?", "What is 12 plus 7?", "one"], config)
    found = [[each.tolist() for each in output.tokens], [each.tolist() for each in output.logprobs]]
    errors = []
    if hosts.count > 1:
        with mesh, pytest.raises(HostError) as caught:
            made.generate([f"{hosts.index}"], config)
        errors.append(str(caught.value))
        for other in (models.mesh(4, 1), models.mesh_of(jax.devices()[:2], 2, 1)):
            with pytest.raises(ConfigError, match="not the actor's, or leaves out processes") as refused:
                Rollout(mesh=other, **options)
            errors.append(str(refused.value))
    return [*found, errors]


@pytest.mark.nightly  # in make slow: unit/tunix/test_rollout.py
def test_every_process_has_the_answers_that_one_process_has():
    ((tokens, logprobs, _),) = run_processes(answers, timeout_s=600, processes=1, devices=4)
    one, other = run_processes(answers, timeout_s=600, processes=2, devices=2)
    assert one[:2] == other[:2] and one[0] == tokens and len(one[2]) == 3
    for row, expected in zip(one[1], logprobs, strict=True):
        assert row == pytest.approx(expected, abs=1e-5)
