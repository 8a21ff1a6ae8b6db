"""Stop strings against a brute-force search, for tokenizers of several kinds."""

import functools
import random
from collections.abc import Sequence
from typing import Any

import pytest
import tokenizers
import transformers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lockstep.errors import ConfigError
from lockstep.text import StopFinder, cut_at_stop, decode
from tests import tiny


def byte_fallback() -> Any:
    """As SentencePiece's: a space is part of the next word, the first one is not shown, bytes decode in runs."""
    vocab = {"<unk>": 0, "</s>": 1} | {f"<0x{byte:02X}>": 2 + byte for byte in range(256)}
    for piece in ("▁", "a", "b", "▁a", "ab", "▁stop", "op", "st", "€", "\n", "▁b"):
        vocab[piece] = len(vocab)
    model = tokenizers.models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True)
    inner = tokenizers.Tokenizer(model)
    parts = [tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
    inner.decoder = tokenizers.decoders.Sequence([*parts, tokenizers.decoders.Strip(" ", 1, 0)])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", unk_token="<unk>")


def byte_level() -> Any:
    """As GPT-2's and Llama 3's: every token is some bytes, whatever character they belong to."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<|end|>": 0} | {letter: 1 + at for at, letter in enumerate(alphabet)}
    for piece in ("Ġa", "ab", "Ġstop", "st", "op", "âĤ", "Ċ" * 2):
        vocab[piece] = len(vocab)
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    inner.decoder = tokenizers.decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|end|>")


KINDS = {"byte fallback": byte_fallback, "byte level": byte_level, "demo": tiny.tokenizer}


@functools.cache
def kind(name: str) -> tuple[Any, StopFinder]:
    tokenizer = KINDS[name]()
    return tokenizer, StopFinder(tokenizer)


def brute_force(tokenizer: Any, tokens: Sequence[int], stops: Sequence[str], after: Sequence[int] = ()) -> int | None:
    for end in range(1, len(tokens) + 1):
        text = decode(tokenizer, tokens[:end], after).rstrip("\ufffd")
        if any(stop in text for stop in stops):
            return end
    return None


def in_launches(
    finder: StopFinder, tokens: Sequence[int], stops: Sequence[str], length: int, after: Sequence[int] = ()
) -> int | None:
    """As the scheduler asks: after every launch of so many tokens."""
    for start in range(0, len(tokens), length):
        end = finder(tokens[: start + length], start, stops, after)
        if end is not None:
            assert start < end <= start + length
            return end
    return None


# The others decode what they leave of a character in other ways; tests below have byte fallback too.
@pytest.mark.parametrize("name", [pytest.param("byte fallback", marks=pytest.mark.slow), "byte level", "demo"])
@settings(max_examples=50)
@given(seed=st.integers(0, 10**6), few=st.booleans(), lengths=st.tuples(st.integers(1, 5), st.integers(6, 40)))
@example(seed=0, few=True, lengths=(1, 40))
def test_as_brute_force_finds_them(name: str, seed: int, few: bool, lengths: tuple[int, int]) -> None:
    tokenizer, finder = kind(name)
    rng = random.Random(seed)
    size = max(tokenizer.get_vocab().values()) + 1
    # Few different tokens, so that stop strings come; special tokens and parts of characters among them.
    choice = rng.sample(range(size), 6) + [0, size - 1] if few else range(size)
    euro = [tokenizer.get_vocab().get(f"<0x{byte:02X}>", 1) for byte in (0xE2, 0x82, 0xAC)]
    tokens: list[int] = []
    while len(tokens) < 60:
        tokens += euro if rng.random() < 0.1 else [rng.choice(choice)]
    text = decode(tokenizer, tokens)
    stops = []
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(max(1, len(text)))
        piece = text[at : at + rng.randint(1, 6)].replace("\ufffd", "")
        stops.append(piece or "ab")
    # What stands before is a prompt: whole characters.
    letters = [token for token in choice if token < size and decode(tokenizer, [token]).strip("\ufffd ")]
    prompt = [rng.choice(letters) for _ in range(rng.randint(0, 30))] if letters else []
    expected = brute_force(tokenizer, tokens, stops, prompt)
    for length in (*lengths, len(tokens)):
        assert in_launches(finder, tokens, stops, length, prompt) == expected, (tokens, stops, length, prompt)
    if expected is not None:
        shown = cut_at_stop(decode(tokenizer, tokens[:expected], prompt), stops)
        assert not any(stop in shown for stop in stops)
        assert decode(tokenizer, tokens[:expected], prompt).startswith(shown)


@pytest.mark.parametrize("name", ["byte fallback", "byte level"])
def test_a_character_of_several_tokens(name: str) -> None:
    tokenizer, finder = kind(name)
    vocab = tokenizer.get_vocab()
    names = ("<0xE2>", "<0x82>", "<0xAC>") if name == "byte fallback" else ("â", "Ĥ", "¬")
    euro = [vocab[each] for each in names]
    tokens = [vocab["a"]] * 30 + euro + [vocab["a"]]
    assert in_launches(finder, tokens, ["a€"], 1) == in_launches(finder, tokens, ["a€"], 34) == 33
    assert in_launches(finder, tokens, ["€a"], 2) == 34


def test_a_space_that_decoding_leaves_out_at_the_beginning_counts_in_the_middle() -> None:
    tokenizer, finder = kind("byte fallback")
    vocab = tokenizer.get_vocab()
    tokens = [vocab["▁stop"], vocab["a"], *[vocab["▁a"]] * 20, vocab["▁stop"]]
    assert decode(tokenizer, tokens).startswith("stopa a")
    assert in_launches(finder, tokens, [" stop"], 1) == len(tokens)
    assert in_launches(finder, tokens, [" stop"], len(tokens)) == len(tokens)


def test_a_stop_that_begins_with_a_space_ends_an_answer_at_its_first_token_and_none_begins_in_the_prompt() -> None:
    tokenizer, finder = kind("byte fallback")
    vocab = tokenizer.get_vocab()
    prompt, tokens = [vocab["▁a"]] * 3, [vocab["▁stop"], vocab["a"]]
    assert finder(tokens, 0, [" stop"], prompt) == 1 and finder(tokens, 0, [" stop"]) is None
    assert finder(tokens, 0, ["a stop"], prompt) is None


def test_only_the_tail_is_decoded() -> None:
    tokenizer = tiny.tokenizer()
    decoded: list[int] = []

    class Counting:
        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

        def decode(self, tokens: list[int], **options: Any) -> str:
            decoded.append(len(tokens))
            return tokenizer.decode(tokens, **options)

    finder = StopFinder(Counting())  # type: ignore[arg-type] (decodes, no more)
    letter = tokenizer.encode("a", add_special_tokens=False)[-1]
    assert finder([letter] * 4000, 3990, ["\n\n"]) is None
    assert sum(decoded) < 100, decoded


def test_a_special_token_is_no_stop_string() -> None:
    tokenizer, finder = kind("byte level")
    finder.check(["\n", "end"])
    with pytest.raises(
        ConfigError, match=r"stop has '<\|end\|>', which is a special token .* id, 0, in stop_token_ids"
    ):
        finder.check(["\n", tokenizer.eos_token])
    tokenizer.add_tokens([transformers.AddedToken("<|start|>", special=True)])  # one that the tokenizer has no name for
    with pytest.raises(ConfigError, match=r"has '<\|start\|>\\n', which has '<\|start\|>', which is a special token"):
        StopFinder(tokenizer).check(["<|start|>\n"])


@pytest.mark.parametrize(
    ("text", "stops", "shown"),
    [("a b c", ("b",), "a "), ("abc", ("c", "bc"), "a"), ("abc", ("x",), "abc"), ("abc", (), "abc"), ("", ("x",), "")],
)
def test_the_text_shown_ends_before_the_first(text: str, stops: tuple[str, ...], shown: str) -> None:
    assert cut_at_stop(text, stops) == shown
