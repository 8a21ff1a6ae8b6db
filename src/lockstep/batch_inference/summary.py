"""A finished job as the leader shows it: the summary of metrics, tables and files."""

import collections
import dataclasses
import functools
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from lockstep.batch_inference.config import SampleConfig
from lockstep.engine.schedule import DraftCounts
from lockstep.health import State
from lockstep.hosts import Hosts
from lockstep.json_text import from_peer, parse_json, refused, typed
from lockstep.placement.device import peak_bytes, used_bytes
from lockstep.printable import bytes_text, get_logger, without_credentials
from lockstep.report import MAX_TABLE_ROWS, SampleRow, Tracker

log = get_logger(__name__)

TABLE = "sample/samples"
_NUMBERS = functools.partial(collections.defaultdict[str, Any], int)  # makes numbers by name, 0 at first


@dataclasses.dataclass(kw_only=True)
class Totals:
    """Sums over rows, which are known without gathering the rows."""

    rows: int = 0
    tokens: int = 0
    finish: dict[str, int] = dataclasses.field(default_factory=_NUMBERS)
    sums: dict[str, float] = dataclasses.field(default_factory=_NUMBERS)
    counts: dict[str, int] = dataclasses.field(default_factory=_NUMBERS)
    looked_at: int = 0  # rows whose health is known
    states: dict[str, int] = dataclasses.field(default_factory=_NUMBERS)  # rows in each state, of those

    def add(self, lines: Iterable[bytes]) -> "Totals":
        """Add rows, given as the lines of a file, and return itself."""
        for line in lines:
            row = _row(line)
            self.rows += 1
            self.tokens += row.num_tokens
            self.finish[row.finish_reason] += 1
            self.looked_at += row.health is not None
            for state in (row.health or "").split():
                self.states[state] += 1
            for name, value in row.metrics.items():
                if value is not None:
                    self.sums[name] += value
                    self.counts[name] += 1
        return self

    @property
    def health(self) -> dict[str, float]:
        """The share of each state in the rows whose health is known; none where no row's is."""
        known = [state for state in State if state != State.SAME_ANSWER and self.looked_at]  # that takes a round
        return {state.value: self.states.get(state, 0) / self.looked_at for state in known}

    @property
    def means(self) -> dict[str, float]:
        """The mean of each metric over the completions that have a value."""
        return {name: total / self.counts[name] for name, total in self.sums.items()}


def add_up(hosts: Hosts, own: Totals) -> Totals | None:
    """Return the sums over all hosts on the leader, None elsewhere. Every host makes this call."""
    posts = hosts.gather("totals", json.dumps(dataclasses.asdict(own)).encode())
    if posts is None:
        return None
    every = Totals()
    for post in posts:
        part = from_peer(post, Totals, "a host's totals")
        every.rows += part.rows
        every.tokens += part.tokens
        every.looked_at += part.looked_at
        for field in ("finish", "counts", "states", "sums"):
            for name, number in getattr(part, field).items():
                getattr(every, field)[name] += number
    return every


