"""The prompts of a job on every host's disk, and each host's share of the rows: equal on every host."""

import dataclasses
import hashlib
import json
import tempfile
from array import array
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Bool, Int

from lockstep.hosts import Hosts
from lockstep.json_text import from_peer
from lockstep.text import ModelLimits, Prompt, PromptFields, encode, warn_of_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BATCH_TOKENS = 2_000_000
"""New tokens of a batch, at most, unless the sequences that fill all slots once have more. A token takes about 100
bytes of host memory."""
_SLOT_FILLS = 4  # times that a batch fills all slots, at most: a longer one would have its rows on disk later


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobShape:
    """The rows of a job. Row number = (round · prompts + prompt) · generations + generation."""

    rounds: int  # number of rounds, at least 1
    prompts: int  # number of prompts, at least 1
    generations: int  # number of completions of a prompt in a round, at least 1

    @property
    def units(self) -> int:
        """The number of pairs of a round and a prompt, whose completions are generated together or not at all."""
        return self.rounds * self.prompts

    @property
    def rows(self) -> int:
        """The number of rows: one for each completion."""
        return self.units * self.generations

    def row(self, round_: int, prompt: int, generation: int) -> int | None:
        """Return the number of a row; None where the job has no such row."""
        if not (0 <= round_ < self.rounds and 0 <= prompt < self.prompts and 0 <= generation < self.generations):
            return None
        return (round_ * self.prompts + prompt) * self.generations + generation

    def finished(self, rows: Bool[np.ndarray, " rows"]) -> Bool[np.ndarray, " units"]:
        """Return for each unit whether all its rows are there."""
        return rows.reshape(self.units, self.generations).all(axis=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """Prompts of one round that are generated together, longest first."""

    round: int
    prompts: tuple[int, ...]


def pending_units(
    shape: JobShape, lengths: Int[np.ndarray, " prompts"], finished: Bool[np.ndarray, " units"]
) -> Int[np.ndarray, " pending"]:
    """Return the units that are left to do, by round and in a round by length, the longest prompt first.

    This way capacities never have to grow, and prompts of a batch are about equally long, so that replicas with the
    same number of them have the same work.

    Args:
        lengths: The number of tokens of each prompt.
    """
    units = np.flatnonzero(~finished)
    rounds, prompts = np.divmod(units, shape.prompts)
    return units[np.lexsort((prompts, -lengths[prompts], rounds))]


def share_of(units: Int[np.ndarray, " pending"], host: int, hosts: int) -> Int[np.ndarray, " share"]:
    """Return the units of one of several hosts: dealt out in turns, alternately forwards and backwards, so that every
    host has about the same number of tokens.
    """
    turn, place = np.divmod(np.arange(len(units)), hosts)
    return units[np.where(turn % 2 == 0, place, hosts - 1 - place) == host]


def batches(shape: JobShape, units: Int[np.ndarray, " pending"], prompts_per_batch: int) -> Iterator[Batch]:
    """Yield units in batches of at most ``prompts_per_batch`` prompts.

    A batch has units of one round, because a prompt can have one number in it only.
    """
    rounds, prompts = np.divmod(units, shape.prompts)
    for round_ in range(shape.rounds):
        of_round = prompts[rounds == round_]
        for start in range(0, len(of_round), prompts_per_batch):
            yield Batch(round=round_, prompts=tuple(of_round[start : start + prompts_per_batch].tolist()))


def prompts_per_batch(sequences: int, generations: int, max_new_tokens: int, cap: int | None = None) -> int:
    """The number of prompts of a batch: enough to fill all slots several times, as far as `BATCH_TOKENS` allows."""
    at_once = -(-sequences // generations)
    in_memory = BATCH_TOKENS // (generations * max_new_tokens)
    best = max(1, at_once, min(_SLOT_FILLS * at_once, in_memory))
    return best if cap is None else min(best, cap)


PIECE_BYTES = 8 << 20
"""Bytes, about, of a piece of prompts: the most that the coordination service has of them at a time."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncodedPrompt:
    """A prompt and its token ids."""

    prompt: Prompt
    tokens: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Line:
    """A line of the file."""

    text: str | None
    messages: tuple[dict[str, Any], ...] | None
    answer: str | None
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)
    tokens: tuple[int, ...]


class PromptStore:
    """Prompts in a temporary file of this host, which is gone when the process ends; each takes 12 bytes of memory."""

    def __init__(self) -> None:
        # Unlinked from the start: nothing to clean up, however the process ends.
        self._file = tempfile.TemporaryFile(prefix="lockstep-prompts-")
        self._offsets = array("q", [0])
        self._lengths = array("i")
        self._digest = hashlib.sha256()

    def __len__(self) -> int:
        return len(self._lengths)

    @property
    def lengths(self) -> np.ndarray:
        """The number of tokens of each prompt."""
        return np.asarray(self._lengths, dtype=np.int32)

    @property
    def digest(self) -> str:
        """The SHA-256 of all prompts, their reference answers and their tokens, in hexadecimal digits."""
        return self._digest.hexdigest()

    def append(self, piece: bytes) -> None:
        """Add prompts: whole lines that `encoded_lines` yielded, one for each."""
        self._file.seek(self._offsets[-1])
        self._file.write(piece)
        self._digest.update(piece)
        for line in piece.splitlines(keepends=True):
            self._offsets.append(self._offsets[-1] + len(line))
            self._lengths.append(len(from_peer(line, _Line, "a prompt of the leader's").tokens))

    def __getitem__(self, number: int) -> EncodedPrompt:
        """Return a prompt by its number."""
        self._file.seek(self._offsets[number])
        line = self._file.read(self._offsets[number + 1] - self._offsets[number])
        stored = from_peer(line, _Line, "a prompt of the leader's")
        prompt = Prompt(
            id=number, text=stored.text, messages=stored.messages, answer=stored.answer, fields=stored.fields
        )
        return EncodedPrompt(prompt=prompt, tokens=stored.tokens)


def encoded_lines(
    prompts: Iterator[Prompt],
    tokenizer: "PreTrainedTokenizerBase",
    fields: PromptFields | None = None,
    *,
    max_seq_len: int | None,
    max_new_tokens: int,
    limits: ModelLimits | None = None,
) -> Iterator[bytes]:
    """Encode prompts, each as a line of JSON; one that cannot be used raises when it is reached.

    Args:
        fields: The format that they were read in; None: the default.
        limits: Those of the model; None: they are not checked.

    Yields:
        A line with the prompt and its tokens.
    """
    texts: Prompt | None = None
    for prompt in prompts:
        texts = prompt if prompt.messages is None and (prompt.id == 0 or texts) else None
        (tokens,) = encode(tokenizer, [prompt], max_seq_len=max_seq_len, max_new_tokens=max_new_tokens, limits=limits)
        messages = None if prompt.messages is None else [dict(message) for message in prompt.messages]
        record = {"text": prompt.text, "messages": messages, "answer": prompt.answer, "fields": dict(prompt.fields)}
        yield json.dumps({**record, "tokens": tokens}).encode() + b"\n"
    if texts is not None:
        warn_of_texts(tokenizer, [texts], fields or PromptFields())


def store_prompts(hosts: Hosts, lines: Iterator[bytes] | None, *, piece_bytes: int = PIECE_BYTES) -> PromptStore:
    """Store the leader's prompts on every host.

    Args:
        lines: On the leader, the lines of `encoded_lines`; None elsewhere.
        piece_bytes: The number of bytes that are sent at a time, about.

    Raises:
        PeerError: The leader could not read or encode a prompt; raised on every host.
    """
    store, number = PromptStore(), 0
    with hosts.scope("prompts") as scope:
        while True:
            piece: bytes | None = None
            with scope.run_on_all(f"read {number}", "reading prompts"):
                if lines is not None:
                    piece = _piece(lines, piece_bytes)
            # The phase ends in a barrier, so that the piece before is deleted from the service when this one comes.
            received = scope.broadcast(f"piece {number}", piece)
            if not received:
                break
            with scope.run_on_all(f"store {number}", "reading prompts"):
                store.append(received)
            number += 1
        scope.agree("prompt store", {"prompts": store.digest})
    return store


def _piece(lines: Iterator[bytes], piece_bytes: int) -> bytes:
    """Return the next lines, at least ``piece_bytes`` together; fewer or none at the end."""
    piece = bytearray()
    for line in lines:
        piece += line
        if len(piece) >= piece_bytes:
            break
    return bytes(piece)
