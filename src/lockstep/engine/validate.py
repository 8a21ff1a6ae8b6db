"""Refuses requests whose numbers the model cannot use: by name, for a device would clamp them in silence."""

from collections.abc import Iterable, Iterator, Sequence

from lockstep.engine.sampling.filters import check_named_filters, find_filter
from lockstep.errors import ConfigError, PromptError
from lockstep.types import Request


def check_requests(requests: Sequence[Request], rows: int, vocab_size: int | None = None) -> None:
    """Refuses requests that a model cannot answer.

    Args:
        requests: Any number of requests.
        rows: The number of rows of the model's embedding.
        vocab_size: The number of token ids that may be sampled, from 0; None for all rows.

    Raises:
        ConfigError: A prompt_id is used twice or out of range, a token that the model does not have is asked for, or
            nothing is left to sample.
        PromptError: A prompt has a token that the model does not have.
    """
    for _ in checked(requests, rows, vocab_size):
        pass


def checked(requests: Iterable[Request], rows: int, vocab_size: int | None = None) -> Iterator[Request]:
    """Yield requests one by one, each when it has been checked as `check_requests` checks all.

    Args:
        requests: Any number of requests, which may be read as they are needed.
        rows: The number of rows of the model's embedding.
        vocab_size: The number of token ids that may be sampled, from 0; None for all rows.

    Raises:
        ConfigError, PromptError: See `check_requests`.
    """
    seen: set[int] = set()
    for request in requests:
        number = request.prompt_id
        if number in seen:
            raise ConfigError(
                f"prompt_id {number} is used by several requests; random draws depend on it. Number the prompts "
                "differently."
            )
        seen.add(number)
        if not 0 <= number < 2**32:
            raise ConfigError(
                f"prompt_id is {number}; it must be at least 0 and less than 2**32. Number the prompts differently."
            )
        for at, token in enumerate(request.prompt_tokens):
            if not 0 <= token < rows:
                raise PromptError(
                    f"token {at} of prompt {number} is {token}; the model's vocabulary has ids 0 to {rows - 1}. Use "
                    "the tokenizer that the model was trained with."
                )
        for token in request.params.stop_token_ids:
            if not 0 <= token < rows:
                raise ConfigError(
                    f"stop_token_ids of prompt {number} has {token}; the model's vocabulary has ids 0 to {rows - 1}, "
                    "so that it would never stop. Remove it, or use the tokenizer that the model was trained with."
                )
        _check_sampling(request, rows if vocab_size is None else min(vocab_size, rows))
        yield request


def _check_sampling(request: Request, vocab: int) -> None:
    number, params = request.prompt_id, request.params
    check_named_filters(params.filter_values())
    for name in params.filter_values():
        find_filter(name)
    tokens_of = {"logit_bias": [token for token, _ in params.logit_bias], "allowed_token_ids": params.allowed_token_ids}
    for name, tokens in tokens_of.items():
        for token in tokens or ():
            if not 0 <= token < vocab:
                raise ConfigError(
                    f"{name} of prompt {number} has {token}; the ids that can be sampled are 0 to {vocab - 1}. Remove "
                    "it, or use the tokenizer that the model was trained with."
                )
    if params.top_logprobs > vocab:
        raise ConfigError(
            f"top_logprobs of prompt {number} is {params.top_logprobs}; there are {vocab} tokens. Set it to at most "
            f"{vocab}."
        )
    if params.rules_out_stops and set(range(vocab)) <= set(params.stops):
        raise ConfigError(
            f"all {vocab} tokens are stop tokens of prompt {number} and min_tokens is {params.min_tokens}, so that "
            "none could be sampled. Remove a stop token, or set min_tokens to 0."
        )