class MemoryLog:
    """Bytes in use on the device with least free memory of all hosts at named moments; empty where the backend does not
    count them (CPU).
    """

    def __init__(self, hosts: Hosts) -> None:
        self._hosts = hosts
        self._own: dict[str, int] = {}

    def note(self, moment: str) -> None:
        """Record the bytes in use now on the device of this host that has most in use."""
        self._add(moment, used_bytes())

    def note_peak(self) -> None:
        """Record the most bytes that were ever in use on a device of this host."""
        self._add("peak", peak_bytes())

    def of_all(self, name: str) -> dict[str, int]:
        """Return the most bytes of any host by moment, on the leader; empty elsewhere. Every host makes this call."""
        posts = self._hosts.gather(name, json.dumps(self._own).encode())
        most: collections.Counter[str] = collections.Counter()
        for post in posts or ():
            most |= collections.Counter(from_peer(post, dict[str, int], "a host's memory"))
        return dict(most)

    def _add(self, moment: str, used: int | None) -> None:
        if used is not None:
            self._own[moment] = used


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """A finished job, as the leader knows it."""

    totals: Totals
    prompts: int
    hosts: int
    mode: str  # `global_mesh` or `host_data_parallel`
    found: int  # number of rows that were there when this run began
    tokens: int
    seconds: float  # the time spent generating in this run, on the host that took longest
    load_s: float
    loaded_bytes: int  # bytes that all hosts read of the checkpoint
    memory: Mapping[str, int]  # bytes in use on the device with least free memory, by moment
    drafts: DraftCounts | None = None  # what drafts saved in this run; None without drafts

    @property
    def rate(self) -> float:
        """The tokens per second of this run; 0 where there was nothing left to do."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


def metrics(outcome: Outcome) -> dict[str, float | str]:
    """Return the metrics of a job under the names that a tracker gets."""
    return {
        "sample/total_prompts": outcome.prompts,
        "sample/total_generated_tokens": outcome.totals.tokens,
        "sample/num_hosts": outcome.hosts,
        "sample/inference_mode": outcome.mode,
        "sample/tokens_per_second": outcome.rate,
        "sample/total_completions": outcome.totals.rows,
        "sample/resumed_completions": outcome.found,
        "sample/time/generate_s": outcome.seconds,
        "sample/time/load_s": outcome.load_s,
        **({"sample/load_bytes_per_second": outcome.loaded_bytes / outcome.load_s} if outcome.load_s else {}),
        **{f"sample/hbm/{moment}_bytes": used for moment, used in outcome.memory.items()},
        **{f"sample/finish/{reason}": count for reason, count in sorted(outcome.totals.finish.items())},
        **{f"sample/health/{state}": share for state, share in outcome.totals.health.items()},
        **({f"sample/{name}": value for name, value in outcome.drafts.metrics().items()} if outcome.drafts else {}),
        **{f"sample/{name}": mean for name, mean in outcome.totals.means.items()},
    }


def log_job(tracker: Tracker, outcome: Outcome, merged: Path | None, config: SampleConfig, *, step: int) -> None:
    """Log the metrics and, where rows were gathered and the table is wanted, the table.

    Args:
        merged: The file of all rows; None where they were not gathered.
        step: The step under which the tracker gets them.
    """
    if merged is not None and not config.skip_samples_table:
        if outcome.totals.rows > MAX_TABLE_ROWS:
            log.warning(
                "the table has the first %d of %d rows; all are in %s", MAX_TABLE_ROWS, outcome.totals.rows, merged
            )
        tracker.log_rows(TABLE, first_rows(merged, MAX_TABLE_ROWS), step=step)
    tracker.log(metrics(outcome), step=step)


def first_rows(merged: Path, count: int) -> list[SampleRow]:
    """Return the first rows of a merged file."""
    with open(merged, "rb") as lines:
        return [_row(line) for line in itertools.islice(lines, count)]


def _row(line: bytes) -> SampleRow:
    with refused("a row of the merged file", "Remove it from the files of the hosts, and start again."):
        row = SampleRow.from_dict(parse_json(line, "a row of the merged file", dict, ""))
        return typed(SampleRow, dict(vars(row)))


def summary_table(outcome: Outcome) -> Table:
    """Return the summary of a job that the terminal shows."""
    totals = outcome.totals
    table = Table(title="sample: summary", title_justify="left", title_style="bold", box=box.ROUNDED, show_header=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    again = f", {outcome.found:,} of them from before" if outcome.found else ""
    table.add_row("completions", f"{totals.rows:,} for {outcome.prompts:,} prompts{again}")
    mean = f", {totals.tokens / totals.rows:,.1f} per completion" if totals.rows else ""
    table.add_row("tokens", f"{totals.tokens:,}{mean}")
    table.add_row("ended by", ", ".join(f"{reason} {count:,}" for reason, count in sorted(totals.finish.items())))
    unhealthy = {state: totals.states[state] for state, share in totals.health.items() if share}
    if totals.looked_at:
        parts = [f"{state} {count:,} ({count / totals.looked_at:.1%})" for state, count in unhealthy.items()]
        table.add_row("health", ", ".join(parts) or "nothing is wrong with any")
    for name, value in totals.means.items():
        measured = totals.counts[name]
        table.add_row(name, f"mean {value:.4g}" + (f" of {measured:,}" if measured < totals.rows else ""))
    hosts = f"{outcome.hosts} host{'s' * (outcome.hosts != 1)}, {outcome.mode}"
    if outcome.tokens:
        table.add_row(
            "speed", f"{outcome.rate:,.0f} tokens/s ({outcome.tokens:,} in {outcome.seconds:.1f} s) on {hosts}"
        )
    else:
        table.add_row("speed", f"nothing was left to generate; {hosts}")
    if outcome.drafts is not None:
        table.add_row("drafts", str(outcome.drafts))
    if outcome.load_s:
        rate = bytes_text(round(outcome.loaded_bytes / outcome.load_s))
        read = bytes_text(outcome.loaded_bytes)
        table.add_row("loading", f"{read} in {outcome.load_s:.1f} s, {rate}/s over all hosts")
    if outcome.memory:
        used = ", ".join(f"{moment.replace('_', ' ')} {bytes_text(size)}" for moment, size in outcome.memory.items())
        table.add_row("HBM, most used device", used)
    else:
        table.add_row("HBM", "this backend does not count it")
    return table


def closing_words(files: Sequence[tuple[str, Path]], url: str | None = None) -> str:
    """Return the last lines of a run: where everything is."""
    lines = [f"  {name:<11}{path}" for name, path in files if path.exists()]
    return "\n".join(["", "done:", *lines, *([] if url is None else [f"  {'uploaded':<11}{without_credentials(url)}"])])
