"""Rows of a training batch made of sampled answers."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Float

from lockstep.errors import ConfigError
from lockstep.types import Completion


def make_columns(
    columns: Mapping[str, jax.ShapeDtypeStruct],
    prompts: Sequence[tuple[int, ...]],
    completions: Sequence[Completion],
    advantages: Float[np.ndarray, " answer"],
    learned: Bool[np.ndarray, " answer"] | None = None,
) -> dict[str, np.ndarray]:
    """Return the rows of answers: prompt, answer, padding.

    Args:
        columns: Shape and type of one row of each column, as `GrpoConfig.columns` returned them. Columns of
            log-probabilities that the trainer computes are zeros here.
        prompts: The prompt's token ids of each answer.
        completions: The answers.
        advantages: The advantage of each answer.
        learned: Whether an answer is learned from, else it has no targets; None: all are.

    Returns:
        Arrays by column, with the answer as axis 0.

    Raises:
        ConfigError: An answer does not say what its tokens were drawn with.
    """
    rows: dict[str, Any] = {name: np.zeros((len(completions), *one.shape), one.dtype) for name, one in columns.items()}
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        if len(completion.sampled_logprobs) != len(completion.tokens):
            raise ConfigError(
                f"an answer of the engine has {len(completion.tokens)} tokens and {len(completion.sampled_logprobs)} "
                "sampled_logprobs; training needs the log-probability that each token was drawn with. Have the engine "
                "set Completion.sampled_logprobs."
            )
        begin, end = len(prompt), len(prompt) + len(completion.tokens)
        rows["tokens"][row, :begin] = prompt
        rows["tokens"][row, begin:end] = completion.tokens
        rows["loss_mask"][row, begin:end] = learned is None or learned[row]
        rows["rollout_logprobs"][row, begin:end] = completion.sampled_logprobs
    rows["advantage"][:] = advantages
    return rows
