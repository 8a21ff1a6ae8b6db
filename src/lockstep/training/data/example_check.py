"""The examples of a run, looked at before its first step: what tokens and masks are wrong, and five of them to read."""

import collections
import random
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Int
from rich.text import Text

from lockstep.errors import ConfigError
from lockstep.health import unbalanced_marker
from lockstep.hosts import Hosts
from lockstep.printable import VISIBLE_CONTROLS, get_logger, printable, write_to_stdout
from lockstep.terminal import Console
from lockstep.text import decode, part_markers
from lockstep.text.tokenizer import added_text
from lockstep.training.data.config import DataConfig
from lockstep.training.data.examples import Example, TokenSequence
from lockstep.training.data.packing import ExampleKind

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = get_logger(__name__)

MAX_ROWS, MIN_ROWS, TOKENS = 1000, 32, 1 << 20
"""Rows that are looked at before the first step: as many as have about `TOKENS` tokens, between these two."""
DRAWN: Final = 5
_PROMPT_CHARS, _TARGET_CHARS, _PLACE_CHARS = 160, 240, 60  # characters that are shown of a part of an example
_TEXT, _TARGET, _END = range(3)
_STYLES: Final = ("dim", "green", "bold reverse green")  # of a token that is no target, of a target, of an end token


class ExampleCheck:
    """Counts what is wrong with examples, by the tokens that a model is trained on.

    Args:
        ends: The token ids that generation stops at.
        kind: The examples: each ends with an answer, is a document, of which it may be a part, or a question alone.
        length: The tokens of a row where longer examples are cut; None where they are not.
        seed: That of the draw of the examples that are shown.

    Example:
        >>> check = ExampleCheck(tokenizer, [tokenizer.eos_token_id], kind="answers")
        >>> check.add("line 1", (TokenSequence(1, [1, 5, 6]),))
        >>> check.counts
        Counter({'no end': 1})
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        ends: Collection[int],
        *,
        kind: ExampleKind,
        length: int | None = None,
        seed: int = 0,
    ) -> None:
        self.tokenizer, self.ends, self._answers, self._length = tokenizer, sorted(ends), kind == "answers", length
        self._kind = kind
        self._bos, self._eos = (-1 if id is None else id for id in (tokenizer.bos_token_id, tokenizer.eos_token_id))
        self._parts = frozenset(part_markers(tokenizer).values())
        self._draw, self._known = random.Random(seed), set[bytes]()
        self._first: dict[str, str] = {}
        self._last_targets = collections.Counter[int]()  # the last target of each answer without an end token
        self._labels = collections.Counter[float]()  # of unpaired answers
        self._masked = 0  # answers behind which an end token stands that is no target
        self.examples = 0
        self.trained_ends = 0
        """Answers with an end token among their targets."""
        self.counts = collections.Counter[str]()
        """Examples with each of the things that may be wrong."""
        self.drawn: list[Example] = []

    def add(self, place: str, example: Example) -> None:
        """Look at one more example.

        Args:
            place: The place that a message names.
        """
        self.examples += 1
        if len(self.drawn) < DRAWN:
            self.drawn.append(example)
        elif (slot := self._draw.randrange(self.examples)) < DRAWN:
            self.drawn[slot] = example
        parts = [_ids_and_targets(sequence) for sequence in example]
        wrong = {kind for ids, targets in parts for kind in self._wrong(ids, targets)}
        wrong |= {"no difference"} if len(parts) == 2 and all(map(np.array_equal, *parts)) else set()
        if self._kind == "answers" and len(parts) == 1 and (label := example[0].value) is not None:
            self._labels[label] += 1
        digest = b"".join(part.tobytes() for arrays in parts for part in (np.array([len(arrays[0])]), *arrays))
        key = hash(digest).to_bytes(8, signed=True)  # 64 bits: among a million, one in 10 million draws errs
        wrong |= {"duplicate"} if key in self._known else set()
        self._known.add(key)
        for kind in wrong:
            self.counts[kind] += 1
            if kind not in self._first:
                text = _one_line(decode(self.tokenizer, parts[-1][0].tolist()))
                self._first[kind] = f"{place}, …{text[-_PLACE_CHARS:]}"

    def summary(self, of: str) -> str:
        """Return one line: how much was looked at.

        Args:
            of: The whole that the examples are from, such as ``12,770 rows``.
        """
        ends = {"answers": self.ends, "documents": [self.tokenizer.eos_token_id], "questions": None}[self._kind]
        end = "" if ends is None else f"; the end of {self._kind}: {self._names(ends)}"
        return f"training data: looked at {self.examples:,} examples of {of}{end}"

    def problems(self) -> list[str]:
        """Return a line for each thing that is wrong, with the number of examples and the first of them."""
        ends = self._names(self.ends)
        texts = {
            "no end": f"have an answer without an end token ({ends}) to train, so the model learns to go on there",
            "two BOS": f"have {self._names([self._bos])} twice in a row: data and tokenizer or chat template write it",
            "thought": "have a marker of reasoning, such as <think>, that is not closed or not opened, or another "
            "family's: see what the chat template writes before and into an answer",
            "no target": "have an empty loss mask: nothing is learned from them",
            "no text": "have an empty answer or text: only its end is trained",
            "no difference": "are pairs of two equal answers, which show no preference",
            "duplicate": "are the same as one before",
            "cut": f"are cut, as they are longer than {self._length} tokens (data.max_seq_len)",
        }
        lines = []
        for kind, text in texts.items():
            if count := self.counts[kind]:
                share = f"{count:,} of {self.examples:,} examples ({count / self.examples:.1%})"
                lines.append(f"training data: {share} {text}. The first: {self._first[kind]}")
        if len(self._labels) == 1 and self.examples > 1:
            (label,) = self._labels
            lines.append(
                f"training data: all {self.examples:,} examples have the label {str(label == 1).lower()}: without the "
                "other one, a model learns only to make all answers more likely, or all less"
            )
        return lines

    def no_end(self) -> str | None:
        """Return what is wrong where no example trains a model to end its answer; None where one does."""
        if not self._answers or not self.examples or self.trained_ends:
            return None
        ends = self._names(self.ends)
        text = f"none of the {self.examples:,} examples looked at has a target at which generation stops ({ends})"
        if not self.ends:
            text = "no token ends an answer: the tokenizer names none, and no generation_config.json beside it"
        if self.counts["cut"] == self.examples:
            return f"{text}: all are cut at {self._length} tokens. Raise data.max_seq_len."
        if self._masked:
            text += f"; {self._masked:,} answers have one behind them that the loss mask leaves out"
        for token, count in self._last_targets.most_common(1):
            text += f"; {count:,} answers end with {self._names([token])}"
        return (
            f"{text}. The model would learn to go on for ever. Use a chat template or data.format that ends each "
            "answer with such a token as a target, or name the token that answers end with as eos_token_id in "
            "generation_config.json beside the tokenizer; or set data.require_end_token: false."
        )

    def _wrong(self, ids: Int[np.ndarray, " token"], targets: Bool[np.ndarray, " token"]) -> Iterator[str]:
        bos = ids == self._bos
        twice = bos[:-1] & bos[1:]
        # Where BOS is an end token too, that of one message stands before that of the next.
        if twice[: 1 if self._bos in self.ends else None].any():
            yield "two BOS"
        if not self._answers:
            # The rest of a document that was cut may be its end alone, which is no target.
            if self._kind == "documents" and targets.any() and np.isin(ids, (self._bos, self._eos)).all():
                yield "no text"
            return
        if not targets.any():
            yield "no target"
            return
        is_end = np.isin(ids, self.ends)
        answers = np.flatnonzero(np.diff(targets, prepend=False, append=False)).reshape(-1, 2)
        ended = [bool(is_end[begin:end].any()) for begin, end in answers]
        if is_end[answers[:, 0]].any():
            yield "no text"
        self.trained_ends += sum(ended)
        if self._length is not None and len(ids) >= self._length and not ended[-1]:
            yield "cut"
            return
        if not all(ended):
            yield "no end"
            for (_, end), has_end in zip(answers, ended, strict=True):
                if not has_end:
                    self._last_targets[int(ids[end - 1])] += 1
                    self._masked += bool(is_end[end : end + 1].any())
        if self._has_open_thought(ids, answers, ended):
            yield "thought"

    def _has_open_thought(
        self, ids: Int[np.ndarray, " token"], answers: Int[np.ndarray, "answer 2"], ended: Sequence[bool]
    ) -> bool:
        """Whether an answer closes no thought that it, or the template before it, opens; or the reverse."""
        prompt, done = "", 0
        for (begin, end), has_end in zip(answers.tolist(), ended, strict=True):
            before = decode(self.tokenizer, ids[done:begin].tolist())
            answer = decode(self.tokenizer, ids[begin:end].tolist(), ids[:begin].tolist())
            prompt, done = prompt + before, end
            if unbalanced_marker(answer, prompt=prompt, prompt_end=before, ended=has_end, parts=self._parts):
                return True
            prompt += answer
        return False

    def _names(self, tokens: Iterable[int | None]) -> str:
        known = [token for token in tokens if token is not None]
        return ", ".join(f"{self.tokenizer.convert_ids_to_tokens(token)} ({token})" for token in known) or "none"


def print_examples(check: ExampleCheck, console: Console) -> None:
    """Print the drawn examples: targets in colour, or between ⟦ and ⟧ where the console has none."""
    colour = console.color_system is not None and not console.no_color
    how = "what is trained is green" if colour else "what is trained is between ⟦ and ⟧"
    console.print(Text(f"training data: {len(check.drawn)} examples; {how}", style="bold"), soft_wrap=True)
    for example in check.drawn:
        label = {1: "desirable ", 0: "undesirable "}.get(example[0].value, "")  # type: ignore[call-overload]
        names = [label] if len(example) == 1 else ["chosen ", "rejected "]
        for name, sequence in zip(names, example, strict=True):
            shown = shown_sequence(check, sequence, colour=colour)
            console.print(Text(f"  {name}").append_text(shown), soft_wrap=True)


def shown_sequence(check: ExampleCheck, sequence: TokenSequence, *, colour: bool) -> Text:
    """A sequence for reading, on one line and shortened, with its special tokens and its mask."""
    tokenizer, text = check.tokenizer, Text()

    def spell(tokens: Sequence[int]) -> str:
        return str(tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    ids, targets = _ids_and_targets(sequence)
    kinds = np.where(targets, np.where(np.isin(ids, check.ends), _END, _TARGET), _TEXT)
    bounds = [0, *(np.flatnonzero(np.diff(kinds)) + 1).tolist(), len(ids)]
    for begin, end in zip(bounds, bounds[1:], strict=False):
        kind = int(kinds[begin])
        piece = _one_line(added_text(spell, ids[begin:end].tolist(), ids[:begin].tolist()))
        piece = _shortened(piece, keep_end=kind == _TEXT)
        if not colour and kind != _TEXT:
            opened, closed = begin and kinds[begin - 1] != _TEXT, end < len(ids) and kinds[end] != _TEXT
            piece = f"{'' if opened else '⟦'}{piece}{'' if closed else '⟧'}"
        text.append(piece, style=_STYLES[kind] if colour else "")
    return text


@runtime_checkable
class ExampleSource(Protocol):
    """The data of a run, of which some examples can be looked at."""

    def __len__(self) -> int:
        """Return the number of rows, or of questions."""
        ...

    def examples(self, count: int) -> Iterator[tuple[str, Example]]:
        """Yield the examples of the first rows that the run trains on, each with its place."""
        ...


def check_examples(
    config: DataConfig,
    data: ExampleSource,
    tokenizer: "PreTrainedTokenizerBase",
    ends: Sequence[int],
    *,
    length: int,
    seed: int,
    hosts: Hosts,
) -> None:
    """Look at examples of a run before its first step, say what is wrong, and show some. Every host makes this call.

    The leader alone reads them: the hosts have agreed on the rows.

    Args:
        ends: The token ids that generation stops at.
        length: The tokens of a row.

    Raises:
        PeerError: No example trains an end token, and ``data.require_end_token`` is set.
    """
    with hosts.run_on_all("data check", "looking at the training data"):
        if not hosts.is_leader:
            return
        cut = length if config.truncate else None
        check = ExampleCheck(tokenizer, ends, kind=config.example_kind, length=cut, seed=seed)
        for place, example in data.examples(max(MIN_ROWS, min(MAX_ROWS, TOKENS // length))):
            check.add(place, example)
        log.info("%s", check.summary(f"{len(data):,} rows"))
        for line in check.problems():
            log.warning("%s", line)
        if (wrong := check.no_end()) is not None:
            if config.require_end_token:
                raise ConfigError(wrong)
            log.warning("%s", wrong)
        write_to_stdout(lambda: print_examples(check, Console()))


def _ids_and_targets(sequence: TokenSequence) -> tuple[Int[np.ndarray, " token"], Bool[np.ndarray, " token"]]:
    """The token ids of a sequence, and which of them are targets."""
    tokens = np.asarray(sequence.tokens, np.int32)
    targets = (tokens >= 0) & (np.arange(len(tokens)) >= max(sequence.n_prompt, 1))
    return np.where(tokens < 0, ~tokens, tokens), targets


def _one_line(text: str) -> str:
    return printable(text).replace("\n", VISIBLE_CONTROLS["\n"])


def _shortened(text: str, *, keep_end: bool) -> str:
    """The end of a text, or its two ends, with the number of characters between."""
    head, tail = (0, _PROMPT_CHARS) if keep_end else (_TARGET_CHARS * 2 // 3, _TARGET_CHARS // 3)
    left_out = len(text) - head - tail
    return text if left_out <= 0 else f"{text[:head]}… ({left_out:,} characters) …{text[-tail:]}"
