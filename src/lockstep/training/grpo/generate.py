"""One generation of a rollout: every host makes the same launches or none; answers leave as they are complete."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

from lockstep.device import used_bytes
from lockstep.engine import Engine, Gate
from lockstep.hosts import Hosts, Watchdog, digest, environment
from lockstep.schedule import DraftCounts, FindStop, Scheduler
from lockstep.training.grpo.rollout_engine import RolloutEngine
from lockstep.types import Completion, Request


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generated:
    """What a generation produced; the same on every host but for time and memory.

    Args:
        completions: The answers in the order of the requests, then of the generations.
        seconds: The seconds of generating, compiling included.
        before: The most bytes in use on a device of this host before; None where the backend does not count them.
        after: The most bytes in use on a device of this host after.
        drafts: What drafts saved; None where there are none, or the engine is not lockstep's.
    """

    completions: list[Completion]
    seconds: float
    before: int | None
    after: int | None
    drafts: DraftCounts | None = None


def generate(
    hosts: Hosts,
    engine: RolloutEngine,
    model: Any,
    requests: Sequence[Request],
    largest: Sequence[Request],
    *,
    watchdog: Watchdog,
    find_stop: FindStop | None = None,
    each: Callable[[Completion], None] = lambda completion: None,
) -> Generated | None:
    """Agree, prepare, generate, agree.

    Args:
        hosts: The processes, inside a scope of this generation's own.
        engine: The engine.
        model: The model of this step, read once (`lockstep.models.read_decoder`).
        requests: The requests, the same on every host.
        largest: As many requests as in any generation, and as long: programs are made for these.
        watchdog: The watchdog of device calls.
        find_stop: What finds stop strings.
        each: Called on this host with each answer as soon as all answers to its prompt are complete; it launches
            nothing. What it raises is raised on every host.

    Returns:
        None where the job is asked to end: generation was aborted between the same two launches on every host.

    Raises:
        PeerError: A phase failed on at least one host; raised on every host.
        DisagreementError: The hosts differ; raised on every host.
        LaunchMismatchError: The hosts launched different programs; raised on every host.
        HostTimeoutError: A host is missing.
    """
    start = time.perf_counter()
    with hosts.run_on_all("measure memory") as measured:
        measured.agree({**environment(), "debug": str(hosts.debug), "requests": digest(repr(requests))})
        with watchdog.watch("waiting for the train step"):
            measured.share([engine.free_bytes(model), hosts.preemption.requested()])
        before = used_bytes()
    if any(ending for _, ending in measured.shared):
        return None
    free = min(free for free, _ in measured.shared)
    with hosts.run_on_all("prepare") as prepared:
        prepared.agree(engine.prepare(model, largest, free=free))

    gate = Gate(hosts)
    found: dict[int, list[Completion]] = {}
    schedulers: list[Scheduler] = []
    # An engine of somebody else's need not know the argument.
    drafted = isinstance(engine, Engine) and any(request.drafts is not None for request in requests)
    options: dict[str, Any] = {"between_launches": schedulers.append} if drafted else {}
    with hosts.launch_on_all("generate", engine.ledger) as generated:
        stream = engine.stream(
            model, requests, around_launch=watchdog.watch_launch, find_stop=find_stop, gate=gate, **options
        )
        error: Exception | None = None
        for answered in stream:
            for completion in answered:
                found.setdefault(completion.prompt_id, []).append(completion)
                try:
                    each(completion)
                except Exception as caught:  # raised once all launches are made: no host may leave them alone
                    error = error or caught
        if error is not None:
            raise error
        completions = [completion for request in requests for completion in found.get(request.prompt_id, [])]
        generated.agree({"tokens": digest(repr(completions))})
    if gate.preempted:
        return None
    return Generated(
        completions=completions,
        seconds=time.perf_counter() - start,
        before=before,
        after=used_bytes(),
        drafts=schedulers[-1].counts.of_drafts if schedulers else None,
    )
