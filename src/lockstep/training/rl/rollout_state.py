"""The part of a rollout that a checkpoint keeps, and the settings that must be those with which it was sampled."""

from collections.abc import Mapping
from typing import Any, Final

import jax

from lockstep.errors import ConfigError
from lockstep.training.rl.config import GrpoRunFields
from lockstep.training.rl.rollout import Rollout

SIZES: Final = {
    "updates": "updates per rollout (num_iterations times minibatches)",
    "n_generations": "answers per question (rollout.n_generations)",
    "n_questions": "questions per rollout (trainer.train_batch_size times minibatches / rollout.n_generations)",
}
"""The numbers that follow from settings and decide which questions a rollout has, in the words of an error."""


def saved_state(fields: GrpoRunFields, n_questions: int, rollout: Rollout | None) -> dict[str, Any]:
    """Return the state of a rollout, and the settings that `read_state` compares.

    Args:
        n_questions: The number of questions of a rollout.
        rollout: The rollout that has updates to come; None where there is none.
    """
    kept = None if rollout is None else rollout.state()
    return {**_sizes(fields, n_questions), "temperature": fields.rollout.temperature, "rollout": kept}


def read_state(
    state: Mapping[str, Any], fields: GrpoRunFields, n_questions: int, columns: Mapping[str, jax.ShapeDtypeStruct]
) -> Rollout | None:
    """Return the rollout that `saved_state` was given.

    Args:
        columns: Shape and type of one row of each column of this run.

    Raises:
        ConfigError: The settings are not those of the run that was saved.
    """
    for name, now in _sizes(fields, n_questions).items():
        if (before := state[name]) != now:
            raise ConfigError(
                f"the checkpoint is of a run with {before} {SIZES[name]}, and now there are {now}. Use the same, "
                "or another trainer.run_id."
            )
    if state["rollout"] is None:
        return None
    rollout, temperature = Rollout.from_state(state["rollout"]), fields.rollout.temperature
    end = (rollout.number + 1) * fields.updates
    if (before := state["temperature"]) != temperature:
        raise ConfigError(
            f"the checkpoint is from within a rollout that was sampled with rollout.temperature {before}, and now "
            f"it is {temperature}: the ratios of its answers would be of two policies. Use {before} until step "
            f"{end}, with which it ends, or another trainer.run_id."
        )
    _check_rows(rollout, columns, end)
    return rollout


def _sizes(fields: GrpoRunFields, n_questions: int) -> dict[str, int]:
    """The numbers of `SIZES`."""
    return {
        "updates": fields.updates,
        "n_generations": fields.rollout.n_generations,
        "n_questions": n_questions,
    }


def _check_rows(rollout: Rollout, columns: Mapping[str, jax.ShapeDtypeStruct], end: int) -> None:
    """Refuse a rollout whose rows are none of this run.

    Args:
        end: The number of the step with which it ends.
    """
    before = {name: column.shape[1:] for name, column in rollout.columns.items()}
    now = {name: column.shape for name, column in columns.items()}
    if before != now:
        has = [f"{shapes['tokens'][0]} tokens and the columns {', '.join(sorted(shapes))}" for shapes in (before, now)]
        raise ConfigError(
            f"the checkpoint is from within a rollout whose rows have {has[0]}, and now they have {has[1]}. Use "
            "the earlier data.max_seq_len, use_rollout_logprobs, kl_coefficient and rollout.replay_routing until "
            f"step {end}, with which it ends, or another trainer.run_id."
        )
