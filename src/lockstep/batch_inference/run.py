"""``lockstep sample`` from a configuration to a merged file, the same steps on every host."""

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import numpy as np
from jaxtyping import Int

from lockstep.batch_inference.checkpoint import load, resolve_checkpoint
from lockstep.batch_inference.config import SampleConfig
from lockstep.batch_inference.generate import Generator
from lockstep.batch_inference.job_progress import Board, HostProgress, JobProgress, Meter
from lockstep.batch_inference.progress_output import KEPT, ProgressOutput
from lockstep.batch_inference.prompt_store import (
    JobShape,
    PromptStore,
    encoded_lines,
    pending_units,
    share_of,
    store_prompts,
)
from lockstep.batch_inference.row_files import (
    RemoteRows,
    RowFile,
    RowIndex,
    agree_on_owners,
    check_manifest,
    host_file,
    kept_template_date,
    merge,
    union,
    upload_rows,
    write_manifest,
)
from lockstep.batch_inference.summary import (
    MemoryLog,
    Outcome,
    Totals,
    add_up,
    closing_words,
    first_rows,
    log_job,
    summary_table,
)
from lockstep.config_fields import encode_config
from lockstep.errors import check_log_dir
from lockstep.hosts import (
    Hosts,
    closing_on_leader,
    config_digest,
    giving_back_leases,
    leader_only,
    take_lease,
    try_leader_only,
)
from lockstep.json_text import from_peer
from lockstep.placement import make_mesh
from lockstep.printable import get_logger, print_lines, write_to_stdout
from lockstep.report import (
    FINISH_S,
    BackgroundTracker,
    NoopTracker,
    Tracker,
    build_tracker,
    check_pyarrow,
    check_trackers,
    load_metrics,
    print_table,
    write_parquet,
)
from lockstep.storage import HUB_WAIT_S
from lockstep.terminal import console
from lockstep.text import (
    TEMPLATE_DATE,
    StopFinder,
    check_vocab,
    fetch_tokenizer,
    fix_template_date,
    load_tokenizer,
    stop_ids,
    tokenizer_digest,
)
from lockstep.urls import check_bare_name, check_links

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = get_logger(__name__)

_SHOWN_ROWS = 10


@giving_back_leases()
def sample(config: SampleConfig, hosts: Hosts) -> int:
    """Complete every prompt once; every host makes the same call.

    Raises:
        PeerError: a host cannot go on; the same on every host.
        DisagreementError: hosts have different configurations, tokenizers or checkpoints.
        LockstepError: rows are missing at the end.
    """
    return _Run(config, hosts).run()


