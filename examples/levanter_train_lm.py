"""Levanter trains a language model and shows what it says meanwhile: its trainer, its data, its YAML, and one line.

Needs the extra ``levanter``. One process, or two simulated hosts::

    python examples/levanter_train_lm.py --config_path examples/levanter_train_lm.yaml
    python infra/launch.py --backend local --processes 2 --devices_per_process 2 -- \
        python examples/levanter_train_lm.py --config_path examples/levanter_train_lm.yaml

On a pod, with ``levanter_train_lm_v5p_64.yaml``: docs/first-pod.md.

The configuration is that of Levanter's ``train_lm`` with one block more, ``inference_eval``.
"""

import dataclasses
from typing import Any

import haliax as hax
import jax
import levanter.eval
from haliax.partitioning import named_jit, round_axis_for_partitioning
from levanter.config import main as config_main
from levanter.main.train_lm import TrainLmConfig
from levanter.models.lm_model import LmExample, LmHeadModel
from levanter.trainer import Trainer, initialize

import lockstep
import lockstep.levanter


@dataclasses.dataclass
class Config(TrainLmConfig):
    """Levanter's configuration and ours."""

    inference_eval: lockstep.InferenceEvalConfig = dataclasses.field(
        default_factory=lambda: lockstep.InferenceEvalConfig(enabled=False)
    )


def pretrained(config: Config, trainer: Trainer, tokenizer: Any) -> LmHeadModel[Any]:
    """The model of ``initialize_from_hf``, a name or a place of a Hugging Face checkpoint, as ``train_lm`` reads it."""
    converter = config.model.hf_checkpoint_converter(config.initialize_from_hf).replaced(tokenizer=tokenizer)
    mapping, mp = trainer.parameter_axis_mapping, trainer.mp
    kind = config.model.model_type
    model = converter.load_pretrained(kind, config=config.model, axis_mapping=mapping, dtype=mp.compute_dtype)
    return named_jit(mp.cast_to_param, mapping)(model)


def train(config: Config) -> None:
    """Train from the newest checkpoint of the run, ``initialize_from_hf`` or scratch. Every process makes the call."""
    # Joins the job of lockstep launch, a TPU pod, GKE or Slurm. Without this line Levanter starts jax.distributed, and
    # sampling uses what it finds.
    lockstep.levanter.start(config.trainer)
    initialize(config)
    tokenizer = config.data.the_tokenizer
    optimizer = config.optimizer.build(config.trainer.num_train_steps)

    def loss(model: LmHeadModel[Any], example: LmExample, *, key: Any = None) -> Any:
        return model.compute_next_token_loss(example, key=key, logsumexp_weight=config.z_loss_weight)

    with Trainer(config.trainer, optimizer, loss) as trainer:
        data_key, model_key, training_key = jax.random.split(jax.random.PRNGKey(config.trainer.seed), 3)
        Vocab = round_axis_for_partitioning(hax.Axis("vocab", len(tokenizer)), trainer.parameter_axis_mapping)
        Pos = config.model.max_Pos.resize(config.train_seq_len or config.model.max_seq_len)
        dataset = config.data.train_set(Pos, config.trainer.batch_schedule, key=data_key)
        held_out = config.data.tagged_eval_sets(Pos)
        _, resuming = trainer.checkpoint_load_plan()
        if config.initialize_from_hf and not resuming:
            state = trainer.initial_state(training_key, model=pretrained(config, trainer, tokenizer))
        else:
            state = trainer.initial_state(training_key, model_init=lambda: config.model.build(Vocab, key=model_key))

        if held_out:
            evaluate = levanter.eval.cb_tagged_lm_evaluate(
                trainer.EvalBatch,
                held_out,
                tokenizer,
                trainer.device_mesh,
                trainer.compute_axis_mapping,
                config.trainer.max_eval_batches,
                mp=trainer.mp,
            )
            trainer.add_hook(evaluate, every=config.trainer.steps_per_eval)

        samples = config.inference_eval
        trainer.add_hook(
            lockstep.levanter.sample_callback(samples, tokenizer, trainer, model=state.model), every=samples.eval_every
        )

        trainer.train(state, trainer.data_loader(dataset).iter_from_step(int(state.step)))
    trainer.tracker.finish()


if __name__ == "__main__":
    lockstep.run_main(config_main(train))  # when one process fails, the others are told and end within seconds
