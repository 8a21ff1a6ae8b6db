"""One round of sampling on all hosts, in the order that keeps a pod alive (docs/protocol.md, "A round")."""

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from lockstep.callback.round_prompts import RoundPrompts, from_bytes, to_bytes
from lockstep.device import used_bytes
from lockstep.engine import Auditor, AuditResult, Engine, Gate
from lockstep.hosts import Hosts, Watchdog, digest, environment
from lockstep.schedule import Counts, FindStop, Scheduler
from lockstep.text import Prompt
from lockstep.types import Completion, Request


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundResult:
    """What a round produced; the same on every host but for ``prompts``.

    Args:
        prompts: The prompts as the leader read them; None elsewhere.
        completions: The completions in the order of the prompts, then of the generations.
        seconds: The wall time of each phase, in seconds.
        memory: The most bytes in use on any device of this host ``before`` and ``after``; empty where the backend does
            not count them (CPU).
        audit: How far the log-probabilities are from those of the training forward; None without an audit.
        requests: What was asked, drafts included.
        counts: The steps and the drafts of the generation; None without drafts.
    """

    prompts: list[Prompt] | None
    completions: list[Completion]
    seconds: Mapping[str, float]
    memory: Mapping[str, int]
    audit: AuditResult | None = None
    requests: list[Request] = dataclasses.field(default_factory=list)
    counts: Counts | None = None


def run_round(
    hosts: Hosts,
    *,
    facts: Mapping[str, str],
    read: Callable[[], RoundPrompts],
    engine: Callable[[], tuple[Engine, Any]],
    find_stop: FindStop | None = None,
    max_seconds: float | None = None,
    auditor: Callable[[], Auditor | None] = lambda: None,
    watchdog: Watchdog | None = None,
) -> RoundResult | None:
    """Barrier, broadcast, agreement, generation, agreement, barrier: every host makes the same steps or none.

    Args:
        hosts: The processes, inside a scope of this round's own; its ``timeout_s`` bounds every wait and device call.
        facts: What must be the same on every host before anything else happens (step, configuration, tokenizer).
        read: A function that reads the prompts; called on the leader alone.
        engine: A function that gives the engine and the model, read once for the round; called on every host, launches
            nothing.
        find_stop: What finds stop strings.
        max_seconds: The seconds that generation may last; None for no limit.
        auditor: A function that gives what recomputes the log-probabilities, or None; called on every host after
            ``engine``, launches nothing.
        watchdog: The watchdog of device calls; None for one of its own, whose thread outlives the round by up to
            ``timeout_s``.

    Returns:
        None where the job is asked to end: the round was aborted between the same two launches on every host.

    Raises:
        PeerError: A phase failed on at least one host; raised on every host.
        DisagreementError: The hosts differ; raised on every host.
        LaunchMismatchError: The hosts launched different programs; raised on every host.
        HostTimeoutError: A host is missing.
    """
    watchdog = Watchdog(hosts, hosts.timeout_s) if watchdog is None else watchdog
    clock = _Clock()
    memory: dict[str, int | None] = {}
    prompts: list[Prompt] | None = None

    def read_on_leader() -> bytes:
        nonlocal prompts
        asked = read()
        prompts = asked.prompts
        return to_bytes(asked)

    with hosts.run_on_all("waiting for all hosts to begin") as begin:
        begin.agree({**facts, **environment(), "debug": str(hosts.debug)})
        begin.share(hosts.preemption.requested())
    clock.lap("barrier")
    if any(begin.shared):
        _end(hosts)
        return None

    hosts.phase("read prompts")
    asked = from_bytes(hosts.broadcast_from_leader("prompts", read_on_leader))
    requests = asked.requests
    clock.lap("prompts")

    with hosts.run_on_all("measure memory") as measured:
        ready, model = engine()
        with watchdog.watch("waiting for the train step"):
            measured.share(ready.free_bytes(model))
        memory["before"] = used_bytes()
    free = min(measured.shared)

    with hosts.run_on_all("prepare") as prepared:
        prepared.agree({"prompts": digest(repr(asked)), **ready.prepare(model, asked.compile_requests, free=free)})
        auditing = auditor()
        if auditing is not None:
            prepared.agree(auditing.prepare(model, asked.compile_requests))
            auditing.check_memory(free, ready.config.hbm_utilization)
        prepared.share(hosts.preemption.requested())
    clock.lap("prepare")
    if any(prepared.shared):
        _end(hosts)
        return None

    gate, schedulers = Gate(hosts, max_seconds), deque[Scheduler](maxlen=1)
    with hosts.launch_on_all("generate", ready.ledger) as generated:
        completions = ready.run(
            model,
            requests,
            around_launch=watchdog.watch_launch,
            find_stop=find_stop,
            between_launches=schedulers.append,
            gate=gate,
        )
        generated.agree({"tokens": digest(repr(completions))})
    clock.lap("generate")

    audit: AuditResult | None = None
    if auditing is not None and not gate.preempted:
        with hosts.launch_on_all("audit", ready.ledger) as audited:
            audit = auditing.run(model, requests, completions, around_launch=watchdog.watch_launch, hosts=hosts)
            audited.agree({"audit": repr(audit)})
        clock.lap("audit")

    _end(hosts)
    clock.lap("barrier")
    if gate.preempted:
        return None
    memory["after"] = used_bytes()
    return RoundResult(
        prompts=prompts,
        completions=completions,
        seconds=clock.seconds,
        memory={moment: used for moment, used in memory.items() if used is not None},
        audit=audit,
        requests=requests,
        counts=schedulers[-1].counts if any(request.drafts is not None for request in requests) else None,
    )


def _end(hosts: Hosts) -> None:
    """No host goes on to train while another still samples."""
    hosts.phase("training")
    hosts.barrier("end")


class _Clock:
    """Wall time by phase; a phase that comes twice is added up."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now
