"""The progress of each host and of the job: posted for the live view, and for hosts that wait for the last one."""

import dataclasses
import json
import time
from collections.abc import Callable, Sequence

from lockstep.engine.schedule import DraftCounts, Scheduler
from lockstep.errors import HostTimeoutError
from lockstep.hosts import Hosts
from lockstep.json_text import from_peer

_DIRECTORY = "lockstep/sample"
_POST_INTERVAL_S = 0.5  # seconds between two posts of a host, at least
_POLL_INTERVAL_S = 0.1  # seconds between two reads of the others' posts while waiting for them


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostProgress:
    """Counts of one host in this run so far.

    Args:
        floor: The tokens per second that the memory bandwidth of its devices allows, as predicted; 0 before that is
            known.
    """

    rows: int = 0
    prompts: int = 0  # number of prompts that have all their completions; a prompt counts once in each round
    tokens: int = 0  # number of sampled tokens, those of unfinished completions too
    seconds: float = 0.0  # the time spent generating, without compiling
    pages: int = 0  # number of KV cache pages in use on all replicas of the host
    max_pages: int = 0  # number of KV cache pages of all replicas of the host
    floor: float = 0.0
    done: bool = False  # whether the host has nothing left to do
    steps: int = 0  # number of steps that sampled `tokens`, counted once for each sequence
    drafted: int = 0  # number of tokens for which there was a draft
    right: int = 0  # number of those that were as drafted

    @property
    def rate(self) -> float:
        """The tokens per second of this host."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobProgress:
    """Counts of all hosts.

    Args:
        hosts: The progress of each host where each has its own prompts; one entry where all work on the same.
    """

    rows: int  # number of rows of the whole job
    found: int  # number of rows that were there when this run began, of prompts that had all of theirs
    generations: int = 1
    hosts: Sequence[HostProgress]
    seconds: float  # the time since generating began, by the leader's clock

    @property
    def rows_done(self) -> int:
        """The number of finished completions, those of earlier runs too."""
        return self.found + sum(host.rows for host in self.hosts)

    @property
    def prompts(self) -> int:
        """The number of prompts of the whole job, counted once for each round."""
        return self.rows // self.generations

    @property
    def prompts_done(self) -> int:
        """The number of prompts that have all their completions, those of earlier runs too."""
        return self.found // self.generations + sum(host.prompts for host in self.hosts)

    @property
    def tokens(self) -> int:
        """The number of tokens sampled in this run."""
        return sum(host.tokens for host in self.hosts)

    @property
    def rate(self) -> float:
        """The tokens per second of all hosts together."""
        return sum(host.rate for host in self.hosts)

    @property
    def drafts(self) -> DraftCounts:
        """Decode steps that drafts saved in this run."""
        return DraftCounts(
            tokens=self.tokens,
            steps=sum(host.steps for host in self.hosts),
            drafted=sum(host.drafted for host in self.hosts),
            right=sum(host.right for host in self.hosts),
        )

    @property
    def over_floor(self) -> float | None:
        """``rate`` as a fraction of what the memory bandwidth allows; None while that is not known."""
        floor = sum(host.floor for host in self.hosts)
        return self.rate / floor if floor and self.rate else None

    @property
    def eta_s(self) -> float | None:
        """The seconds that are left at the pace so far; None before there is one."""
        done = self.rows_done - self.found
        left = self.rows - self.rows_done
        return self.seconds * left / done if done else None

    def metrics(self) -> dict[str, float]:
        """Return the same numbers for a tracker."""
        values: dict[str, float] = {
            "prompts_done": self.prompts_done,
            "prompts_total": self.prompts,
            "rows_done": self.rows_done,
            "rows_total": self.rows,
            "tokens": self.tokens,
            "tokens_per_second": self.rate,
            "pages_in_use": sum(host.pages for host in self.hosts),
            "pages": sum(host.max_pages for host in self.hosts),
        }
        if self.over_floor is not None:
            values["over_floor"] = self.over_floor
        if self.eta_s is not None:
            values["eta_s"] = self.eta_s
        if len(self.hosts) > 1:
            values |= {f"host_{number}/tokens_per_second": host.rate for number, host in enumerate(self.hosts)}
        return values | (self.drafts.metrics() if self.drafts.drafted else {})


class Board:
    """Posts the progress of this host on the coordination service, and reads that of the others without waiting.

    Args:
        separate: Whether every host has its own prompts.
        found: The number of rows that were there when this run began, of prompts that had all of theirs.
        show: Called on the leader with the progress of the job, at most every half second.
    """

    def __init__(
        self,
        hosts: Hosts,
        *,
        separate: bool,
        rows: int,
        found: int,
        generations: int = 1,
        show: Callable[[JobProgress], None],
    ) -> None:
        self._hosts, self._separate = hosts, separate
        self._rows, self._found, self._generations, self._show = rows, found, generations, show
        self._start = self._last = time.monotonic()
        self._own = HostProgress()

    def post(self, own: HostProgress, *, now: bool = False) -> None:
        """Post this host's progress; at most every half second unless ``now``."""
        self._own = own
        if not now and time.monotonic() - self._last < _POST_INTERVAL_S:
            return
        self._last = time.monotonic()
        if self._separate:
            self._hosts.client.set(f"{_DIRECTORY}/{self._hosts.index}", json.dumps(dataclasses.asdict(own)).encode())
        if self._hosts.is_leader:
            self._show(self.job())

    def job(self) -> JobProgress:
        """Return the progress of the job, as far as this host knows it."""
        hosts = self._posts() if self._separate else [self._own]
        return JobProgress(
            rows=self._rows,
            found=self._found,
            generations=self._generations,
            hosts=hosts,
            seconds=max(1e-9, time.monotonic() - self._start),
        )

    def wait_for_all(self, timeout_s: float) -> None:
        """Return when every host has nothing left to do. The leader goes on showing the progress of the job.

        Raises:
            HostTimeoutError: No host made progress for so long; names those that are not done.
        """
        changed = time.monotonic()
        before = self._posts()
        while not all(post.done for post in before):
            time.sleep(_POLL_INTERVAL_S)
            posts = self._posts()
            if posts != before:
                before, changed = posts, time.monotonic()
            if self._hosts.is_leader and time.monotonic() - self._last >= _POST_INTERVAL_S:
                self._last = time.monotonic()
                self._show(self.job())
            if time.monotonic() - changed > timeout_s:
                late = ", ".join(f"process {i}" for i, post in enumerate(posts) if not post.done)
                raise HostTimeoutError(
                    f"{late} made no progress on its share of the prompts for {timeout_s:g} s. Look for the first "
                    "error in its log, or raise trainer.distributed.timeout_s if a launch takes so long. Finished rows "
                    "are on disk; start again to go on."
                )

    def close(self) -> JobProgress:
        """Return the progress of the job at its end, and delete all posts. Every host makes this call."""
        self._hosts.barrier("last progress posted")
        job = self.job()
        self._hosts.barrier("last progress read")
        if self._hosts.is_leader:
            self._hosts.client.delete(_DIRECTORY)
            self._show(job)
        return job

    def _posts(self) -> list[HostProgress]:
        posts = self._hosts.client.get_dir(_DIRECTORY)
        texts = [posts.get(f"{_DIRECTORY}/{index}", b"{}") for index in range(self._hosts.count)]
        progress = [from_peer(post, HostProgress, "a host's progress") for post in texts]
        progress[self._hosts.index] = self._own
        return progress


