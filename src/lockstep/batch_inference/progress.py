"""How far each host is: what the live view shows, and how the hosts wait for each other."""

import dataclasses
import json
import time
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float

from lockstep.errors import HostTimeoutError
from lockstep.hosts import Hosts
from lockstep.schedule import Scheduler

_DIRECTORY = "lockstep/sample"
_POST_S = 0.5
"""Seconds between two posts of a host, at least."""
_LOOK_S = 0.1
"""Seconds between two looks at the others while waiting for them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostProgress:
    """What one host has done in this run so far.

    Args:
        rows: answers finished.
        prompts: that have all their answers; a prompt counts once in each round.
        tokens: sampled, those of unfinished answers too.
        seconds: of generating, compiling left out.
        pages: of the KV cache in use on all its replicas.
        max_pages: there are.
        floor: tokens per second that the memory bandwidth of its devices allows, as predicted; 0 before it is known.
        by_host: where all hosts work on the same prompts, ``tokens`` by the host whose devices sampled them, in parts
            where devices of several hosts make up a replica; empty where each host works for itself.
        done: it has nothing left to do.
    """

    rows: int = 0
    prompts: int = 0
    tokens: int = 0
    seconds: float = 0.0
    pages: int = 0
    max_pages: int = 0
    floor: float = 0.0
    by_host: Sequence[float] = ()
    done: bool = False

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobProgress:
    """What all hosts have done.

    Args:
        rows: of the whole job.
        found: rows that were there when this run began, of prompts that have all theirs.
        generations: rows of a prompt in a round.
        hosts: of each host that works on prompts of its own; one entry where all work on the same.
        seconds: since generating began, by the leader's clock.
    """

    rows: int
    found: int
    generations: int = 1
    hosts: Sequence[HostProgress]
    seconds: float

    @property
    def rows_done(self) -> int:
        """Finished answers, those of earlier runs too."""
        return self.found + sum(host.rows for host in self.hosts)

    @property
    def prompts(self) -> int:
        """Of the whole job, once for each round."""
        return self.rows // self.generations

    @property
    def prompts_done(self) -> int:
        """That have all their answers, those of earlier runs too."""
        return self.found // self.generations + sum(host.prompts for host in self.hosts)

    @property
    def tokens(self) -> int:
        """Sampled in this run."""
        return sum(host.tokens for host in self.hosts)

    @property
    def rate(self) -> float:
        """Tokens per second of all hosts together."""
        return sum(host.rate for host in self.hosts)

    @property
    def host_rates(self) -> list[float]:
        """Tokens per second of each host's devices."""
        first = self.hosts[0]
        if first.by_host:
            return [tokens / first.seconds if first.seconds > 0 else 0.0 for tokens in first.by_host]
        return [host.rate for host in self.hosts]

    @property
    def over_floor(self) -> float | None:
        """``rate`` as a part of what the memory bandwidth allows; None while that is not known."""
        floor = sum(host.floor for host in self.hosts)
        return self.rate / floor if floor and self.rate else None

    @property
    def eta_s(self) -> float | None:
        """Seconds that are left at the pace so far; None before there is one."""
        done = self.rows_done - self.found
        left = self.rows - self.rows_done
        return self.seconds * left / done if done else None

    def metrics(self) -> dict[str, float]:
        """The same numbers for a tracker."""
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
        for number, rate in enumerate(self.host_rates):
            values[f"host_{number}/tokens_per_second"] = rate
        return values


