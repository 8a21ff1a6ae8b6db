"""Stop strings: the token at which one is complete, and the text before it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lockstep.errors import ConfigError
from lockstep.text.answer import cut_at_stop
from lockstep.text.endings import ending_of
from lockstep.text.tokenizer import added_text, context_of, decoder, special_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_REPLACEMENT = "\ufffd"  # the character that stands for an incomplete one in decoded text
_CHARACTER_BYTES = 4
_PROMPT_END = 32  # tokens of a prompt in which the markers that open a part of its answer are


class AnswerDecoder:
    """Makes the texts of answers, as rows have them."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._decoded = decoder(tokenizer)

    def __call__(self, tokens: Sequence[int], prompt: Sequence[int], stops: Sequence[str]) -> tuple[str, str]:
        """The text of an answer up to the first stop string in it, and the end of its prompt's text, where a template
        may open the reasoning of the answer (`split_answer`).
        """
        text = cut_at_stop(added_text(self._decoded, tokens, prompt), stops)
        return text, self._decoded(prompt[-_PROMPT_END:])


class StopFinder:
    """Finds stop strings in the decoded text of tokens, also where they straddle tokens.

    It is a pure function on the host: with the same tokens it gives the same result on every host. The text of tokens
    is what `decode` returns (special tokens left out) without an incomplete character at its end. Only the tail is
    decoded: the most tokens that can contain the beginning of a stop string.

    Example:
        >>> find_stop = lockstep.StopFinder(tokenizer)
        >>> tokens = tokenizer.encode("one hundred and two", add_special_tokens=False)
        >>> find_stop(tokens, 0, ["and"]) < len(tokens)
        True
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer, self._decoded = tokenizer, decoder(tokenizer)
        vocab: dict[str, int] = tokenizer.get_vocab()
        self._special = special_tokens(tokenizer)
        self._special_ids = frozenset(self._special.values())
        # SentencePiece's byte fallback decodes a run of bytes as a whole: one wrong byte changes those before it.
        byte_names = (f"<0x{byte:02X}>" for byte in range(256)) if "<0x00>" in vocab else ()
        self._bytes = frozenset(vocab[name] for name in byte_names if name in vocab)

    def check(self, stops: Sequence[str]) -> None:
        """Check that every stop string can be found, and that those of the checkpoint are not passed over.

        Raises:
            ConfigError: A stop string has the name of a special token, which has no text; or there is none, and the
                ``generation_config.json`` of the checkpoint has some.
        """
        ending = ending_of(self._tokenizer)
        if ending.texts and not stops:
            raise ConfigError(
                f"{ending.texts_file} has stop_strings {list(ending.texts)}, and stop is empty: answers would go on "
                f"beyond them. Set stop to {list(ending.texts)}, or to other texts; or remove stop_strings."
            )
        for stop in stops:
            for name, token in self._special.items():
                if name in stop:
                    relation = "is" if name == stop else f"has {name!r}, which is"
                    raise ConfigError(
                        f"stop has {stop!r}, which {relation} a special token of the tokenizer and never part of the "
                        f"text. Put its id, {token}, in stop_token_ids."
                    )

    def __call__(
        self, tokens: Sequence[int], start: int, stops: Sequence[str], after: Sequence[int] = ()
    ) -> int | None:
        """The smallest number of leading tokens whose text contains a stop string.

        Args:
            tokens: The token ids of a completion so far.
            start: The number of leading tokens whose text is known to contain none.
            stops: The stop strings, none of them empty.
            after: The token ids of the prompt. No stop string begins in it; what it ends with decides whether the
                completion's text begins with a space (`decode`).

        Returns:
            A number greater than ``start``; None where no stop string is found.
        """
        if start == len(tokens):
            return None
        context, _ = context_of(self._decoded, tokens, after)
        begin, every = len(context), [*context, *tokens]
        start += begin
        first = self._window(every, start, max(map(len, stops)))
        known, before = (len(self._text(every[first:end])) for end in (start, max(first, begin)))

        def contains_stop(end: int) -> bool:
            text = self._text(every[first:end])
            return any(text.find(stop, max(before, known - len(stop) + 1)) >= 0 for stop in stops)

        # Text only ever grows, so that all of it can be searched at once; not so with byte fallback, see __init__.
        if self._bytes.isdisjoint(every[first:]) and not contains_stop(len(every)):
            return None
        return next((end - begin for end in range(start + 1, len(every) + 1) if contains_stop(end)), None)

    def _window(self, tokens: Sequence[int], start: int, longest: int) -> int:
        """The first token of a tail whose text up to ``start`` is longer than ``longest``, wherever decoding begins."""
        back = longest + _CHARACTER_BYTES
        while (first := start - back) > 0:
            back *= 2
            while first > 0 and (tokens[first] in self._special_ids or tokens[first] in self._bytes):
                first -= 1
            # The first token's text may lose a leading space, or be the end of a character: it does not count.
            begun = len(self._decoded(tokens[first : first + 1])) + _CHARACTER_BYTES
            if len(self._text(tokens[first:start])) >= begun + longest:
                return first
        return 0

    def _text(self, tokens: Sequence[int]) -> str:
        return self._decoded(tokens).rstrip(_REPLACEMENT)
