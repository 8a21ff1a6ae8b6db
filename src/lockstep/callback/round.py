"""One round of sampling on all hosts: barrier, prompts from the leader, generation, barrier (docs/protocol.md)."""

import dataclasses
from collections.abc import Callable, Mapping

from lockstep.callback.round_prompts import RoundPrompts, from_bytes, to_bytes
from lockstep.engine import Generation, PhaseClock, Ready, generate_on_all
from lockstep.engine.schedule import FindStop
from lockstep.hosts import Hosts, Watchdog, environment
from lockstep.text import Prompt
from lockstep.types import Request


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundResult:
    """What was asked in a round, and the completions.

    Args:
        prompts: The prompts as the leader read them; None elsewhere.
        requests: The same on every host, drafts included.
        generation: The completions; its ``seconds`` have the phases of the round too.
    """

    prompts: list[Prompt] | None
    requests: list[Request]
    generation: Generation


def run_round(
    hosts: Hosts,
    *,
    facts: Mapping[str, str],
    read: Callable[[], RoundPrompts],
    ready: Ready,
    find_stop: FindStop | None = None,
    max_seconds: float | None = None,
    watchdog: Watchdog | None = None,
) -> RoundResult | None:
    """Barrier, broadcast, generation, barrier: every host makes the same steps or none.

    Args:
        hosts: Inside a scope of this round's own; its ``timeout_s`` bounds every wait.
        facts: What must be the same on every host before anything else happens (step, configuration, tokenizer).
        read: Reads the prompts; called on the leader alone.
        ready: Gives engine, model and auditor, see `generate_on_all`.
        find_stop: What finds stop strings.
        max_seconds: The seconds that generation may last; None for no limit.
        watchdog: The watchdog of device calls; None for none.

    Returns:
        None where the job is asked to end: the round was aborted between the same two launches on every host.

    Raises:
        PeerError, DisagreementError, LaunchMismatchError, HostTimeoutError: See `generate_on_all`.
    """
    clock = PhaseClock()
    prompts: list[Prompt] | None = None

    def read_on_leader() -> bytes:
        nonlocal prompts
        asked = read()
        prompts = asked.prompts
        return to_bytes(asked)

    with hosts.run_on_all("begin", "waiting for all hosts to begin") as begin:
        begin.agree({**facts, **environment(), "debug": str(hosts.debug)})
        begin.share(hosts.preemption.requested())
    clock.lap("barrier")
    if any(begin.shared):
        _end(hosts)
        return None

    hosts.phase("read prompts")
    asked = from_bytes(hosts.broadcast_from_leader("prompts", read_on_leader))
    clock.lap("prompts")

    generation = generate_on_all(
        hosts,
        ready,
        asked.requests,
        largest=asked.compile_requests,
        find_stop=find_stop,
        max_seconds=max_seconds,
        watchdog=watchdog,
    )
    clock.lap("generate")
    _end(hosts)
    clock.lap("barrier")
    if generation.ended:
        return None
    generation = dataclasses.replace(generation, seconds={**clock.seconds, **generation.seconds})
    return RoundResult(prompts=prompts, requests=asked.requests, generation=generation)


def _end(hosts: Hosts) -> None:
    """No host goes on to train while another still samples."""
    hosts.phase("training")
    hosts.barrier("end")
