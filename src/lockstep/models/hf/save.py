"""Saves a model as a Hugging Face checkpoint: every host writes files of its own, a bounded piece at a time."""

import contextlib
import itertools
import json
import os
import pathlib
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from lockstep.errors import ConfigError, PeerError
from lockstep.files import write_file
from lockstep.hosts import Hosts, current, digest, leader_only, leased
from lockstep.models.families.registry import config_to_hf
from lockstep.models.hf.files import INDEX_NAME
from lockstep.models.hf.load import LOG_INTERVAL_S
from lockstep.models.hf.save_target import CONFIG_NAME, SaveTarget, save_target
from lockstep.models.hf.save_writer import PIECE_BYTES, FileWriter, Gathered, Pieces, Read, Source
from lockstep.models.hf.saved_tensor import SavedTensor, index_text, pieces_of, saved_tensors, split_into_files
from lockstep.models.llama import LlamaLMHeadModel
from lockstep.models.lora import LoraModel, merge_adapters
from lockstep.placement.device import own_settings
from lockstep.printable import bytes_text, get_logger
from lockstep.text import write_tokenizer
from lockstep.urls import check_bare_name

log = get_logger(__name__)

MAX_SHARD_BYTES = 5 * 10**9
"""The most bytes of tensors in a file."""

_INTERVAL_S = 1.0
"""Seconds after which the hosts hear of each other while they write."""


class SavesTokenizer(Protocol):
    """The part of a transformers tokenizer that is used here."""

    def save_pretrained(self, save_directory: str) -> Any:
        """Write the tokenizer's files to a directory."""

    def get_vocab(self) -> dict[str, int]:
        """Return the ids of all tokens by their text."""


def save_hf(
    model: LlamaLMHeadModel | LoraModel,
    path: str | os.PathLike[str],
    *,
    tokenizer: SavesTokenizer | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    dtype: Any = None,
    vocab_size: int | None = None,
    interrupted: Callable[[], bool] = lambda: False,
    hosts: Hosts | None = None,
) -> bool:
    """Save a model as a Hugging Face checkpoint: safetensors, an index where there are several files, config.json.

    Every host calls it, and writes files of its own where it sees ``path``; on a local disk that the others do not see,
    the leader writes all of them. A piece of a tensor, of at most 32 MiB, is on each device at a time, gathered by a
    program that every host launches; a host has two such pieces in memory. A directory appears as a whole, a
    checkpoint that was there is replaced; at a URL, config.json is written last. What fails on one host fails on all,
    and leaves no half checkpoint. One job at a time saves to a path, by a lease beside the directory or at the URL.

    Args:
        model: The model, in any sharding. Adapters are merged, for which the devices hold a second copy of the weights
            that have them.
        path: A directory or an fsspec URL such as ``gs://bucket/model``.
        tokenizer: The tokenizer to save with the model; its special tokens go into config.json. None for none.
        max_shard_bytes: The most bytes of tensors in a file; a larger tensor gets a file of its own.
        dtype: The dtype of the stored tensors; None keeps that of each parameter.
        vocab_size: The number of rows of the vocabulary to save, where the model's is padded; None for all.
        interrupted: Called about every second: whether this host wants all hosts to give up.
        hosts: The hosts of the job; None for ``lockstep.hosts.current()``.

    Returns:
        Whether the checkpoint was saved: False where a host gave up.

    Raises:
        PeerError: A host could not write; its own error is the cause there.
        ConfigError: No Hugging Face architecture computes the model, or another job saves to the path.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     lockstep.models.save_hf(model, f"{directory}/model", tokenizer=tokenizer)
        True
    """
    vocab_size = model.Vocab.size if vocab_size is None else vocab_size
    config = config_to_hf(model.config, vocab_size)  # refuses a model that no Hugging Face architecture computes
    hosts = current() if hosts is None else hosts
    if isinstance(model, LoraModel):
        model = merge_adapters(model, hosts, dtype)
    tensors = saved_tensors(model, dtype, vocab_size)
    with hosts.scope("save_hf") as scope:
        save = _Save(scope, path, tensors, max_shard_bytes)
        return save.run(Gathered(scope, save.pieces), config, tokenizer, interrupted)


def export_hf(
    model: LlamaLMHeadModel,
    read: Read,
    path: str | os.PathLike[str],
    *,
    tokenizer: SavesTokenizer | None = None,
    dtype: Any = None,
    vocab_size: int | None = None,
    hosts: Hosts | None = None,
) -> None:
    """Save a model that is read from somewhere, as `save_hf` does, without any device.

    Args:
        model: The skeleton of the model, with the dtypes of its parameters.
        read: What gives the rows of a tensor; called in a thread of each host, for the tensors that it writes.
        path: See `save_hf`; so are the others.
        vocab_size: The number of rows of the vocabulary to save.

    Raises:
        PeerError: A host could not read or write; its own error is the cause there.
        ConfigError: No Hugging Face architecture computes the model.
    """
    vocab_size = model.Vocab.size if vocab_size is None else vocab_size
    config = config_to_hf(model.config, vocab_size)
    tensors = saved_tensors(model, dtype, vocab_size)
    with (current() if hosts is None else hosts).scope("export_hf") as scope:
        save = _Save(scope, path, tensors)
        save.run(Source(scope, read), config, tokenizer, lambda: False)


