"""What goes into the engine and what comes out of it. Plain Python: nothing here may import jax."""

import dataclasses
import enum

from lockstep.errors import ConfigError, PromptError


class FinishReason(enum.StrEnum):
    """Why a completion ended."""

    STOP = "stop"
    """A stop token was sampled."""
    LENGTH = "length"
    """``max_new_tokens`` were sampled."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the completions of one request are drawn.

    Args:
        max_new_tokens: tokens to sample at most, at least 1.
        temperature: 0 is greedy; otherwise logits are divided by it before the draw.
        stop_token_ids: a completion ends with the first of these that is sampled (it is kept as the last token).
        seed: with the prompt, generation and position, all that a draw depends on.
        n_generations: completions of the prompt, at least 1.

    Raises:
        ConfigError: a value out of its range.
    """

    max_new_tokens: int
    temperature: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0
    n_generations: int = 1

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ConfigError(
                f"max_new_tokens is {self.max_new_tokens}; it must be at least 1. Set max_new_tokens to the number of "
                "tokens you want to see."
            )
        if not 0.0 <= self.temperature < float("inf"):
            raise ConfigError(
                f"temperature is {self.temperature}; it must be finite and at least 0. Use 0 for greedy decoding."
            )
        if self.n_generations < 1:
            raise ConfigError(
                f"n_generations is {self.n_generations}; it must be at least 1. Set n_generations to the number of "
                "completions you want per prompt."
            )
        if not 0 <= self.seed < 2**32:
            raise ConfigError(f"seed is {self.seed}; it must be at least 0 and less than 2**32. Choose another seed.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt to complete.

    Args:
        prompt_id: the prompt's number, unique in a call; draws depend on it.
        prompt_tokens: token ids, at least one.
        params: how to sample.

    Raises:
        PromptError: the prompt has no tokens.
    """

    prompt_id: int
    prompt_tokens: tuple[int, ...]
    params: SamplingParams

    def __post_init__(self) -> None:
        if not self.prompt_tokens:
            raise PromptError(
                f"prompt {self.prompt_id} has 0 tokens; the model needs at least 1 to start from. Remove the prompt or "
                "give it text (a tokenizer with a beginning-of-sequence token makes even an empty text one token)."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
    """One answer to one prompt.

    Args:
        prompt_id: of the request.
        generation_id: 0 to ``n_generations - 1``.
        tokens: sampled token ids, a stop token included.
        logprobs: natural-log probability of each token under the model (temperature 1), same length as ``tokens``.
        finish_reason: why it ended.
    """

    prompt_id: int
    generation_id: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
