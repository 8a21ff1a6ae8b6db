"""The prompts of a job on every host's disk: read and encoded by the leader, sent once, read by number."""

import dataclasses
import hashlib
import json
import tempfile
from array import array
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.hosts import Hosts
from lockstep.json_text import from_peer
from lockstep.text import Prompt, encode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
        """Add prompts.

        Args:
            piece: Whole lines that `encoded_lines` yielded, one for each prompt.
        """
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
        found = from_peer(line, _Line, "a prompt of the leader's")
        prompt = Prompt(id=number, text=found.text, messages=found.messages, answer=found.answer)
        return EncodedPrompt(prompt=prompt, tokens=found.tokens)


def encoded_lines(
    prompts: Iterator[Prompt],
    tokenizer: "PreTrainedTokenizerBase",
    *,
    max_seq_len: int | None,
    max_new_tokens: int,
) -> Iterator[bytes]:
    """Encode prompts, each as a line of JSON.

    Args:
        prompts: The prompts in their order.
        tokenizer: The tokenizer of the model.
        max_seq_len: The most tokens of a prompt and its completion together; None for no limit.
        max_new_tokens: The most tokens of a completion.

    Yields:
        A line with the prompt and its tokens.

    Raises:
        PromptError: A prompt cannot be used; raised when it is reached.
    """
    for prompt in prompts:
        (tokens,) = encode(tokenizer, [prompt], max_seq_len=max_seq_len, max_new_tokens=max_new_tokens)
        messages = None if prompt.messages is None else [dict(message) for message in prompt.messages]
        record = {"text": prompt.text, "messages": messages, "answer": prompt.answer, "tokens": tokens}
        yield json.dumps(record).encode() + b"\n"


def store_prompts(hosts: Hosts, lines: Iterator[bytes] | None, *, piece_bytes: int = PIECE_BYTES) -> PromptStore:
    """Store the leader's prompts on every host.

    Args:
        hosts: The processes of the job, all of which make this call.
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
