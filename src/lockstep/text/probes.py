"""Texts on which a loaded tokenizer is compared with its ``tokenizer.json`` or ``tokenizer.model``."""

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from lockstep.errors import ConfigError
from lockstep.printable import get_logger
from lockstep.text.tokenize import token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

log = get_logger(__name__)

_WORDS: Final = (
    "The capital of France is", "don't", "I'LL", "naïve café", "Straße", "ἀρχή", "Ещё раз", "שלום עולם",
    "مرحبا بالعالم", "नमस्ते दुनिया", "สวัสดีชาวโลก", "안녕하세요", "こんにちは世界", "我喜欢吃苹果。",
    "გამარჯობა", "ሰላም", "e\u0301 é", "ﬁ ½ ² Ⅷ", "😀", "👩‍👩‍👧‍👦", "🇫🇷", "x", "\u200b", "\ufeff", "\u00a0",
)  # fmt: skip
_NUMBERS: Final = ("0", "7", "42", "2023", "1,234,567.89", "1000000", "3.14e-10", "-1", "٣٤", "12 + 7 = 19")
_CODE: Final = (
    "def add(a, b):\n    return a + b", "\tif (x==1) {\n\t\ty++;\n\t}", "#include <stdio.h>", "</s>", "<b>&amp;</b>",
    "a_b.c->d::e", "https://x.org/?q=1&r=%20", "```python\n```", '{"k": [1, 2]}', "$\\frac{1}{2}$", "camelCaseWord",
    "......", "----", "**x**", "!?!?",
)  # fmt: skip
_AROUND: Final = (("", ""), (" ", ""), ("  ", " "), ("\n", "\n\n"), ("\t", "   "))
_SPACES: Final = ("", " ", "  ", "    ", "\n", "\n\n", "\r\n", "\t", " \n ", "\n    \n")
_SPECIAL: Final = 8  # special tokens that probes have in them


def probes(special: Sequence[str]) -> list[str]:
    """A few hundred texts: words of every script, numbers, code and emoji, each with different space around it and
    after special tokens.
    """
    texts = [*_WORDS, *_NUMBERS, *_CODE]
    spaced = [before + text + after for text, (before, after) in itertools.product(texts, _AROUND)]
    pairs = [" ".join(pair) for pair in itertools.pairwise(texts)]
    after = [
        before + token + between + text
        for token in special[:_SPECIAL]
        for before, between, text in (("", "", "Hi"), ("", " ", "Hi"), ("a", "", "\n1"), ("a ", "\n", "    x"))
    ]
    return [*spaced, *pairs, *_SPACES, *after]


def check_against_file(tokenizer: "PreTrainedTokenizerFast", file: str) -> None:
    """Compare the ids and texts of `probes` with those that a ``tokenizer.json`` gives them.

    An end of text that the file lacks is warned of.

    Raises:
        ConfigError: A text has other ids, or ids have another text.
    """
    from tokenizers import Tokenizer

    own: Tokenizer = Tokenizer.from_file(file)
    if (end := tokenizer.eos_token) is not None and own.token_to_id(end) is None:
        log.warning(
            "%s lacks the eos_token %r of tokenizer_config.json: transformers adds it as %d, which no model has "
            "learned, and no answer ends with it. Name the token that ends an answer.",
            file,
            end,
            tokenizer.eos_token_id,
        )
    own.no_truncation()
    own.no_padding()
    added = own.get_added_tokens_decoder()
    texts = probes([token.content for token in added.values() if token.special])
    ids = [encoding.ids for encoding in own.encode_batch(texts)]
    _compare(file, texts, token_ids(tokenizer, texts)["input_ids"], ids, "ids")
    _compare(file, ids, tokenizer.backend_tokenizer.decode_batch(ids), own.decode_batch(ids), "text")


def check_against_model(tokenizer: "PreTrainedTokenizerBase", file: str) -> None:
    """Compare the ids of `probes` with those of the vocabulary of sentencepiece that a tokenizer was made of, where a
    checkpoint has no ``tokenizer.json``: transformers has the rules of spaces from the name of a class.

    Special tokens are left out, which are texts for sentencepiece; a file of another kind is not compared.

    Raises:
        ConfigError: A text has other ids.
    """
    try:
        from sentencepiece import SentencePieceProcessor

        own: Any = SentencePieceProcessor(model_file=file)
    except (ImportError, RuntimeError):  # transformers needs the package too; tiktoken's vocabularies have this name
        return
    special = [str(token) for token in tokenizer.added_tokens_decoder.values()]
    texts = [text for text in probes([]) if not any(token in text for token in special)]
    loaded = token_ids(tokenizer, texts, add_special_tokens=False)["input_ids"]
    fix = "Take the tokenizer.json of this model, or use another version of transformers."
    _compare(file, texts, loaded, own.encode(texts), "ids", fix)


_FIX: Final = "Use another version of transformers, or correct tokenizer_config.json."


def _compare(
    file: str, probes: Sequence[Any], loaded: Sequence[Any], expected: Sequence[Any], kind: str, fix: str = _FIX
) -> None:
    differences = [parts for parts in zip(probes, loaded, expected, strict=True) if parts[1] != parts[2]]
    if differences:
        probe, result, own = differences[0]
        raise ConfigError(
            f"{file}: transformers reads it otherwise than it says: {len(differences)} of {len(probes)} probes have "
            f"other {kind}, first {probe!r:.80}: {result!r:.80} in the place of {own!r:.80}. {fix}"
        )
