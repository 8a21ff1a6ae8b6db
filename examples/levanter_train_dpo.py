"""Direct preference optimisation with Levanter, and samples of the policy meanwhile: one line beside its trainer.

Needs the extra ``levanter``::

    python examples/levanter_train_dpo.py --config_path examples/levanter_train_dpo.yaml

The trainer's model is Levanter's ``DpoModel``, a policy and a reference; the hook samples the policy. The configuration
is that of Levanter's ``train_dpo`` with one block more, ``inference_eval``. Policy and reference start from the same
random weights here; a real run starts both from a checkpoint.
"""

import dataclasses
from typing import Any

import haliax as hax
import jax
from haliax.partitioning import round_axis_for_partitioning
from levanter.config import main as config_main
from levanter.data.text.preference import dataset_for_preference_format
from levanter.dpo import DpoModel, dpo_loss
from levanter.main.train_dpo import TrainDpoConfig
from levanter.trainer import Trainer, initialize

import lockstep
import lockstep.levanter


@dataclasses.dataclass
class Config(TrainDpoConfig):
    """Levanter's configuration and ours."""

    inference_eval: lockstep.InferenceEvalConfig = dataclasses.field(
        default_factory=lambda: lockstep.InferenceEvalConfig(enabled=False)
    )


def train(config: Config) -> None:
    """Train the policy. Every process makes the same call."""
    lockstep.levanter.start(config.trainer)  # see examples/levanter_train_lm.py
    initialize(config)
    tokenizer = config.data.the_tokenizer
    optimizer = config.optimizer.build(config.trainer.num_train_steps)

    def loss(model: DpoModel, example: Any, *, key: Any = None) -> Any:
        return dpo_loss(model.policy, model.reference, example, beta=config.beta)

    with Trainer(config.trainer, optimizer, loss) as trainer:
        data_key, model_key, training_key = jax.random.split(jax.random.PRNGKey(config.trainer.seed), 3)
        Vocab = round_axis_for_partitioning(hax.Axis("vocab", len(tokenizer)), trainer.parameter_axis_mapping)
        ((name, component),) = config.data.components.items()
        cache = config.data.build_caches("train")[name]
        dataset = dataset_for_preference_format(component.format, config.model.max_Pos, cache).shuffle(data_key)

        def init() -> DpoModel:
            return DpoModel(
                policy=config.model.build(Vocab, key=model_key), reference=config.model.build(Vocab, key=model_key)
            )

        trainable = DpoModel(policy=True, reference=False)
        state = trainer.initial_state(training_key, model_init=init, is_trainable=trainable)

        samples = config.inference_eval
        trainer.add_hook(
            lockstep.levanter.sample_callback(samples, tokenizer, trainer, model=state.model), every=samples.eval_every
        )

        trainer.train(state, trainer.data_loader(dataset).iter_from_step(int(state.step)))
    trainer.tracker.finish()


if __name__ == "__main__":
    lockstep.run_main(config_main(train))  # when one process fails, the others are told and end within seconds
