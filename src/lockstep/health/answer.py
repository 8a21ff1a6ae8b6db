"""The health of answers: the states that say how one went wrong, from its tokens and its text; shares of a round."""

import dataclasses
import enum
import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, Self

import numpy as np

from lockstep.health.loops import runs
from lockstep.health.markers import is_part_marker, turn_markers, unbalanced_marker
from lockstep.health.scripts import is_in_other_script
from lockstep.text import CHANNEL, Prompt, part_markers, special_tokens, split_answer, stop_ids
from lockstep.types import Completion, FinishReason

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LOOP_TOKENS: Final = 24
"""Tokens that a loop has at least."""
LOOP_SHARE: Final = 0.5
"""The share of an answer that a loop has at least, unless it goes on to the end or is long."""
LOOP_LONG: Final = 512
"""Tokens from which on a loop counts in an answer of any length."""
NGRAM: Final = 4
"""Tokens of the n-grams that are counted."""
REPETITIVE_TOKENS: Final = 64
"""Tokens that a repetitive answer has at least."""
REPETITIVE_DISTINCT: Final = 0.5
"""The share of distinct n-grams that it has at most."""
REPETITIVE_COMPRESSION: Final = 0.2
"""The share of its bytes that it is compressed to at most."""
COPIED_TOKENS: Final = 24
"""Tokens that a copy of the prompt has at least, unless it is the question and nothing else."""
SAME_TOKENS: Final = 8
"""Tokens that an answer to several prompts has at least: many a question has the answer "Yes"."""


_PIECES, _PIECE, _LEAST_PIECES = 16, 8, 14
_BLANK_PROMPT: Final = 8  # characters below which a question that comes back is no copy: "Yes"
_CALL: Final = " to="  # in the header of a message of gpt-oss: whom it is to
_REPLACEMENT: Final = "\ufffd"


