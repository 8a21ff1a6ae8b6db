"""One round of sampling on all hosts, in the order that keeps a pod alive (docs/architecture.md, "Safety protocol")."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from lockstep.callback.questions import from_bytes, to_bytes
from lockstep.engine import Auditor, Budget, Engine
from lockstep.errors import LockstepError
from lockstep.hosts import Hosts, Watchdog, digest, environment
from lockstep.schedule import FindStop
from lockstep.text import Prompt
from lockstep.types import Completion, Request


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundResult:
    """What a round produced; the same on every host but for ``prompts``.

    Args:
        prompts: as the leader read them; None elsewhere.
        completions: in the order of the prompts, then of the generations.
        seconds: wall time of each phase.
        logprob_gap: largest difference between a log-probability and that of the training forward; None without audit.
    """

    prompts: list[Prompt] | None
    completions: list[Completion]
    seconds: Mapping[str, float]
    logprob_gap: float | None = None


def run_round(
    hosts: Hosts,
    *,
    facts: Mapping[str, str],
    read: Callable[[], tuple[list[Prompt], list[Request]]],
    engine: Callable[[], Engine],
    model: Any,
    find_stop: FindStop | None = None,
    max_seconds: float | None = None,
    auditor: Callable[[], Auditor | None] = lambda: None,
    watchdog: Watchdog | None = None,
) -> RoundResult | None:
    """Barrier, broadcast, agreement, generation, agreement, barrier: every host makes the same steps or none.

    Args:
        hosts: inside a scope of this round's own; its ``timeout_s`` bounds every wait and every device call.
        facts: what every host must hold alike before anything else happens (step, configuration, tokenizer).
        read: reads the prompts; called on the leader alone.
        engine: the engine for the model; called on every host, launches nothing.
        model: what `lockstep.models.read_decoder` reads.
        find_stop: finds stop strings.
        max_seconds: that generation may last; None for no limit.
        auditor: recomputes the log-probabilities, or None; called on every host after ``engine``, launches nothing.
        watchdog: of device calls; None for one of its own, whose thread outlives the round by up to ``timeout_s``.

    Returns:
        None where the job is asked to end: the round was abandoned between two launches, on every host at the same.

    Raises:
        PeerError: a host-only phase failed on at least one host; the same on every host, nothing was launched.
        DisagreementError: hosts differ; the same on every host.
        LaunchMismatchError: hosts launched different programs; the same on every host.
        HostTimeoutError: a host is missing.
    """
    watchdog = Watchdog(hosts, hosts.timeout_s) if watchdog is None else watchdog
    clock = _Clock()

    @contextlib.contextmanager
    def watched(program: str) -> Iterator[None]:
        hosts.phase(program)
        with watchdog.watch(program):
            yield

    hosts.phase("waiting for all hosts to begin")
    hosts.preemption.tell()
    hosts.barrier("begin")
    hosts.agree("facts", {**facts, **environment(), "debug": str(hosts.debug)})
    clock.lap("barrier")
    if hosts.preempted("preempted"):
        hosts.barrier("end")
        return None

    prompts, payload = None, None
    with _settled(hosts, "read prompts"):
        if hosts.is_leader:
            prompts, requests = read()
            payload = to_bytes(requests)
    requests = from_bytes(hosts.broadcast("prompts", payload))
    clock.lap("prompts")

    with _settled(hosts, "measure memory"):
        ready = engine()
        free = ready.free_bytes(model)
    free = hosts.least("free memory", free)
    digests: dict[str, str] = {}
    auditing: Auditor | None = None
    with _settled(hosts, "prepare"):
        digests = ready.prepare(model, requests, free=free)
        if (auditing := auditor()) is not None:
            digests |= auditing.prepare(model, requests)
            auditing.check_memory(free, ready.config.hbm_utilization)
    hosts.agree("programs", {"prompts": digest(repr(requests)), **digests})
    hosts.preemption.tell()  # before the barrier, so that the leader knows it before the first launch
    hosts.barrier("ready")
    clock.lap("prepare")

    completions: list[Completion] = []
    budget = Budget(hosts, max_seconds)
    # A launch from a second thread could come before one of ours on this host and after it on another.
    with _settled(hosts, "generate"), jax.thread_guard(True):
        completions = ready.run(model, requests, around_launch=watched, find_stop=find_stop, between_launches=budget)
    clock.lap("generate")

    gap = None
    if auditing is not None and not budget.preempted:
        with _settled(hosts, "audit"), jax.thread_guard(True):
            gap = auditing.run(model, requests, completions, around_launch=watched)
        clock.lap("audit")

    hosts.agree_launches("launches", ready.ledger)
    hosts.agree("tokens", {"tokens": digest(repr(completions)), "logprob_gap": repr(gap)})
    hosts.phase("training")
    hosts.barrier("end")
    clock.lap("barrier")
    if budget.preempted:
        return None
    return RoundResult(prompts=prompts, completions=completions, seconds=clock.seconds, logprob_gap=gap)


@contextlib.contextmanager
def _settled(hosts: Hosts, name: str) -> Iterator[None]:
    """A phase whose outcome all hosts know before any goes on: ok everywhere or PeerError everywhere."""
    hosts.phase(name)
    error: Exception | None = None
    try:
        yield
    except Exception as failure:
        error = failure
    try:
        hosts.settle(name, error)
    except LockstepError as settled:
        raise settled from error


class _Clock:
    """Wall time by phase; a phase that comes twice is added up."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now
