"""The one door to generation: measure, prepare, agree, gated launches, agree on the tokens; on all hosts or on none.

Callback, rollouts, sampler, tasks, Tunix and `Engine.generate` all generate through a `Session` (docs/protocol.md).
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

from lockstep.engine.arrivals import ArrivalGate, Arrivals
from lockstep.engine.audit import Auditor, AuditResult
from lockstep.engine.launches import Gate, Observer
from lockstep.engine.rollout_engine import RolloutEngine
from lockstep.engine.schedule import Counts, DraftCounts, FindStop, digest_parts
from lockstep.errors import HostError
from lockstep.hosts import Hosts, Watchdog, digest
from lockstep.models import read_decoder
from lockstep.placement import mesh_of
from lockstep.placement.device import own_settings, used_bytes
from lockstep.types import Completion, FinishReason, Request


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


class Session:
    """Generates on all hosts or on none, round after round; every host makes the same calls.

    Between two calls compiled programs are kept, and nothing else on the devices. A ``model`` is what
    `lockstep.models.read_decoder` reads or returned: always the newest. The ``hosts`` of a call are inside a scope of
    its own, and their ``timeout_s`` bounds every wait.

    Args:
        engine: The engine; or what makes one from the mesh of a model and a ledger, such as
            ``functools.partial(Engine, config)``: it is made when the first model is read, and again when that is on
            another mesh.
        find_stop: Finds stop strings, such as ``lockstep.StopFinder(tokenizer)``; None where no request has any.
        watchdog: What ends the process when a device call outlives its time; None for nothing.

    Example:
        >>> session = lockstep.engine.Session(lockstep.Engine(lockstep.EngineConfig(), mesh))
        >>> asked = lockstep.Request(prompt_id=0, prompt_tokens=(1,), params=lockstep.SamplingParams(max_new_tokens=4))
        >>> with hosts.scope("my prompts") as scope:
        ...     generation = session.generate(scope, model, [asked])
        >>> len(generation.completions[0].tokens)
        4
    """

    def __init__(
        self,
        engine: RolloutEngine | Callable[..., RolloutEngine],
        *,
        find_stop: FindStop | None = None,
        watchdog: Watchdog | None = None,
    ) -> None:
        self._make = engine if callable(engine) else None
        self.engine: Any = None if callable(engine) else engine
        """The engine; None before the first model where none was given."""
        self.find_stop, self.watchdog = find_stop, watchdog

    def read(self, hosts: Hosts, model: Any) -> Any:
        """Return what `lockstep.models.read_decoder` returns of a model, with an engine for its mesh; launches nothing.

        Raises:
            UnreadableModelError: See `lockstep.models.read_decoder`.
            ConfigError: The engine's layout does not fit the mesh.
        """
        read = read_decoder(model)
        mesh = mesh_of(read[1].embed)
        if self._make is not None and (self.engine is None or self.engine.mesh != mesh):
            self.engine = self._make(mesh, ledger=hosts.ledger)
        return read

    def auditor(self) -> Auditor | None:
        """Return what recomputes the log-probabilities of the engine of the last `read`; None for no audit."""
        return None

    def check(self, hosts: Hosts, model: Any, largest: Sequence[Request]) -> None:
        """Refuse what can never work; launches nothing.

        Args:
            largest: As many requests as in any generation, and as long.

        Raises:
            LockstepError: It cannot work.
        """
        read = self.read(hosts, model)
        self.engine.check(read, largest)

    def measure(self, hosts: Hosts, model: Any, facts: Mapping[str, str]) -> tuple[Any, int, bool]:
        """Read the model, and learn how much memory there is once a train step that still runs has ended.

        Args:
            facts: What must be the same on every host.

        Returns:
            The model as it was read; bytes on the device with the least free memory of all hosts; whether the job is
            asked to end.

        Raises:
            PeerError, DisagreementError, HostTimeoutError: See `generate`.
        """
        with hosts.run_on_all("measure memory") as measured:
            measured.agree(facts)
            read = self.read(hosts, model)
            # What a train step holds is free only afterwards.
            with self.watchdog.watch("waiting for the train step") if self.watchdog else contextlib.nullcontext():
                measured.share((self.engine.free_bytes(read), hosts.preemption.requested()))
        return read, min(free for free, _ in measured.shared), any(ending for _, ending in measured.shared)

    def prepare(
        self, hosts: Hosts, read: Any, largest: Sequence[Request], free: int, facts: Mapping[str, str] | None = None
    ) -> bool:
        """Compile and agree on the programs, those of an audit too; return whether the job is asked to end.

        Args:
            read: The model as it was read.
            largest: As many requests as in any generation, and as long.
            free: Bytes on the device with the least free memory of all hosts, agreed on.

        Raises:
            PeerError, DisagreementError, HostTimeoutError: See `generate`.
        """
        with hosts.run_on_all("prepare") as prepared:
            prepared.agree({**(facts or {}), **self.engine.prepare(read, largest, free=free)})
            if (auditor := self.auditor()) is not None:
                prepared.agree(auditor.prepare(read, largest))
                auditor.check_memory(free)
            prepared.share(hosts.preemption.requested())
        return any(prepared.shared)

    @own_settings()
    def generate(
        self,
        hosts: Hosts,
        model: Any,
        requests: Sequence[Request] = (),
        *,
        largest: Sequence[Request] | None = None,
        facts: Mapping[str, str] | None = None,
        max_seconds: float | None = None,
        gate: Gate | None = None,
        observer: Observer | None = None,
    ) -> Generation:
        """Complete requests; every host makes the same steps or none.

        Args:
            requests: The same on every host; may be none.
            largest: As many requests as in any generation, and as long: programs are made for these. None: the
                requests.
            facts: What must be the same on every host, beside requests and programs.
            max_seconds: The seconds that launches may take; compiling does not count. None for no limit.
            gate: What holds every host before each launch; None for one with ``max_seconds`` and ``observer``.
            observer: What this host does meanwhile; an error of its ``answered`` is raised on every host after the last
                launch. `Arrivals` have the requests too: then there are no ``requests``, ``largest`` is needed, and
                completions come in the order of their prompts' numbers.

        Raises:
            PeerError: A phase failed on at least one host; raised on every host.
            DisagreementError: The hosts differ; raised on every host.
            LaunchMismatchError: The hosts launched different programs; raised on every host.
            HostTimeoutError: A host is missing.
        """
        clock, arrivals = PhaseClock(), observer if isinstance(observer, Arrivals) else None
        read, free, ended = self.measure(hosts, model, {**(facts or {}), "requests": digest(repr(list(requests)))})
        memory, asked = {"before": used_bytes()}, bool(requests) or arrivals is not None
        if asked and not ended:
            ended = self.prepare(hosts, read, requests if largest is None else largest, free)
        clock.lap("prepare")
        if ended or not asked:
            return Generation(completions=_cancelled(requests), ended=ended, seconds=clock.seconds)

        if arrivals is not None:
            gate = ArrivalGate(hosts, arrivals, max_seconds, self.watchdog)
        elif gate is None:
            gate = Gate(hosts, max_seconds, watchdog=self.watchdog, observer=observer)
        completions, counts = self._launch(hosts, read, requests if arrivals is None else arrivals, gate)
        clock.lap("generate")
        if isinstance(gate, ArrivalGate):
            clock.add("arrivals", gate.idle_s)

        audit, auditor = None, self.auditor()
        if auditor is not None and not gate.preempted:
            with hosts.launch_on_all("audit", auditor.ledger) as audited:
                audit = auditor.run(read, requests, completions, around_launch=gate.launch, hosts=hosts)
                audited.agree({"audit": repr(audit)})
            clock.lap("audit")
        memory["after"] = used_bytes()
        drafted = any(request.drafts is not None for request in requests)
        return Generation(
            completions=completions,
            ended=gate.preempted,
            seconds=clock.seconds,
            memory={moment: used for moment, used in memory.items() if used is not None},
            drafts=counts.of_drafts if counts is not None and drafted else None,
            counts=counts,
            audit=audit,
        )

    def stream(
        self,
        hosts: Hosts | None,
        model: Any,
        requests: Iterable[Request | None],
        *,
        largest: Sequence[Request],
        batch: int,
        free: int | None = None,
        facts: Mapping[str, str] | None = None,
        observer: Observer | None = None,
    ) -> Generator[list[Completion], None, None]:
        """`generate` for any number of requests: hosts agree on the tokens of a batch before it is yielded.

        Every host takes the same steps; between two of them it may do what a host can do alone, but launch nothing.

        Args:
            hosts: None where this host generates by itself on devices of its own, and agrees with nobody.
            requests: Read one by one as room becomes free, the same on every host.
            largest: Requests that need as much as any of ``requests``.
            batch: The number of completions to agree on at a time, at least.
            free: Bytes on the device with the least free memory of all hosts, as `measure` returned them; None:
                measured now.
            observer: What this host does meanwhile; its ``answered`` has completions that are not agreed on, and must
                not raise.

        Yields:
            Completions, all of a prompt at a time, in batches; none is empty.

        Raises:
            PeerError, DisagreementError, LaunchMismatchError, HostTimeoutError: See `generate`.
        """
        with own_settings():
            if hosts is None:
                self.engine.prepare(model, largest, free=free)
            else:
                if free is None:
                    model, free, _ = self.measure(hosts, model, {})
                self.prepare(hosts, model, largest, free, facts)
        gate = Gate(hosts, watchdog=self.watchdog, observer=observer)
        answers = self.engine.stream(model, requests, find_stop=self.find_stop, gate=gate)
        while completions := self._next_batch(hosts, answers, batch, gate):
            yield completions

    def _launch(
        self, hosts: Hosts, read: Any, requests: Sequence[Request] | Arrivals, gate: Gate
    ) -> tuple[list[Completion], Counts | None]:
        """Make all launches, and agree on the tokens."""
        error: Exception | None = None
        answers: dict[int, list[Completion]] = {}
        with hosts.launch_on_all("generate", self.engine.ledger) as generated:
            stream = _Stream(self.engine.stream(read, requests, find_stop=self.find_stop, gate=gate))
            for answered in stream:
                for completion in answered:
                    answers.setdefault(completion.prompt_id, []).append(completion)
                try:
                    gate.observer.answered(answered)
                except Exception as caught:  # raised once all launches are made: no host may leave them alone
                    error = error or caught
            if error is not None:
                raise error
            order = sorted(answers) if isinstance(requests, Arrivals) else [request.prompt_id for request in requests]
            completions = [completion for number in order for completion in answers.get(number, [])]
            generated.agree({"tokens": digest(*digest_parts(completions))})
        return completions, stream.counts

    def _next_batch(
        self, hosts: Hosts | None, answers: Iterator[Sequence[Completion]], size: int, gate: Gate
    ) -> list[Completion]:
        """The next completions, as few prompts as make ``size``, agreed on; fewer at the end."""
        if hosts is None:
            return _take(answers, size, gate.observer)
        with (
            own_settings(),  # not around the yield: between two batches the caller has its own
            hosts.scope("batch") as scope,
            scope.launch_on_all("generate", self.engine.ledger) as generated,
        ):
            completions = _take(answers, size, gate.observer)
            if gate.preempted:  # unfinished answers would count as answers
                raise HostError("the job is asked to end. Start it again: what was answered is kept.")
            generated.agree({"tokens": digest(*digest_parts(completions))})
        return completions


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


def _take(answers: Iterator[Sequence[Completion]], least: int, observer: Observer) -> list[Completion]:
    """The next completions, as few prompts as make ``least``; fewer at the end."""
    completions: list[Completion] = []
    while len(completions) < least and (answered := next(answers, None)) is not None:
        completions += answered
        observer.answered(answered)
    return completions


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
