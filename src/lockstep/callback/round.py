"""One round of sampling on all hosts, in the order that keeps a pod alive (docs/protocol.md, "A round")."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from lockstep.callback.round_prompts import RoundPrompts, from_bytes, to_bytes
from lockstep.device.memory import used_bytes
from lockstep.engine import Auditor, Budget, Engine
from lockstep.errors import LockstepError
from lockstep.hosts import Hosts, Ledger, Watchdog, compare, digest, environment
from lockstep.schedule import FindStop
from lockstep.text import Prompt
from lockstep.types import Completion


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundResult:
    """What a round produced; the same on every host but for ``prompts``.

    Args:
        prompts: as the leader read them; None elsewhere.
        completions: in the order of the prompts, then of the generations.
        seconds: wall time of each phase.
        memory: bytes that this host's fullest device held ``before`` and ``after``; empty where nobody counts (CPU).
        logprob_gap: largest difference between a log-probability and that of the training forward; None without audit.
    """

    prompts: list[Prompt] | None
    completions: list[Completion]
    seconds: Mapping[str, float]
    memory: Mapping[str, int]
    logprob_gap: float | None = None


def run_round(
    hosts: Hosts,
    *,
    facts: Mapping[str, str],
    read: Callable[[], RoundPrompts],
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
    memory = {"before": used_bytes()}

    @contextlib.contextmanager
    def watched(program: str) -> Iterator[None]:
        hosts.phase(program)
        with watchdog.watch(program):
            yield

    prompts: list[Prompt] | None = None
    ready: Engine | None = None
    auditing: Auditor | None = None
    completions: list[Completion] = []
    gap: float | None = None

    def read_on_leader() -> bytes:
        nonlocal prompts
        asked = read()
        prompts = asked.prompts
        return to_bytes(asked)

    def measure() -> int:
        nonlocal ready
        ready = engine()
        return ready.free_bytes(model)

    def prepare() -> tuple[Mapping[str, str], bool]:
        nonlocal auditing
        assert ready is not None
        digests = {"prompts": digest(repr(questions)), **ready.prepare(model, questions.compile_requests, free=free)}
        if (auditing := auditor()) is not None:
            digests |= auditing.prepare(model, questions.compile_requests)
            auditing.check_memory(free, ready.config.hbm_utilization)
        return digests, hosts.preemption.requested()

    def generate() -> Mapping[str, str]:
        assert ready is not None
        # A launch from a second thread could come before one of ours on this host and after it on another.
        with jax.thread_guard(True):
            completions.extend(
                ready.run(model, requests, around_launch=watched, find_stop=find_stop, between_launches=budget)
            )
        return {"launches": ready.ledger.state, "tokens": digest(repr(completions))}

    def audit() -> Mapping[str, str]:
        nonlocal gap
        assert ready is not None and auditing is not None
        with jax.thread_guard(True):
            gap = auditing.run(model, requests, completions, around_launch=watched)
        return {"launches": ready.ledger.state, "logprob_gap": repr(gap)}

    hosts.phase("waiting for all hosts to begin")
    alike = {**facts, **environment(), "debug": str(hosts.debug)}
    begun = hosts.settle("begin", None, [alike, hosts.preemption.requested()])
    compare("facts", [alike for alike, _ in begun])
    clock.lap("barrier")
    if any(asked for _, asked in begun):
        _end(hosts)
        return None

    hosts.phase("read prompts")
    questions = from_bytes(hosts.broadcast_from_leader("prompts", read_on_leader))
    requests = questions.requests
    clock.lap("prompts")

    free = min(_settled(hosts, "measure memory", measure))
    prepared = _settled(hosts, "prepare", prepare)
    compare("programs", [digests for digests, _ in prepared])
    clock.lap("prepare")
    if any(asked for _, asked in prepared):
        _end(hosts)
        return None

    budget = Budget(hosts, max_seconds)
    assert ready is not None
    _agreed(hosts, "generate", generate, ready.ledger)
    clock.lap("generate")
    if auditing is not None and not budget.preempted:
        _agreed(hosts, "audit", audit, ready.ledger)
        clock.lap("audit")

    _end(hosts)
    clock.lap("barrier")
    if budget.preempted:
        return None
    memory["after"] = used_bytes()
    return RoundResult(
        prompts=prompts,
        completions=completions,
        seconds=clock.seconds,
        memory={moment: used for moment, used in memory.items() if used is not None},
        logprob_gap=gap,
    )


def _end(hosts: Hosts) -> None:
    """No host goes on to train while another still samples."""
    hosts.phase("training")
    hosts.barrier("end")


def _settled[T](hosts: Hosts, name: str, work: Callable[[], T]) -> list[T]:
    """A phase whose outcome all hosts know before any goes on: every host's result, or PeerError everywhere."""
    hosts.phase(name)
    result, error = None, None
    try:
        result = work()
    except Exception as failure:
        error = failure
    try:
        return hosts.settle(name, error, result)
    except LockstepError as settled:
        raise settled from error


def _agreed(hosts: Hosts, name: str, work: Callable[[], Mapping[str, str]], ledger: Ledger) -> None:
    """A phase that launches programs: all hosts launched the same and got the same."""
    held = _settled(hosts, name, work)
    hosts.compare_launches(f"launches of {name}", [one["launches"] for one in held], ledger)
    compare(name, held)


class _Clock:
    """Wall time by phase; a phase that comes twice is added up."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now