class State(enum.StrEnum):
    """A way in which an answer can be wrong that needs no knowledge of its question; docs/health.md has the rules."""

    LOOP = "loop"
    """A period that comes three or more times in a row has half of the answer, or its end."""
    REPETITIVE = "repetitive"
    """No loop, yet few n-grams are distinct and it is compressed to little."""
    EMPTY = "empty"
    """Nothing but space, or nothing after the reasoning."""
    CUT = "cut"
    """It was cut at ``max_new_tokens``."""
    SPECIAL_TOKEN = "special_token"
    """A special token, or a marker of turns of any family, is in it."""
    UNBALANCED_THINK = "unbalanced_think"
    """A marker of reasoning or a channel is not closed, not opened, or another family's."""
    INVALID_UTF8 = "invalid_utf8"
    """Bytes that are no characters."""
    OTHER_SCRIPT = "other_script"
    """It is written in a script that the prompt does not have."""
    PROMPT_COPY = "prompt_copy"
    """It is a copy of its prompt, or of a part of it."""
    SAME_ANSWER = "same_answer"
    """Another prompt of the round has the same answer."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """The tokens of a tokenizer that health asks about.

    Args:
        special: The ids of special tokens that no part of an answer is; its ends and the markers of its parts are none.
        ends: The ids that end an answer.
        parts: The markers of reasoning and channels that are tokens.
    """

    special: frozenset[int] = frozenset()
    ends: frozenset[int] = frozenset()
    parts: frozenset[str] = frozenset()

    @classmethod
    def from_tokenizer(cls, tokenizer: "PreTrainedTokenizerBase") -> Self:
        """The vocabulary of a Hugging Face tokenizer."""
        ends = frozenset(stop_ids(tokenizer))
        special = {token for text, token in special_tokens(tokenizer).items() if not is_part_marker(text)}
        return cls(special=frozenset(special) - ends, ends=ends, parts=frozenset(part_markers(tokenizer).values()))


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnsweredPrompt:
    """A prompt and one answer to it, as a round has them.

    Args:
        text: The text of the answer, up to a stop string.
        prompt_tokens: The prompt as the engine had it; empty where that is not known.
        prompt_end: The end of the prompt's text, markers included, which may open the reasoning.
    """

    prompt: Prompt
    completion: Completion
    text: str
    prompt_tokens: Sequence[int] = ()
    prompt_end: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Health:
    """The health of an answer.

    Args:
        states: What is wrong with it, in the order of `State`; empty where nothing is.
        loop_from: The index of the token with which its loop begins; None where there is none.
        loop_share: The share of its tokens that its longest run of three or more copies has, loop or not.
        distinct: The number of distinct 4-grams of its tokens over that of all (distinct-n, Li et al. 2016,
            https://arxiv.org/abs/1510.03055; 1 minus it is seq-rep-4, Welleck et al. 2020,
            https://arxiv.org/abs/1908.04319); 1 where it has none.
        compression: The number of bytes that zlib makes of its text over that of its UTF-8, at most 1 (its inverse is
            what Whisper looks at, Radford et al. 2022, https://arxiv.org/abs/2212.04356, section 4.5).
    """

    states: tuple[State, ...] = ()
    loop_from: int | None = None
    loop_share: float = 0.0
    distinct: float = 1.0
    compression: float = 1.0

    def __str__(self) -> str:
        """The states, with a space between two; empty where nothing is wrong."""
        return " ".join(self.states)


def measure_health(answer: AnsweredPrompt, vocabulary: Vocabulary) -> Health:
    """The health of an answer by itself: all states but ``same_answer``, which takes a round (`measure_round`)."""
    completion, text = answer.completion, answer.text
    tokens = completion.tokens
    ended = completion.finish_reason == FinishReason.STOP and bool(tokens) and tokens[-1] in vocabulary.ends
    tokens = tokens[: len(tokens) - ended]
    repeated = runs(tokens, LOOP_TOKENS)
    least = min(LOOP_LONG, LOOP_SHARE * len(tokens))
    loops = [run for run in repeated if run.end == len(tokens) or run.length >= least]
    loop = max(loops, key=lambda run: run.length, default=None)
    distinct, compression = distinct_ngrams(tokens), compressed_share(text)
    states = {
        State.LOOP: loop is not None,
        State.REPETITIVE: loop is None
        and len(tokens) >= REPETITIVE_TOKENS
        and distinct <= REPETITIVE_DISTINCT
        and compression <= REPETITIVE_COMPRESSION,
        State.EMPTY: _is_empty(answer, ended),
        State.CUT: completion.finish_reason == FinishReason.LENGTH,
        State.SPECIAL_TOKEN: not vocabulary.special.isdisjoint(tokens) or bool(turn_markers(text, vocabulary.parts)),
        State.UNBALANCED_THINK: unbalanced_marker(
            text, prompt=answer.prompt.shown, prompt_end=answer.prompt_end, ended=ended, parts=vocabulary.parts
        )
        is not None,
        State.INVALID_UTF8: _has_invalid_bytes(text if ended else text.rstrip(_REPLACEMENT), answer.prompt.shown),
        State.OTHER_SCRIPT: is_in_other_script(text, answer.prompt.shown),
        State.PROMPT_COPY: _is_copy(tokens, answer),
    }
    return Health(
        states=tuple(state for state in State if states.get(state)),
        loop_from=None if loop is None else loop.begin,
        loop_share=max((run.length for run in repeated), default=0) / max(1, len(tokens)),
        distinct=distinct,
        compression=compression,
    )


def distinct_ngrams(tokens: Sequence[int]) -> float:
    """The number of distinct n-grams over that of all, see `Health`."""
    total = len(tokens) - NGRAM + 1
    return len(set(zip(*(tokens[first:] for first in range(NGRAM)), strict=False))) / total if total > 0 else 1.0


def compressed_share(text: str) -> float:
    """The bytes of a text after compression over those before, see `Health`."""
    written = text.encode(errors="replace")
    return min(1.0, len(zlib.compress(written, 1)) / len(written)) if written else 1.0


def _is_empty(answer: AnsweredPrompt, ended: bool) -> bool:
    """Whether there is nothing but space, or nothing after the reasoning of an answer that the model ended itself."""
    if answer.completion.finish_reason in (FinishReason.BUDGET, FinishReason.CANCELLED):
        return False
    if not answer.text.strip():
        return True
    parts = split_answer(answer.text, answer.prompt_end)
    calls_tool = CHANNEL in answer.text and _CALL in answer.text
    return ended and parts.reasoning is not None and not parts.content.strip() and not calls_tool


def _has_invalid_bytes(text: str, prompt: str) -> bool:
    return _REPLACEMENT in text and _REPLACEMENT not in prompt


def _is_copy(tokens: Sequence[int], answer: AnsweredPrompt) -> bool:
    """Whether an answer is the question again, or nearly all of 16 pieces spread over it are in the prompt."""
    prompt = answer.prompt
    question = prompt.text if prompt.text is not None else str((prompt.messages or ({},))[-1].get("content") or "")
    words = question.split()
    if len(question.strip()) >= _BLANK_PROMPT and answer.text.split() == words:
        return True
    if len(tokens) < COPIED_TOKENS or len(answer.prompt_tokens) < _PIECE:
        return False
    written, read = np.asarray(tokens, np.int32).tobytes(), np.asarray(answer.prompt_tokens, np.int32).tobytes()
    places = [at * (len(tokens) - _PIECE) // (_PIECES - 1) for at in range(_PIECES)]
    return sum(written[4 * at : 4 * (at + _PIECE)] in read for at in places) >= _LEAST_PIECES


@dataclasses.dataclass(frozen=True, kw_only=True)
class Share:
    """A part of some answers.

    Example:
        >>> print(lockstep.health.Share(count=10, total=32))
        10 of 32 answers (31 %)
    """

    count: int
    total: int

    @property
    def value(self) -> float:
        """The part, from 0 to 1; 0 of no answers."""
        return self.count / self.total if self.total else 0.0

    @property
    def percent(self) -> str:
        """The part in percent, as text."""
        percent = 100 * self.value
        return f"{percent:.{int(percent < 10 and percent != int(percent))}f} %"

    def __str__(self) -> str:
        return f"{self.count:,} of {self.total:,} answers ({self.percent})"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundHealth:
    """The health of a round.

    Args:
        answers: The health of each answer, in the order in which they were given.
        shares: The answers in each state, by the name of the state; all states, in the order of `State`.
    """

    answers: tuple[Health, ...]
    shares: Mapping[str, Share]

    def scalars(self) -> dict[str, float]:
        """The share of each state as ``health/STATE``; none where there is no answer."""
        return {f"health/{state}": share.value for state, share in self.shares.items() if share.total}


def measure_round(answers: Sequence[AnsweredPrompt], vocabulary: Vocabulary) -> RoundHealth:
    """The health of the answers of a round, ``same_answer`` included."""
    measured = [measure_health(answer, vocabulary) for answer in answers]
    prompts: dict[str, set[str]] = {}
    for answer in answers:
        prompts.setdefault(answer.text.strip(), set()).add(answer.prompt.shown)
    for place, (answer, health) in enumerate(zip(answers, measured, strict=True)):
        text = answer.text.strip()
        if text and len(answer.completion.tokens) >= SAME_TOKENS and len(prompts[text]) > 1:
            measured[place] = dataclasses.replace(health, states=(*health.states, State.SAME_ANSWER))
    return RoundHealth(answers=tuple(measured), shares=shares(measured))


def shares(measured: Sequence[Health]) -> dict[str, Share]:
    """The answers in each state, see `RoundHealth`."""
    return {
        state.value: Share(count=sum(state in health.states for health in measured), total=len(measured))
        for state in State
    }
