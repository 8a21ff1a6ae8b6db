"""Prompts on every host's disk: read and encoded by the leader, sent once, found again by number."""

import dataclasses
import hashlib
import json
import tempfile
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.hosts import Hosts
from lockstep.text import Prompt, encode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PIECE_BYTES = 8 << 20
"""Prompts travel in pieces of about this size: the most that the coordination service holds of them at a time."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpooledPrompt:
    """A prompt and its tokens."""

    prompt: Prompt
    tokens: tuple[int, ...]


class PromptStore:
    """Prompts in a temporary file of this host, 12 bytes of memory each. It is gone when the process ends."""

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
        """Tokens of each prompt."""
        return np.asarray(self._lengths, dtype=np.int32)

    @property
    def digest(self) -> str:
        """Of all prompts, their answers and tokens."""
        return self._digest.hexdigest()

    def append(self, piece: bytes) -> None:
        """Add prompts, as `encoded_lines` gives them, a line each."""
        self._file.seek(self._offsets[-1])
        self._file.write(piece)
        self._digest.update(piece)
        for line in piece.splitlines(keepends=True):
            self._offsets.append(self._offsets[-1] + len(line))
            self._lengths.append(len(json.loads(line)["tokens"]))

    def __getitem__(self, number: int) -> SpooledPrompt:
        """A prompt by its number."""
        self._file.seek(self._offsets[number])
        line = self._file.read(self._offsets[number + 1] - self._offsets[number])
        record: dict[str, Any] = json.loads(line)
        messages: Sequence[Mapping[str, str]] | None = record["messages"]
        prompt = Prompt(
            id=number,
            text=record["text"],
            messages=None if messages is None else tuple(messages),
            answer=record["answer"],
        )
        return SpooledPrompt(prompt=prompt, tokens=tuple(record["tokens"]))


def encoded_lines(
    prompts: Iterator[Prompt],
    tokenizer: "PreTrainedTokenizerBase",
    *,
    max_seq_len: int | None,
    max_new_tokens: int,
) -> Iterator[bytes]:
    """Each prompt with its tokens as a line.

    Raises:
        PromptError: a prompt that cannot be used, when it is reached.
    """
    for prompt in prompts:
        (tokens,) = encode(tokenizer, [prompt], max_seq_len=max_seq_len, max_new_tokens=max_new_tokens)
        messages = None if prompt.messages is None else [dict(message) for message in prompt.messages]
        record = {"text": prompt.text, "messages": messages, "answer": prompt.answer, "tokens": tokens}
        yield json.dumps(record).encode() + b"\n"


def store_prompts(hosts: Hosts, lines: Iterator[bytes] | None, *, piece_bytes: int = PIECE_BYTES) -> PromptStore:
    """The leader's prompts on every host.

    Args:
        hosts: of the job.
        lines: on the leader, as of `encoded_lines`; None elsewhere.
        piece_bytes: that travel at a time, about.

    Raises:
        PeerError: the leader could not read or encode a prompt; the same on every host.
    """
    spool, number = PromptStore(), 0
    with hosts.scope("prompts") as scope:
        while True:
            piece: bytes | None = None
            with scope.run_on_all(f"read {number}"):
                if lines is not None:
                    piece = _piece(lines, piece_bytes)
            # The phase ends in a barrier, so that the piece before is deleted from the service when this one comes.
            received = scope.broadcast(f"piece {number}", piece)
            if not received:
                break
            with scope.run_on_all(f"store {number}"):
                spool.append(received)
            number += 1
        scope.agree("spool", {"prompts": spool.digest})
    return spool


def _piece(lines: Iterator[bytes], piece_bytes: int) -> bytes:
    """Lines of at least so many bytes together; what is left at the end, maybe nothing."""
    piece = bytearray()
    for line in lines:
        piece += line
        if len(piece) >= piece_bytes:
            break
    return bytes(piece)
