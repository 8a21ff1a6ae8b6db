"""What the model makes of a request's numbers: refused here by name, for a device would clamp them in silence."""

from collections.abc import Sequence

from lockstep.errors import ConfigError, PromptError
from lockstep.types import Request


def check_requests(requests: Sequence[Request], rows: int) -> None:
    """Refuses requests that a model cannot be asked.

    Args:
        requests: any number.
        rows: of the model's embedding.

    Raises:
        ConfigError: a prompt_id is used twice or out of range, or a stop token that the model does not have.
        PromptError: a prompt has a token that the model does not have.
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
