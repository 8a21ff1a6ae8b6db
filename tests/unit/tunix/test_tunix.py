"""Tunix's GRPO learner with our rollout and hooks: on one mesh, on two, offloaded, with adapters; its DPO trainer."""

import dataclasses

import jax
import numpy as np
import optax
import pytest
import qwix
from flax import nnx
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rl_cluster import ClusterConfig, RLCluster, RLTrainingConfig, Role
from tunix.rl.rollout.base_rollout import RolloutConfig
from tunix.sft.dpo.dpo_trainer import DPOTrainer, DPOTrainingConfig, TrainingInput

from lockstep.callback import InferenceEvalConfig
from lockstep.report import read_jsonl
from lockstep.tunix import Rollout, sample_hooks
from tests import tiny
from tests import tunix_models as models
from tests.unit.tunix.test_rollout import close, own_logprobs

PROMPTS = ["What is 12 plus 7?", "one", "What is 40 in words?", "two"]
STEPS, GROUP = 4, 4


@dataclasses.dataclass(frozen=True)
class Learned:
    """What a run did."""

    outputs: list
    gaps: list
    cluster: RLCluster


def reward(prompts, completions, **_):
    return [sum(map(str.islower, text)) / max(1, len(text)) for text in completions]


def learn(directory, *, apart=False, offload=False, lora=False, iterations=2):
    """Trains with rollouts whose log-probabilities are compared with those of the model that they are to have."""
    devices = jax.devices()
    actors = models.mesh_of(devices[:2], 2, 1) if apart else models.mesh(2, 2)
    rollouts = models.mesh_of(devices[2:4], 1, 2) if apart else actors
    actor = models.randomise(models.MODELS["qwen3"](tiny.vocab_size()), actors)
    if lora:
        provider = qwix.LoraProvider(module_path=".*(q_proj|down_proj)", rank=4, alpha=8.0)
        with actors:
            actor = qwix.apply_lora_to_model(actor, provider, rngs=nnx.Rngs(1), **actor.get_model_input())
    cluster = RLCluster(
        actor=actor,
        tokenizer=tiny.tokenizer(),
        cluster_config=ClusterConfig(
            role_to_mesh={Role.ACTOR: actors, Role.REFERENCE: actors, Role.ROLLOUT: rollouts},
            rollout_engine=Rollout,
            offload_to_cpu=offload,
            training_config=RLTrainingConfig(
                actor_optimizer=optax.adam(3e-2),
                max_steps=STEPS * iterations,
                eval_every_n_steps=100,
                mini_batch_size=2,
                train_micro_batch_size=2,
            ),
            rollout_config=RolloutConfig(
                max_tokens_to_generate=10, max_prompt_length=16, temperature=1.0, return_logprobs=True
            ),
        ),
    )
    config = InferenceEvalConfig(
        prompts=["one"], eval_every=3, at_start=True, max_new_tokens=4, on_error="raise", audit=True
    )
    cluster.actor_trainer.with_training_hooks(sample_hooks(config, tiny.tokenizer(), output_dir=directory))
    generate, outputs, gaps = cluster.rollout.generate, [], []

    def compared(prompts, rollout_config, **options):
        output = generate(prompts, rollout_config, **options)
        outputs.append(output)
        gaps.append(close(output.logprobs, own_logprobs(cluster.rollout.model(), output, 1.0)))
        return output

    cluster.rollout.generate = compared
    algorithm = GRPOConfig(num_generations=GROUP, num_iterations=iterations, beta=0.0)
    learner = GRPOLearner(rl_cluster=cluster, reward_fns=reward, algo_config=algorithm)
    assert learner.should_sync_weights == apart
    learner.train([{"prompts": np.array(PROMPTS[step % 2 :: 2])} for step in range(STEPS)])
    return Learned(outputs, gaps, cluster)


@pytest.mark.nightly  # in make slow: test_rollout.py
@pytest.mark.parametrize(
    "values",
    [
        pytest.param({}, id="one mesh"),
        pytest.param({"apart": True}, id="two meshes"),
        pytest.param({"apart": True, "lora": True}, id="adapters on two meshes"),
        pytest.param({"offload": True, "lora": True}, id="offloaded adapters"),
    ],
)
def test_rollouts_are_the_actors_and_rounds_are_exact(tmp_path, values):
    learned = learn(tmp_path, **values)
    assert len(learned.gaps) == STEPS and max(learned.gaps) < 1e-5, learned.gaps
    texts = [tuple(output.text) for output in learned.outputs]
    assert len(set(texts)) == STEPS and all(len(output.tokens) == 2 * GROUP for output in learned.outputs)
    trainer = learned.cluster.actor_trainer
    assert trainer.train_steps == STEPS * 2
    assert [row["step"] for row in read_jsonl(tmp_path / "samples.jsonl")] == [0, 3, 6, 8]
    assert trainer.metrics_logger.get_metric_history("inference_eval", "logprob_gap", "eval").max() < 1e-5
    kind = nnx.LoRAParam if "lora" in values else nnx.Param
    actor, sampled = (
        jax.tree.leaves(nnx.state(each, kind)) for each in (trainer.model, learned.cluster.rollout.model())
    )
    assert all(np.array_equal(a, b) for a, b in zip(actor, sampled, strict=True))


def preferences(seed, rows=4, length=8):
    """Random pairs of answers, without padding."""
    rng = np.random.default_rng(seed)
    ids = [rng.integers(1, tiny.vocab_size(), (rows, length)).astype(np.int32) for _ in range(3)]
    ones = np.ones((rows, length), np.int32)
    return TrainingInput(
        prompt_ids=ids[0],
        prompt_mask=ones,
        chosen_ids=ids[1],
        chosen_mask=ones,
        rejected_ids=ids[2],
        rejected_mask=ones,
    )


def prefer(hooks_of):
    """The losses of DPO of an adapter."""
    mesh = models.mesh(2, 2)
    model = models.randomise(models.MODELS["qwen3"](tiny.vocab_size()), mesh)
    provider = qwix.LoraProvider(module_path=".*(q_proj|down_proj)", rank=4, alpha=8.0)
    with mesh:
        policy = qwix.apply_lora_to_model(model, provider, rngs=nnx.Rngs(1), **model.get_model_input())
        trainer = DPOTrainer(policy, model, optax.adam(3e-2), DPOTrainingConfig(eval_every_n_steps=100))
        trainer.with_training_hooks(hooks_of())
        trainer.train([preferences(seed) for seed in range(5)])
    return [float(loss).hex() for loss in trainer.metrics_logger.get_metric_history("", "loss", "train")], trainer


@pytest.mark.nightly
def test_dpo_of_an_adapter_samples_the_policy_and_trains_the_same(tmp_path):
    config = InferenceEvalConfig(prompts=["one"], eval_every=2, max_new_tokens=8, on_error="raise", audit=True)
    plain, _ = prefer(lambda: None)
    sampled, trainer = prefer(lambda: sample_hooks(config, tiny.tokenizer(), output_dir=tmp_path))
    assert sampled == plain and len(set(plain)) == 5
    rows = read_jsonl(tmp_path / "samples.jsonl")
    assert [row["step"] for row in rows] == [2, 4, 5]
    assert len({row["generated_text"] for row in rows}) > 1, "the adapter is merged"
    logger = trainer.metrics_logger
    assert logger.get_metric_history("inference_eval", "logprob_gap", "eval").max() < 1e-5