class Meter:
    """Counts what this host does; the engine calls it between launches.

    Args:
        floor: Returns the tokens per second that the memory bandwidth allows.
    """

    def __init__(self, board: Board, floor: Callable[[], float]) -> None:
        self._board, self._floor = board, floor
        self._before = self._now = HostProgress()
        self._seconds, self._prompts = 0.0, 0
        self._since: float | None = None

    def add_prompts(self, prompts: int) -> None:
        """Count ``prompts`` more prompts that have all their completions."""
        self._prompts += prompts

    def begin(self) -> None:
        """Prepare for a new scheduler, which counts from 0."""
        self._before = self._now

    def __call__(self, scheduler: Scheduler) -> None:
        """Read the counts of a scheduler, and post them."""
        now = time.monotonic()
        self._since = self._since or now
        counts, before = scheduler.counts, self._before
        self._now = HostProgress(
            rows=before.rows + counts.finished,
            prompts=self._prompts,
            tokens=before.tokens + sum(counts.tokens),
            seconds=self._seconds + now - self._since,
            pages=counts.pages,
            max_pages=counts.max_pages,
            floor=self._floor(),
            steps=before.steps + counts.steps,
            drafted=before.drafted + counts.drafted,
            right=before.right + counts.right,
        )
        self._board.post(self._now)

    def pause(self) -> None:
        """Stop the clock until the next call: completions are being written."""
        if self._since is not None:
            self._seconds += time.monotonic() - self._since
        self._since = None

    def total(self, *, done: bool) -> HostProgress:
        """Return all that this host has done so far, with no page in use."""
        return dataclasses.replace(
            self._now,
            prompts=self._prompts,
            seconds=self._seconds,
            pages=0,
            max_pages=0,
            floor=self._floor(),
            done=done,
        )
