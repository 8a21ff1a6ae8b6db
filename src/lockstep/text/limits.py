"""The texts that a model can take: how long they may be, and which tokens it knows."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from lockstep.errors import PromptError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TOKEN_CHARACTERS: Final = 256  # characters of a token at most, as far as a text that is much too long is concerned


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelLimits:
    """The limits of a model.

    Args:
        rows: The rows of its embedding; every token id is below.
        max_seq_len: The tokens of its longest sequence.
    """

    rows: int
    max_seq_len: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class LengthLimit:
    """The limit of prompt and answer together.

    Args:
        max_seq_len: The tokens that a user allows; None: as many as the model.
        of_model: The tokens that the model allows; None where it is not known.
        max_new_tokens: The tokens of an answer.
    """

    max_seq_len: int | None
    of_model: int | None = None
    max_new_tokens: int = 0

    @property
    def tokens(self) -> int | None:
        """The tokens of a sequence, at most; None for any number."""
        return min((tokens for tokens in (self.max_seq_len, self.of_model) if tokens is not None), default=None)

    @property
    def reason(self) -> str:
        """Who says so, in an error."""
        return f"{'max_seq_len is' if self.tokens == self.max_seq_len else 'the model allows'} {self.tokens}"

    def check_characters(self, prompt: str, characters: int) -> None:
        """Refuse a text that is too long however few tokens it has, before it is encoded.

        Raises:
            PromptError: It is; the message begins with ``prompt``.
        """
        if self.tokens is not None and characters > self.tokens * _TOKEN_CHARACTERS:
            raise PromptError(
                f"{prompt} has {characters} characters, far beyond the {self.tokens} tokens of a sequence "
                f"({self.reason}). Shorten it."
            )

    def check(self, prompt: str, tokens: int) -> None:
        """Refuse a prompt that leaves no room for its answer.

        Raises:
            PromptError: It does; the message begins with ``prompt``.
        """
        limit, new = self.tokens, self.max_new_tokens
        if limit is None or tokens + new <= limit:
            return
        ways = [f"shorten the prompt to {limit - new} tokens"] * (limit > new)
        ways += [f"lower max_new_tokens to {limit - tokens}"] * (limit > tokens)
        if self.of_model is None or tokens + new <= self.of_model:
            ways.append(f"raise max_seq_len to at least {tokens + new}")
        fix = ", or ".join(ways or ["shorten the prompt and lower max_new_tokens"])
        raise PromptError(
            f"{prompt} has {tokens} tokens and max_new_tokens is {new}: together {tokens + new}, but {self.reason}. "
            f"{fix[0].upper()}{fix[1:]}."
        )


def unknown_token(tokenizer: "PreTrainedTokenizerBase", tokens: Sequence[int], rows: int) -> str | None:
    """Return what to say of the first token that a model does not have; None where it has all.

    Args:
        rows: The number of rows of its embedding.
    """
    unknown = next((token for token in tokens if token >= rows), None)
    if unknown is None:
        return None
    return (
        f"has the token {tokenizer.convert_ids_to_tokens(int(unknown))!r} (id {unknown}), and the model's embedding "
        f"has the ids 0 to {rows - 1}. Remove it from the text, or use the tokenizer that the model was trained with."
    )