class _Save:
    """One checkpoint that is saved by all hosts."""

    def __init__(
        self,
        hosts: Hosts,
        path: str | os.PathLike[str],
        tensors: Sequence[SavedTensor],
        max_shard_bytes: int = MAX_SHARD_BYTES,
    ) -> None:
        self._hosts, self._path, self._tensors, self._max_shard_bytes = hosts, os.fspath(path), tensors, max_shard_bytes
        self._files: Mapping[str, Sequence[SavedTensor]] = {}
        self._writers: list[int] = []

    def pieces(self) -> Pieces:
        """Return what each host writes."""
        return [
            [piece for tensors in self._files_of(process).values() for piece in pieces_of(tensors, PIECE_BYTES)]
            for process in range(self._hosts.count)
        ]

    @own_settings()
    def run(
        self,
        source: Source,
        config: Mapping[str, Any],
        tokenizer: SavesTokenizer | None,
        interrupted: Callable[[], bool],
    ) -> bool:
        """Save; return whether it was saved, or a host gave up."""
        with contextlib.ExitStack() as lease:
            target = self._begin(lease)
            try:
                with contextlib.closing(source):
                    self._choose_writers(target)
                    source.prepare()
                    if not self._write(source, target, interrupted):
                        return False
                    with self._hosts.run_on_all("finish", "saving"):
                        if self._hosts.is_leader:
                            with leader_only():
                                target.write_small(
                                    lambda path: self._small_files(pathlib.Path(path), config, tokenizer)
                                )
                                target.commit()
                    return True
            except BaseException as error:
                self._abort(target, together=isinstance(error, PeerError))
                raise

    def _begin(self, lease: contextlib.ExitStack) -> SaveTarget:
        """Make the place; the leader has its lease until the stack is closed."""

        def begin() -> bytes:
            token = secrets.token_hex(4)
            target = save_target(self._path, token)
            lease.enter_context(leased(self._path, target.lease, fix="path"))
            target.begin()
            return token.encode()

        token = self._hosts.broadcast_from_leader("begin", begin).decode(errors="replace")
        return save_target(self._path, check_bare_name(token, "process 0"))

    def _choose_writers(self, target: SaveTarget) -> None:
        """Learn which hosts see the place, and share the files out between them."""
        with self._hosts.run_on_all("writers", "saving") as phase:
            phase.share(target.seen())
            phase.agree(
                {"tensors": digest(repr([(tensor.name, tensor.shape, tensor.dtype.name) for tensor in self._tensors]))}
            )
        self._writers = [process for process, sees in enumerate(phase.shared) if sees]
        if not self._writers:
            raise ConfigError(f"{self._path} cannot be seen where it was just made. Check the file system.")
        if self._hosts.is_leader and len(self._writers) < self._hosts.count:
            log.info(
                "%s is seen by %d of %d processes; they write all of it",
                self._path,
                len(self._writers),
                self._hosts.count,
            )
        self._files = split_into_files(self._tensors, self._max_shard_bytes, len(self._writers))

    def _files_of(self, process: int) -> dict[str, Sequence[SavedTensor]]:
        """The files that a process writes: one after the other goes to the next writer."""
        owners = itertools.cycle(self._writers)
        return {
            name: tensors
            for (name, tensors), owner in zip(self._files.items(), owners, strict=False)
            if owner == process
        }

    def _write(self, source: Source, target: SaveTarget, interrupted: Callable[[], bool]) -> bool:
        interval_s = min(_INTERVAL_S, self._hosts.timeout_s / 4)
        progress = _Progress(self._hosts, self._path, sum(tensor.nbytes for tensor in self._tensors))
        room = True
        with FileWriter(target, self._files_of(self._hosts.index), source.read, self._hosts.timeout_s) as writer:
            for number in itertools.count():
                with source.phase(f"write {number}") as phase:
                    source.advance(room)
                    done, own_room = source.wait(writer, interval_s)
                    phase.share((done, own_room, writer.written, interrupted()))
                room = all(has_room for _, has_room, _, _ in phase.shared)
                progress.show(sum(written for _, _, written, _ in phase.shared))
                if all(is_done for is_done, *_ in phase.shared):
                    return True
                if any(is_interrupted for *_, is_interrupted in phase.shared):
                    source.close()
                    break
        self._abort(target, together=True)
        return False

    def _abort(self, target: SaveTarget, *, together: bool) -> None:
        """Remove what there is, when no host writes any more."""
        if together:
            with self._hosts.run_on_all("nobody writes", "giving a save up"):
                pass
        if self._hosts.is_leader:
            target.abort()

    def _small_files(
        self, directory: pathlib.Path, config: Mapping[str, Any], tokenizer: SavesTokenizer | None
    ) -> None:
        if len(self._files) > 1:
            write_file(directory / INDEX_NAME, index_text(self._files))
        if tokenizer is not None:
            write_tokenizer(tokenizer, directory)
        values = dict(config)
        values["torch_dtype"] = max(self._tensors, key=lambda tensor: tensor.nbytes).dtype.name
        for token in ("bos_token_id", "eos_token_id", "pad_token_id"):
            values[token] = getattr(tokenizer, token, None)
        write_file(directory / CONFIG_NAME, json.dumps(values, indent=2, sort_keys=True) + "\n")


class _Progress:
    """The log of the leader while a checkpoint is saved."""

    def __init__(self, hosts: Hosts, path: str, total: int) -> None:
        self._hosts, self._path, self._total = hosts, path, total
        self._start = self._last = time.monotonic()

    def show(self, written: int) -> None:
        """Log, every few seconds and at the end, what all hosts have written."""
        now = time.monotonic()
        done = written == self._total
        if not self._hosts.is_leader or (now - self._last < LOG_INTERVAL_S and not done):
            return
        self._last = now
        rate = bytes_text(round(written / max(now - self._start, 1e-9)))
        log.info("saving %s: %s of %s, %s/s", self._path, bytes_text(written), bytes_text(self._total), rate)