class _Run:
    def __init__(self, config: SampleConfig, hosts: Hosts) -> None:
        self.config, self.hosts = config, hosts
        self.memory = MemoryLog(hosts)
        self.loaded_bytes, self.load_s = 0, 0.0

    def run(self) -> int:
        config, hosts = self.config, self.hosts
        hosts.agree("config", {"configuration": config_digest(config)})
        self._read()
        store = self._store()
        shape = JobShape(rounds=config.n_rounds, prompts=len(store), generations=config.n_generations)
        self._open(store)
        index, present_rows = self._find(shape)
        tracker: Tracker = NoopTracker()
        with hosts.run_on_all("tracker"):
            if hosts.is_leader:
                built = build_tracker(config.trainer.tracker, self.run_dir, self.run_dir.name, encode_config(config))
                tracker = BackgroundTracker(built, leader_only, finish_s=min(FINISH_S, hosts.timeout_s / 2))
        with closing_on_leader(hosts, lambda: _report("closing the tracker", tracker.finish)):
            present = int(present_rows.sum())
            if hosts.is_leader and present:
                log.info("%s of %s answers were there", f"{present:,}", f"{shape.rows:,}")
            progress = self._generate(store, shape, present_rows, tracker)
            self._report(shape, index, present, progress, tracker)
        return 0

    def _read(self) -> None:
        """Tokenizer, checkpoint's identity, directories."""
        config, hosts = self.config, self.hosts

        def fetch() -> bytes:
            check_trackers(config.trainer.tracker)  # before anything is read
            check_log_dir(config.trainer.log_dir)
            checkpoint = resolve_checkpoint(config)
            checkpoint.limits()  # what is no model is refused before a tokenizer is looked for beside it
            name = config.tokenizer or checkpoint.tokenizer
            return fetch_tokenizer(name, config.trust_remote_code, checkpoint.described_at)

        fetched = hosts.broadcast_from_leader("tokenizer", fetch, HUB_WAIT_S)
        with hosts.run_on_all("reading tokenizer and checkpoint"):
            if hosts.is_leader and config.write_parquet:
                check_pyarrow()
            self.checkpoint = resolve_checkpoint(config)
            self.tokenizer: PreTrainedTokenizerBase = load_tokenizer(
                config.tokenizer or self.checkpoint.tokenizer,
                config.trust_remote_code,
                fetched,
                self.checkpoint.described_at,
                config.chat_template_kwargs,
            )
            self.limits = self.checkpoint.limits()
            check_vocab(self.tokenizer, self.limits.rows)
            self.stop_ids = stop_ids(self.tokenizer)
            StopFinder(self.tokenizer).check(config.stop)
            self.identity = self.checkpoint.fingerprint()
            load_metrics(config.metrics)
        self.facts = {"checkpoint": self.identity, "tokenizer": tokenizer_digest(self.tokenizer)}
        hosts.agree("files", self.facts)
        name = config.trainer.run_id or time.strftime("sample-%Y%m%d-%H%M%S")
        name = hosts.broadcast("run_id", name.encode() if hosts.is_leader else None).decode(errors="replace")
        check_bare_name(name, "process 0")
        self.run_dir = Path(config.trainer.log_dir) / name
        url = config.host_data_parallel_output_dir
        self.output_dir = self.run_dir / "samples"
        self.remote: RemoteRows | None = None
        with hosts.run_on_all("output"):
            if url is not None and "://" in url:
                self.remote = RemoteRows(url, hosts.index)
            elif url is not None:
                self.output_dir = Path(url)
        date = fix_template_date(
            self.tokenizer, lambda: kept_template_date(self.output_dir, self.remote), hosts.broadcast_from_leader
        )
        if date:
            self.facts |= {"tokenizer": tokenizer_digest(self.tokenizer), TEMPLATE_DATE: date}

    def _store(self) -> PromptStore:
        config, hosts = self.config, self.hosts
        hosts.phase("reading prompts")
        lines: Iterator[bytes] | None = None
        if hosts.is_leader:
            lines = encoded_lines(
                config.stream_prompts(),
                self.tokenizer,
                config.prompt_fields,
                max_seq_len=config.engine.max_seq_len,
                max_new_tokens=config.max_new_tokens,
                limits=self.limits,
            )
        return store_prompts(hosts, lines)

    def _open(self, store: PromptStore) -> None:
        """Make the output directory this job's, or find that it is another's."""
        config, hosts = self.config, self.hosts
        params = config.sampling_params(self.stop_ids, 0)
        record = {
            **self.facts,
            "prompts": f"{len(store)} with digest {store.digest[:16]}",
            "n_rounds": config.n_rounds,
            "dtype": config.engine.dtype,
            "kv_cache_dtype": config.engine.kv_cache_dtype,
            "weight_dtype": config.engine.weight_dtype,
            "metrics": config.metrics,
            **({"keep_tokens": True} if config.keep_tokens else {}),
            **json.loads(json.dumps(dataclasses.asdict(params))),  # as JSON gives them back
        }
        with hosts.run_on_all("output directory"):
            for directory in (self.run_dir, self.output_dir):
                check_links(directory)
            self.output_dir.mkdir(parents=True, exist_ok=True)
            if hosts.is_leader:
                url = config.host_data_parallel_output_dir
                fix = "trainer.run_id" if url is None else "host_data_parallel_output_dir"
                for place in (self.output_dir, url if self.remote else None):
                    if place is not None:
                        take_lease(place, fix=fix)
            # Both, before either changes: rows that are only here count beside those behind the URL.
            force = config.resume == "force"
            lines = check_manifest(self.output_dir, record, force=force)
            if self.remote is not None:
                lines += self.remote.check(record, force=force)
            for line in lines:
                log.warning("resume force: %s; rows that are there stay as they are", line)
        with hosts.run_on_all("job record"):
            path = write_manifest(self.output_dir, record)
            if self.remote is not None and hosts.is_leader:
                self.remote.put(path)

    def _find(self, shape: JobShape) -> tuple[RowIndex, np.ndarray]:
        """Rows that some host has, whichever wrote them, the same on every host."""
        hosts, index, remote = self.hosts, RowIndex(shape), self.remote
        with hosts.run_on_all("rows on disk"):
            # Before any host reads the others' files: each brings and mends its own.
            fetched = None if remote is None else remote.fetch(self.output_dir, hosts.count)
            if fetched is not None:
                index.scan_file(fetched)
            there = index.present
            self.rows = RowFile(host_file(self.output_dir, hosts.index), index, None if remote is None else remote.add)
        with hosts.run_on_all("scan rows"):
            index.scan(self.output_dir)
        present = union(hosts, "found rows", index.present)
        if remote is not None:  # an earlier run had another URL or none, or ended between disk and URL
            upload_rows(hosts, remote, index, present & ~union(hosts, "rows behind the URL", there))
        return index, present

    def _generate(self, store: PromptStore, shape: JobShape, present: np.ndarray, tracker: Tracker) -> JobProgress:
        config, hosts = self.config, self.hosts
        separate = config.inference_mode == "host_data_parallel"
        units: Int[np.ndarray, " pending"] = pending_units(shape, store.lengths, shape.finished(present))
        at_rest = int(shape.finished(present).sum()) * shape.generations
        if not len(units):
            done = [HostProgress(done=True)]
            return JobProgress(rows=shape.rows, found=at_rest, generations=shape.generations, hosts=done, seconds=0.0)
        own_units = share_of(units, hosts.index, hosts.count) if separate else units
        self.memory.note("before_load")
        with hosts.run_on_all("mesh"):
            mesh = make_mesh(config.trainer.mesh_shape, jax.local_devices() if separate else None)
        model, self.loaded_bytes, self.load_s = load(hosts, self.checkpoint, mesh, config.engine.dtype)
        self.memory.note("after_load")
        generator = Generator(hosts, config, store, self.tokenizer, self.stop_ids)
        hosts.phase("preparing the engine")
        generator.prepare(model, mesh, shape, own_units)
        self.memory.note("after_engine")
        if hosts.is_leader and generator.engine and generator.engine.sizing:
            log.info("%s", generator.engine.sizing.describe())
            log.info("batches of %d prompts at most", generator.batch_prompts)
        title = self._title(shape) if hosts.is_leader else None
        shown = ProgressOutput(title, tracker, defer=config.defer_tracker_logs_until_end)
        with contextlib.closing(shown):
            board = Board(
                hosts, separate=separate, rows=shape.rows, found=at_rest, generations=shape.generations, show=shown
            )
            meter = Meter(board, lambda: generator.floor)
            writes = separate or hosts.is_leader
            generator.run(shape, own_units, self.rows if writes else None, meter if writes else None)
            board.post(meter.total(done=True), now=True)
            if separate:
                hosts.phase("waiting for the other hosts' shares")
                board.wait_for_all(hosts.timeout_s)
            job = board.close()
        self.memory.note_peak()
        return job

    def _report(self, shape: JobShape, index: RowIndex, present: int, progress: JobProgress, tracker: Tracker) -> None:
        """Sums, merged file, tracker, terminal."""
        config, hosts = self.config, self.hosts
        hosts.phase("gathering rows")
        owner = agree_on_owners(hosts, index)
        totals: Totals | None = None
        own_totals = Totals()
        with hosts.run_on_all("count rows"):
            own_totals.add(index.read(np.flatnonzero(owner == hosts.index)))
        totals = add_up(hosts, own_totals)
        memory = self.memory.of_all("memory")
        loaded = hosts.gather("loaded bytes", str(self.loaded_bytes).encode())
        merged: Path | None = None
        if config.enable_host_rows_gather:
            merged = merge(hosts, index, owner, self.output_dir)
        parquet: Path | None = None
        with hosts.run_on_all("parquet"):
            if merged is not None and config.write_parquet:
                parquet = write_parquet(merged)
        with hosts.run_on_all("upload"):
            for path in (merged, parquet):
                if self.remote is not None and path is not None:
                    self.remote.put(path)
        if not hosts.is_leader:
            return
        assert totals is not None and loaded is not None
        outcome = Outcome(
            totals=totals,
            prompts=shape.prompts,
            hosts=hosts.count,
            mode=config.inference_mode,
            found=present,
            tokens=progress.tokens,
            seconds=max((host.seconds for host in progress.hosts), default=0.0),
            load_s=self.load_s,
            loaded_bytes=sum(from_peer(value, int, "a host's loaded bytes") for value in loaded),
            memory=memory,
            drafts=None if config.drafts == "none" else progress.drafts,
        )
        self._log_outcome(outcome, merged, parquet, tracker)

    def _log_outcome(self, outcome: Outcome, merged: Path | None, parquet: Path | None, tracker: Tracker) -> None:
        """The leader's own work: what fails here is logged, for all rows are on disk."""
        config = self.config
        if merged is None:
            log.warning(
                "enable_host_rows_gather is false: no merged file and no table of samples; rows stay in %s on each "
                "host. Set enable_host_rows_gather: true to have both.",
                self.output_dir,
            )

        def show() -> None:
            write_to_stdout(lambda: console().print("", summary_table(outcome)))
            if merged is not None and not config.skip_samples_table:
                rows = first_rows(merged, _SHOWN_ROWS)
                print_table(rows, title=f"sample: the first of {outcome.totals.rows:,} answers", max_rows=_SHOWN_ROWS)
            files = [("rows", self.output_dir), *([("merged", merged)] if merged else [])]
            files += [("Parquet", parquet)] if parquet else []
            files += [("metrics", path) for path in sorted(self.run_dir.glob("metrics*.jsonl"))]
            files += [("W&B run", path) for path in sorted(self.run_dir.glob("wandb/*run-*"))]
            print_lines(closing_words(files, None if self.remote is None else self.remote.url))

        def track() -> None:
            log_job(tracker, outcome, merged, config, step=outcome.totals.rows)

        for task, work in (("the tracker", track), ("closing the tracker", tracker.finish), ("the summary", show)):
            _report(task, work)

    def _title(self, shape: JobShape) -> str:
        config = self.config
        return (
            f"sample: {shape.prompts:,} prompts × {shape.generations} answers × {shape.rounds} rounds, "
            f"{config.inference_mode} on {self.hosts.count} hosts"
        )


def _report(task: str, work: Callable[[], None]) -> None:
    try_leader_only(task, work, KEPT)