class Board:
    """Where hosts post how far they are, over the coordination service and without waiting for each other.

    Args:
        hosts: of the job.
        separate: whether every host works on prompts of its own.
        rows: of the whole job.
        found: rows that were there when this run began, of prompts that have all theirs.
        generations: rows of a prompt in a round.
        show: called on the leader with what all have done, now and then.
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
        self._mine = HostProgress()

    def post(self, mine: HostProgress, *, now: bool = False) -> None:
        """Let the others know; at most every half second unless ``now``."""
        self._mine = mine
        if not now and time.monotonic() - self._last < _POST_S:
            return
        self._last = time.monotonic()
        if self._separate:
            self._hosts.client.set(f"{_DIRECTORY}/{self._hosts.index}", json.dumps(dataclasses.asdict(mine)).encode())
        if self._hosts.is_leader:
            self._show(self.job())

    def job(self) -> JobProgress:
        """What all have done, as far as is known here."""
        each = self._posts() if self._separate else [self._mine]
        return JobProgress(
            rows=self._rows,
            found=self._found,
            generations=self._generations,
            hosts=each,
            seconds=max(1e-9, time.monotonic() - self._start),
        )

    def wait_for_all(self, timeout_s: float) -> None:
        """Return when every host has nothing left to do. The leader goes on showing how far they are.

        Args:
            timeout_s: seconds that a host may go without progress.

        Raises:
            HostTimeoutError: a host made no progress for so long.
        """
        changed = time.monotonic()
        before = self._posts()
        while not all(post.done for post in before):
            time.sleep(_LOOK_S)
            posts = self._posts()
            if posts != before:
                before, changed = posts, time.monotonic()
            if self._hosts.is_leader and time.monotonic() - self._last >= _POST_S:
                self._last = time.monotonic()
                self._show(self.job())
            if time.monotonic() - changed > timeout_s:
                late = ", ".join(f"process {i}" for i, post in enumerate(posts) if not post.done)
                raise HostTimeoutError(
                    f"{late} made no progress on its share of the prompts for {timeout_s:g} s. Look for the first "
                    "error in its log, or raise trainer.distributed.timeout_s if a launch takes so long. What is "
                    "answered is kept; start again to go on."
                )

    def close(self) -> JobProgress:
        """What all have done in the end. Every host calls it alike; nothing is left on the service."""
        self._hosts.barrier("last progress posted")
        job = self.job()
        self._hosts.barrier("last progress read")
        if self._hosts.is_leader:
            self._hosts.client.delete(_DIRECTORY)
            self._show(job)
        return job

    def _posts(self) -> list[HostProgress]:
        posts = self._hosts.client.get_dir(_DIRECTORY)
        found = [posts.get(f"{_DIRECTORY}/{index}") for index in range(self._hosts.count)]
        each = [HostProgress() if post is None else HostProgress(**json.loads(post)) for post in found]
        each[self._hosts.index] = self._mine
        return each


class Meter:
    """Counts what this host does; pass it as ``between_launches``.

    Args:
        board: to post on.
        floor: gives the tokens per second that the memory bandwidth allows.
        shares: where all hosts work on the same prompts, gives the part of each replica's devices that each host has;
            None where each works for itself.
    """

    def __init__(
        self,
        board: Board,
        floor: Callable[[], float],
        shares: Callable[[], Float[np.ndarray, "replica host"]] | None = None,
    ) -> None:
        self._board, self._floor, self._shares = board, floor, shares
        self._before = self._now = HostProgress()
        self._seconds, self._prompts = 0.0, 0
        self._since: float | None = None

    def answered(self, prompts: int) -> None:
        """So many more prompts have all their answers."""
        self._prompts += prompts

    def begin(self) -> None:
        """A new scheduler follows, which counts from 0."""
        self._before = self._now

    def __call__(self, scheduler: Scheduler) -> None:
        """Look at what is being generated."""
        now = time.monotonic()
        self._since = self._since or now
        counts, before = scheduler.counts, self._before
        by_host: list[float] = []
        if self._shares is not None:
            sampled = np.asarray(counts.tokens) @ self._shares()
            by_host = (sampled + (before.by_host or 0.0)).tolist()
        self._now = HostProgress(
            rows=before.rows + counts.finished,
            prompts=self._prompts,
            tokens=before.tokens + sum(counts.tokens),
            seconds=self._seconds + now - self._since,
            pages=counts.pages,
            max_pages=counts.max_pages,
            floor=self._floor(),
            by_host=by_host,
        )
        self._board.post(self._now)

    def pause(self) -> None:
        """Stop the clock until the next look: answers are being written."""
        if self._since is not None:
            self._seconds += time.monotonic() - self._since
        self._since = None

    def total(self, *, done: bool) -> HostProgress:
        """All so far; no page is in use any more."""
        return dataclasses.replace(
            self._now,
            prompts=self._prompts,
            seconds=self._seconds,
            pages=0,
            max_pages=0,
            floor=self._floor(),
            done=done,
        )
