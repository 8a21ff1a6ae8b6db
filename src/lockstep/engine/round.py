"""The protocol of generation: measure, prepare, agree, gated launches, agree on the tokens; on all hosts or on none.

Callback, rollouts, sampler, tasks, Tunix and `Engine.generate` all generate through this file (docs/protocol.md).
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from lockstep.engine.arrivals import ArrivalGate, Arrivals
from lockstep.engine.audit import Auditor, AuditResult
from lockstep.engine.launches import BetweenLaunches, Gate
from lockstep.engine.schedule import Counts, DraftCounts, FindStop
from lockstep.errors import HostError
from lockstep.hosts import Hosts, Ledger, Watchdog, digest
from lockstep.placement.device import AroundLaunch, own_settings, used_bytes
from lockstep.types import Completion, FinishReason, Request


@runtime_checkable
class RolloutEngine(Protocol):
    """An engine whose launches every host makes together; `lockstep.engine.Engine` is one.

    Every host makes the same calls. A ``model`` is what `lockstep.models.read_decoder` returned: the configuration and
    the trainer's own arrays, which are donated to the next train step, so nothing may keep them.
    """

    @property
    def ledger(self) -> Ledger:
        """The record of launches, which hosts compare after each generation."""
        ...

    def free_bytes(self, model: Any) -> int:
        """Return the free memory of the device of this process that has the least, once the model is complete."""
        ...

    def check(self, model: Any, requests: Sequence[Request]) -> Any:
        """Refuse what can never work; launches nothing.

        Args:
            requests: As many as in any generation, and as long.

        Raises:
            LockstepError: It cannot work.
        """
        ...

    def prepare(self, model: Any, requests: Sequence[Request], *, free: int) -> Mapping[str, str]:
        """Compile what these requests need; launches nothing.

        Args:
            requests: As many as in any generation, and as long.
            free: Bytes on the device with the least free memory of all hosts.

        Returns:
            The digests of all programs by name, which hosts agree on.
        """
        ...

    def stream(
        self,
        model: Any,
        requests: Iterable[Request],
        *,
        around_launch: AroundLaunch,
        find_stop: FindStop | None,
        gate: Gate,
    ) -> Iterator[Sequence[Completion]]:
        """Sample; the same answers on every host.

        Args:
            requests: No more than were prepared for, and no longer.
            around_launch: Called with a program's name; its context surrounds a launch.
            find_stop: Finds stop strings; None where no request has any.
            gate: What holds every host before a launch until all can go on.

        Yields:
            Completions, all of a prompt at a time.
        """
        ...


type Ready = Callable[[], tuple[RolloutEngine, Any, Auditor | None]]
type OnAnswered = Callable[[Sequence[Completion]], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generation:
    """Completions, and what making them cost; the same on every host but for ``seconds`` and ``memory``.

    Args:
        completions: In the order of the requests, then of the generations.
        ended: Whether the job is asked to end: generation was aborted between the same two launches on every host, and
            completions may be unfinished.
        seconds: The wall time of ``prepare``, ``generate`` and ``audit``; ``arrivals`` is the part of ``generate`` in
            which there was nothing to launch until a request arrived.
        memory: The most bytes in use on any device of this host ``before`` and ``after``; empty where the backend does
            not count them (CPU).
        drafts: What drafts saved; None where no request has any, or the engine is not lockstep's.
        counts: The scheduler's counts; None where the engine is not lockstep's.
        audit: How far the log-probabilities are from those of the training forward; None without an auditor.
    """

    completions: list[Completion]
    ended: bool = False
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    memory: Mapping[str, int] = dataclasses.field(default_factory=dict)
    drafts: DraftCounts | None = None
    counts: Counts | None = None
    audit: AuditResult | None = None


@own_settings()
def generate_on_all(
    hosts: Hosts,
    ready: Ready,
    requests: Sequence[Request],
    *,
    largest: Sequence[Request] | None = None,
    arrivals: Arrivals | None = None,
    facts: Mapping[str, str] | None = None,
    find_stop: FindStop | None = None,
    max_seconds: float | None = None,
    gate: Gate | None = None,
    watchdog: Watchdog | None = None,
    between_launches: BetweenLaunches | None = None,
    on_answered: OnAnswered | None = None,
) -> Generation:
    """Complete requests; every host makes the same steps or none.

    Args:
        hosts: Inside a scope of this generation's own; its ``timeout_s`` bounds every wait.
        ready: Gives the engine, the model as `lockstep.models.read_decoder` returned it, and what recomputes the
            log-probabilities, or None; called on every host, launches nothing.
        requests: The same on every host; may be none.
        largest: As many requests as in any generation, and as long: programs are made for these. None: ``requests``.
        arrivals: Requests that follow from answers, in place of ``requests``, of which there are then none; it has the
            answers too, and completions come in the order of their prompts' numbers. ``largest`` is then needed.
        facts: What must be the same on every host, beside requests and programs.
        max_seconds: The seconds that launches may take; compiling does not count. None for no limit.
        gate: What holds every host before each launch; None for one with ``max_seconds``.
        between_launches: Called with the scheduler before each launch, with the same effect on every host.
        on_answered: Called on this host with completions as soon as their prompts have all of theirs; launches nothing.
            What it raises is raised on every host after the last launch.

    Raises:
        PeerError: A phase failed on at least one host; raised on every host.
        DisagreementError: The hosts differ; raised on every host.
        LaunchMismatchError: The hosts launched different programs; raised on every host.
        HostTimeoutError: A host is missing.
    """
    clock = PhaseClock()
    around_launch: AroundLaunch = contextlib.nullcontext if watchdog is None else watchdog.watch_launch
    with hosts.run_on_all("measure memory") as measured:
        measured.agree({**(facts or {}), "requests": digest(repr(list(requests)))})
        engine, model, auditor = ready()
        # A train step may still run; what it holds is free only afterwards.
        with contextlib.nullcontext() if watchdog is None else watchdog.watch("waiting for the train step"):
            measured.share((engine.free_bytes(model), hosts.preemption.requested()))
    free, ended = min(free for free, _ in measured.shared), any(ending for _, ending in measured.shared)
    memory = {"before": used_bytes()}
    if (requests or arrivals is not None) and not ended:
        ended = _prepare(hosts, engine, model, requests if largest is None else largest, free, auditor)
    clock.lap("prepare")
    if ended or not (requests or arrivals is not None):
        return Generation(completions=_cancelled(requests), ended=ended, seconds=clock.seconds)

    source: Iterable[Request | None] = requests
    if arrivals is not None:
        assert not requests and gate is None and auditor is None
        source, between_launches, on_answered = arrivals, arrivals.between_launches, arrivals.answered
        gate = ArrivalGate(hosts, arrivals, max_seconds)
    gate = Gate(hosts, max_seconds) if gate is None else gate
    error: Exception | None = None
    found: dict[int, list[Completion]] = {}
    with hosts.launch_on_all("generate", engine.ledger) as generated:
        stream = _Stream(_stream(engine, model, source, around_launch, find_stop, gate, between_launches))
        for answered in stream:
            for completion in answered:
                found.setdefault(completion.prompt_id, []).append(completion)
            try:
                if on_answered is not None:
                    on_answered(answered)
            except Exception as caught:  # raised once all launches are made: no host may leave them alone
                error = error or caught
        if error is not None:
            raise error
        order = sorted(found) if arrivals is not None else [request.prompt_id for request in requests]
        completions = [completion for number in order for completion in found.get(number, [])]
        generated.agree({"tokens": digest(repr(completions))})
    clock.lap("generate")
    if isinstance(gate, ArrivalGate):
        clock.add("arrivals", gate.idle_s)

    audit: AuditResult | None = None
    if auditor is not None and not gate.preempted:
        with hosts.launch_on_all("audit", auditor.ledger) as audited:
            audit = auditor.run(model, requests, completions, around_launch=around_launch, hosts=hosts)
            audited.agree({"audit": repr(audit)})
        clock.lap("audit")
    memory["after"] = used_bytes()
    drafted = any(request.drafts is not None for request in requests)
    return Generation(
        completions=completions,
        ended=gate.preempted,
        seconds=clock.seconds,
        memory={moment: used for moment, used in memory.items() if used is not None},
        drafts=stream.counts.of_drafts if stream.counts is not None and drafted else None,
        counts=stream.counts,
        audit=audit,
    )


def stream_on_all(
    hosts: Hosts,
    engine: RolloutEngine,
    model: Any,
    requests: Iterable[Request],
    *,
    largest: Sequence[Request],
    free: int,
    batch: int,
    facts: Mapping[str, str] | None = None,
    find_stop: FindStop | None = None,
    watchdog: Watchdog | None = None,
    between_launches: BetweenLaunches | None = None,
    on_answered: OnAnswered | None = None,
) -> Generator[list[Completion], None, None]:
    """`generate_on_all` for any number of requests: hosts agree on the tokens of a batch before it is yielded.

    Every host takes the same steps; between two of them it may do what a host can do alone, but launch nothing.

    Args:
        hosts: As in `generate_on_all`, as all that has the same name there.
        model: The model as `lockstep.models.read_decoder` returned it.
        requests: Read one by one as room becomes free, the same on every host.
        largest: Requests that need as much as any of ``requests``.
        free: Bytes on the device with the least free memory of all hosts, agreed on.
        batch: The number of completions to agree on at a time, at least.
        between_launches: Called with the scheduler before each launch.
        on_answered: Called on this host with completions before they are agreed on; must not raise.

    Yields:
        Completions, all of a prompt at a time, in batches; none is empty.

    Raises:
        PeerError, DisagreementError, LaunchMismatchError, HostTimeoutError: See `generate_on_all`.
    """
    around_launch: AroundLaunch = contextlib.nullcontext if watchdog is None else watchdog.watch_launch
    with own_settings():
        _prepare(hosts, engine, model, largest, free, facts=facts)
    gate = Gate(hosts)
    stream = _stream(engine, model, requests, around_launch, find_stop, gate, between_launches)
    while True:
        with (
            own_settings(),  # not around the yield: between two batches the caller has its own
            hosts.scope("batch") as scope,
            scope.launch_on_all("generate", engine.ledger) as generated,
        ):
            completions = take_batch(stream, batch, on_answered)
            if gate.preempted:  # unfinished answers would count as answers
                raise HostError("the job is asked to end. Start it again: what was answered is kept.")
            generated.agree({"tokens": digest(repr(completions))})
        if not completions:
            return
        yield completions


def take_batch(
    stream: Iterator[Sequence[Completion]], least: int, on_answered: OnAnswered | None = None
) -> list[Completion]:
    """The next completions of a stream, as few prompts as make ``least``; fewer at its end."""
    found: list[Completion] = []
    while len(found) < least and (answered := next(stream, None)) is not None:
        found += answered
        if on_answered is not None:
            on_answered(answered)
    return found


class PhaseClock:
    """Wall time by phase; a phase that comes twice is added up.

    Args:
        phases: Phases that are there from the beginning, with 0 seconds.
    """

    def __init__(self, phases: Iterable[str] = ()) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(phases, 0.0)
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        """Count the time since the last lap."""
        now = time.perf_counter()
        self.add(phase, now - self._last)
        self._last = now

    def add(self, phase: str, seconds: float) -> None:
        """Count seconds that were measured elsewhere."""
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds


class _Stream:
    """Batches of completions, and at the end the counts that an engine of lockstep returns."""

    def __init__(self, stream: Iterator[Sequence[Completion]]) -> None:
        self._stream: Any = stream
        self.counts: Counts | None = None

    def __iter__(self) -> Iterator[Sequence[Completion]]:
        self.counts = yield from self._stream


def _prepare(
    hosts: Hosts,
    engine: RolloutEngine,
    model: Any,
    largest: Sequence[Request],
    free: int,
    auditor: Auditor | None = None,
    facts: Mapping[str, str] | None = None,
) -> bool:
    """Compile and agree on the programs; whether the job is asked to end."""
    with hosts.run_on_all("prepare") as prepared:
        prepared.agree({**(facts or {}), **engine.prepare(model, largest, free=free)})
        if auditor is not None:
            prepared.agree(auditor.prepare(model, largest))
            auditor.check_memory(free)
        prepared.share(hosts.preemption.requested())
    return any(prepared.shared)


def _stream(
    engine: RolloutEngine,
    model: Any,
    requests: Iterable[Any],  # with None among them where there are arrivals, which our own engine alone reads
    around_launch: AroundLaunch,
    find_stop: FindStop | None,
    gate: Gate,
    between_launches: BetweenLaunches | None,
) -> Iterator[Sequence[Completion]]:
    # An engine of somebody else's need not know the argument.
    options: dict[str, Any] = {} if between_launches is None else {"between_launches": between_launches}
    return engine.stream(model, requests, around_launch=around_launch, find_stop=find_stop, gate=gate, **options)


def _cancelled(requests: Sequence[Request]) -> list[Completion]:
    """Completions of requests that were never begun."""
    return [
        Completion(
            prompt_id=request.prompt_id,
            generation_id=generation,
            tokens=(),
            logprobs=(),
            finish_reason=FinishReason.CANCELLED,
        )
        for request in requests
        for generation in range(request.params.n_generations)
    ]
