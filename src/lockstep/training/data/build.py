"""The building of a run's caches: hosts share their chunks, each on a thread, with progress."""

import contextlib
import dataclasses
import itertools
import json
import os
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from lockstep.errors import ConfigError
from lockstep.hosts import Hosts, HostThread
from lockstep.printable import bytes_text, get_logger, without_credentials, write_to_stdout
from lockstep.storage import call_storage, storage_wait
from lockstep.terminal import console
from lockstep.training.data.chunk_builder import CacheSpec, ChunkBuilder, read_chunk, summarise_chunks
from lockstep.training.data.token_cache import (
    FIX,
    METADATA,
    RESIDENT_BYTES,
    CacheMetadata,
    TokenCache,
    cache_file,
    is_local,
    read_metadata,
    remove_dead_files,
)
from lockstep.urls import check_bare_name, url_to_fs

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = get_logger(__name__)

INTERVAL_S = 1.0  # seconds after which the hosts hear of each other while they build
SHOWN_BAD = 5
FIRST_S, REPORT_S = 2.0, 10.0
"""Seconds until the first line or the bar, so that small data passes in silence, and between two lines."""


class BuildProgress:
    """Shows how much of its files the hosts have read; on the leader alone."""

    def __init__(self, hosts: Hosts, total: int) -> None:
        self._hosts, self._total = hosts, max(total, 1)
        self._start = time.monotonic()
        self._next = self._start + FIRST_S
        self._bar: Progress | None = None

    def show(self, parts: Sequence[tuple[int, int]]) -> None:
        """Show what the hosts have read."""
        read = sum(done for done, _ in parts)
        self._hosts.phase(f"building the data cache, {read / self._total:.0%}")
        now = time.monotonic()
        if not self._hosts.is_leader or now < self._next:
            return
        if console().is_terminal:
            self._show_bar(read)
            return
        self._next = now + REPORT_S
        rate = bytes_text(round(read / (now - self._start)))
        last = min(range(len(parts)), key=lambda process: parts[process][0] / max(parts[process][1], 1))
        share = parts[last][0] / max(parts[last][1], 1)
        log.info(
            "data cache: %s of %s read, %s/s; process %d is last with %.0f%%",
            bytes_text(read),
            bytes_text(self._total),
            rate,
            last,
            100 * share,
        )

    def close(self) -> None:
        """Give the terminal back."""
        if self._bar is not None:
            write_to_stdout(self._bar.stop)

    def _show_bar(self, read: int) -> None:
        bar = self._bar
        if bar is None:
            columns = TextColumn("data cache"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
            self._bar = bar = Progress(*columns, console=console())
            bar.add_task("data cache", total=self._total)
            write_to_stdout(bar.start)
        write_to_stdout(lambda: bar.update(bar.task_ids[0], completed=read))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """A chunk to build."""

    spec: CacheSpec
    directory: str
    number: int

    @property
    def size(self) -> int:
        """The bytes to read."""
        pieces = self.spec.chunks[self.number]
        return sum(self.spec.files[number].size // parts for number, _, parts in pieces)


class BuildWorker(HostThread):
    """A context manager that builds chunks one after the other in a thread; complete ones are left as they are.

    The thread ends with the context, at the next batch of records.

    Args:
        tokenizer: The tokenizer, which nobody else may use meanwhile.
        timeout_s: The seconds in which something must be read.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        fs: Any,
        tokenizer: "PreTrainedTokenizerBase",
        *,
        raise_at_bad_row: bool,
        timeout_s: float,
    ) -> None:
        super().__init__("lockstep-data", timeout_s)
        self._jobs, self._fs, self._tokenizer, self._raise = jobs, fs, tokenizer, raise_at_bad_row
        self.bytes_read = 0  # the bytes read so far, those of complete chunks included
        self.n_bad = 0  # the bad rows found so far
        self._builder: ChunkBuilder | None = None
        self._first_bad: ChunkBuilder | None = None
        self._what = "the first file"

    def first_bad(self) -> str:
        """Name the first bad row that this host has found; empty where it found none itself."""
        return "" if self._first_bad is None else self._first_bad.first_bad()

    def _work(self) -> None:
        for job in self._jobs:
            before = self.bytes_read
            self._what = job.spec.files[job.spec.chunks[job.number][0][0]].path
            chunk = read_chunk(self._fs, job.directory, job.number)
            if chunk is None:
                builder = ChunkBuilder(job.spec, job.number, raise_at_bad_row=self._raise, progress=self._note)
                self._builder = builder
                builder.build(self._fs, job.directory, self._tokenizer)
            else:
                self.n_bad += chunk["n_bad"]
            self._note(before + job.size - self.bytes_read, 0, self._what)

    def _stall(self) -> str:
        return f"nothing of {self._what} was read"

    def _note(self, n_bytes: int, n_bad: int, activity: str) -> None:
        self._raise_if_stopped()
        self.bytes_read += n_bytes
        self.n_bad += n_bad
        if n_bad and self._first_bad is None:
            self._first_bad = self._builder
        self._what = activity
        self._end_step()


@dataclasses.dataclass(frozen=True, kw_only=True)
class BadRowPolicy:
    """The treatment of records that cannot be used."""

    on_bad_row: Literal["skip", "raise"]  # leave them out, or raise at the first
    max_bad_rows: int  # the most that are left out of a source


def default_cache_dir() -> str:
    """Return where caches are kept unless the configuration says otherwise: below the user's cache directory."""
    return os.path.join(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache"), "lockstep", "data")


def build_caches(
    make_specs: Callable[[], Sequence[CacheSpec]],
    tokenizer: "PreTrainedTokenizerBase",
    cache_dir: str | None,
    policy: BadRowPolicy,
    hosts: Hosts,
) -> list[TokenCache]:
    """Build what is not there yet. Every host makes this call.

    Hosts that see the same cache directory build a share of the chunks each; one with its own disk builds all. The
    chunks do not depend on the number of hosts, and a complete one is never built again, so a build that was killed
    goes on. While hosts build they hear of each other every second, so however long it takes, nobody waits in vain; a
    host gives up where nothing was read for ``hosts.timeout_s``.

    Args:
        cache_dir: The directory or URL below which caches are kept; None for `default_cache_dir`.

    Raises:
        PeerError: A host could not read a file or write the cache, or there are more bad rows than allowed.
        DisagreementError: The hosts have different files.
    """
    with hosts.scope("data") as scope:
        with scope.run_on_all("files", "looking at the data files") as phase:
            fs, root = url_to_fs(cache_dir or default_cache_dir())
            specs = make_specs()
            phase.agree({f"files of {spec.name}": spec.content for spec in specs})
            phase.share(([spec.key for spec in specs], secrets.token_hex(8)))
        # The leader's: equal copies of a file on several hosts may have been made at different times.
        keys, nonce = phase.shared[0]
        names = [check_bare_name(name, "process 0") for name in (nonce, *keys[: len(specs)])]
        directories = [f"{root.rstrip('/')}/{key}" for key in names[1:]]
        group = _sharing(scope, fs, root, nonce, directories)
        _build(scope, fs, list(zip(specs, directories, strict=True)), tokenizer, policy, group)
        with scope.run_on_all("read", "reading the data cache") as phase:
            caches = open_caches(fs, list(zip(specs, directories, strict=True)), scope.timeout_s)
            for spec, cache in zip(specs, caches, strict=True):
                _check_rows(spec, cache.metadata, policy)
            phase.agree({f"rows of {spec.name}": cache.digest() for spec, cache in zip(specs, caches, strict=True)})
    if hosts.is_leader:
        for spec, cache in zip(specs, caches, strict=True):
            _report(spec, cache)
    return caches


def _sharing(scope: Hosts, fs: Any, root: str, nonce: str, directories: Iterable[str]) -> list[int]:
    """The processes that see the same cache directory as this one, itself among them."""
    probes = f"{root.rstrip('/')}/probe-{nonce}"
    waiting = storage_wait(f"writing to data.cache_dir {without_credentials(root)}")
    with scope.run_on_all("mark", "writing to the cache directory"), waiting:
        try:
            for path in (*directories, probes) if is_local(fs) else ():
                os.makedirs(path, exist_ok=True)
            with cache_file(fs, f"{probes}/{scope.index}") as stream:
                stream.write(b"here")
        except Exception as error:  # each file system has its own errors
            raise ConfigError(
                f"data.cache_dir {root} cannot be written to: {type(error).__name__}: {error}. Set it to a "
                "directory or bucket that can."
            ) from error
    with scope.run_on_all("look", "writing to the cache directory") as phase:
        fs.invalidate_cache()
        seen = sorted(int(name) for path in fs.ls(probes, detail=False) if (name := path.rpartition("/")[2]).isdigit())
        phase.share(seen)
    if scope.index == seen[0]:
        with contextlib.suppress(Exception):  # a directory with a few bytes is left behind
            fs.rm(probes, recursive=True)
    if scope.is_leader and any(len(processes) < scope.count for processes in phase.shared):
        log.warning(
            "data.cache_dir %s is not one directory for all hosts, so each builds the cache for itself. Set it to a "
            "shared disk or a bucket (gs://…) to have it built once.",
            root,
        )
    return seen


def _build(
    scope: Hosts,
    fs: Any,
    specs: Sequence[tuple[CacheSpec, str]],
    tokenizer: "PreTrainedTokenizerBase",
    policy: BadRowPolicy,
    group: Sequence[int],
) -> None:
    """Build this host's share of the chunks, until all hosts are done; then the first of a group says so on disk."""
    with scope.run_on_all("caches", "looking for finished data caches") as phase:
        missing = [(spec, path) for spec, path in specs if read_metadata(fs, path) is None]
        phase.share(len(missing))
    if not any(phase.shared):
        return
    chunks = [Job(spec=spec, directory=path, number=n) for spec, path in missing for n in range(len(spec.chunks))]
    jobs = chunks[list(group).index(scope.index) :: len(group)]
    own_bytes = sum(job.size for job in jobs)
    with scope.run_on_all("shares") as phase:
        phase.share(own_bytes)
    totals = list(phase.shared)
    progress = BuildProgress(scope, sum(totals))
    interval_s = min(INTERVAL_S, scope.timeout_s / 4)
    scope.phase("building the data cache")
    strict = policy.on_bad_row == "raise"
    worker = BuildWorker(jobs, fs, tokenizer, raise_at_bad_row=strict, timeout_s=scope.timeout_s)
    with worker, contextlib.closing(progress):
        for number in itertools.count():
            with scope.run_on_all(f"build {number}", scope.last_phase) as phase:
                done = worker.wait(interval_s)
                if worker.n_bad > policy.max_bad_rows * len(specs) and (first := worker.first_bad()):
                    raise ConfigError(f"{_too_many(worker.n_bad, policy)} The first: {first}")
                phase.share((done, min(worker.bytes_read, own_bytes)))
            progress.show([(read, total) for (_, read), total in zip(phase.shared, totals, strict=True)])
            if all(done for done, _ in phase.shared):
                break
    with scope.run_on_all("finish", "finishing the data cache"):
        if scope.index == group[0]:
            for spec, path in missing:
                with cache_file(fs, f"{path}/{METADATA}") as stream:
                    stream.write(json.dumps(dataclasses.asdict(summarise_chunks(fs, path, spec))).encode())
                if is_local(fs):
                    remove_dead_files(path)


def open_caches(fs: Any, specs: Sequence[tuple[CacheSpec, str]], timeout_s: float) -> list[TokenCache]:
    """Open finished caches. The smallest of those in a bucket stay in memory, as many as `RESIDENT_BYTES` take."""
    # Who waits for a bucket says so before others give up waiting for it.
    wait_s = 0.8 * timeout_s
    metadata = [_finished(fs, spec, path, wait_s) for spec, path in specs]
    total, resident = 0, set[int]()
    for number in sorted(range(len(metadata)), key=lambda number: metadata[number].nbytes):
        total += metadata[number].nbytes
        if total <= RESIDENT_BYTES:
            resident.add(number)
    return [
        TokenCache(fs, path, facts, resident=number in resident, wait_s=wait_s, vocab_size=spec.embedding)
        for number, ((spec, path), facts) in enumerate(zip(specs, metadata, strict=True))
    ]


def _finished(fs: Any, spec: CacheSpec, path: str, wait_s: float) -> CacheMetadata:
    doing = f"reading {fs.unstrip_protocol(path)}/{METADATA}"
    metadata = call_storage(doing, lambda: read_metadata(fs, path), wait_s)
    if metadata is None:
        raise ConfigError(
            f"the data cache {path} has no {METADATA}, which another process has just written. Use a data.cache_dir "
            "that all hosts see in the same way, or one on each host's own disk."
        )
    shape, chunks = spec.shape, len(spec.chunks) * len(spec.shape.lengths)
    if (metadata.layout, metadata.lengths, len(metadata.chunk_rows)) != (shape.layout, shape.lengths, chunks):
        raise ConfigError(f"{path}/{METADATA} is of other rows than those of {spec.name}. {FIX}")
    return metadata


def _check_rows(spec: CacheSpec, metadata: CacheMetadata, policy: BadRowPolicy) -> None:
    if metadata.n_bad and policy.on_bad_row == "raise":
        raise ConfigError(metadata.bad[0])
    if metadata.n_bad > policy.max_bad_rows:
        raise ConfigError(f"{spec.name}: {_too_many(metadata.n_bad, policy)} The first: {metadata.bad[0]}")
    if not sum(metadata.chunk_rows):
        why, fix = "", "Check the files."
        if metadata.bad:
            why = f"{metadata.n_bad} records cannot be used: {metadata.bad[0]} "
        elif metadata.dropped:
            why = f"The prompts of all {metadata.dropped} examples fill a row of {metadata.length} tokens. "
            fix = "Raise data.max_seq_len."
        raise ConfigError(f"{spec.name} has 0 rows; at least 1 is needed. {why}{fix}")


def _too_many(count: int, policy: BadRowPolicy) -> str:
    return (
        f"{count} records cannot be used, but data.max_bad_rows is {policy.max_bad_rows}. Correct the data or the "
        "settings, or raise data.max_bad_rows."
    )


def _report(spec: CacheSpec, cache: TokenCache) -> None:
    metadata = cache.metadata
    log.info("%s: %s; cache %s", spec.name, metadata.summary(), cache.path)
    if metadata.dropped:
        log.warning(
            "truncate: %d of %d examples dropped, their prompts fill a row of %d tokens",
            metadata.dropped,
            metadata.examples + metadata.dropped,
            metadata.length,
        )
    if metadata.n_bad:
        shown = "\n  ".join(metadata.bad[:SHOWN_BAD])
        more = f"\n  and {metadata.n_bad - SHOWN_BAD} more" if metadata.n_bad > SHOWN_BAD else ""
        log.warning("%s: %d records left out, as they cannot be used:\n  %s%s", spec.name, metadata.n_bad, shown, more)
