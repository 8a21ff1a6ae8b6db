"""A round of tasks on all hosts: the leader's harness asks, every host answers in lockstep (docs/adr/0025-tasks.md)."""

import dataclasses
import json
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from lockstep.callback.evaluation.harness_thread import HarnessThread
from lockstep.engine import Gate, RolloutEngine, generate_on_all
from lockstep.engine.schedule import FindStop
from lockstep.errors import LockstepError, PeerError
from lockstep.hosts import Hosts, Watchdog, environment
from lockstep.json_text import from_peer
from lockstep.types import FinishReason, Request

TICK_S = 2.0
"""Seconds after which the leader lets the other hosts know that the harness still works on its next question."""


def run_tasks(
    hosts: Hosts,
    *,
    facts: Mapping[str, str],
    engine: Callable[[], tuple[RolloutEngine, Any]],
    harness: Callable[[Any], HarnessThread[Any]],
    find_stop: FindStop,
    max_seconds: float,
    watchdog: Watchdog | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> bool:
    """Answer what the harness asks until it has no more questions; every host makes the same steps or none.

    The scores are computed in the harness's thread after the hosts have gone on.

    Args:
        hosts: The processes, inside a scope of this round's own; its ``timeout_s`` bounds every wait and device call.
        facts: What must be the same on every host before anything else happens (step, configuration).
        engine: A function that gives the engine and the model, read once for the round; called on every host, launches
            nothing.
        harness: A function of the model that starts the harness; called on the leader alone.
        find_stop: What finds stop strings.
        max_seconds: The seconds that the round may last, by the leader's clock. A launch is never interrupted.
        watchdog: The watchdog of device calls; None for one of its own.
        clock: Gives seconds; read on the leader alone.

    Returns:
        False where the job is asked to end: the round was aborted at the same place on every host.

    Raises:
        PeerError: A phase failed on at least one host, or the time was over; raised on every host.
        DisagreementError: The hosts differ; raised on every host.
        LaunchMismatchError: The hosts launched different programs; raised on every host.
        HostTimeoutError: A host is missing.
    """
    watchdog = Watchdog(hosts, hosts.timeout_s) if watchdog is None else watchdog
    end = clock() + max_seconds
    thread: HarnessThread[Any] | None = None

    def next_message() -> bytes:
        """What the leader says to all: a question, or that there is none yet."""
        assert thread is not None
        left_s = end - clock()
        question = thread.next_question(max(0.0, min(left_s, TICK_S, hosts.timeout_s / 4)))
        if question is None and left_s <= 0:
            raise LockstepError(_too_slow(max_seconds, "the harness has not asked its next question"))
        requests = question and [dataclasses.asdict(each) for each in question.requests]
        return json.dumps(question and [requests, question.last]).encode()

    try:
        with hosts.run_on_all("begin tasks") as begun:
            begun.agree({**facts, **environment()})
            ready, model = engine()
            if hosts.is_leader:
                thread = harness(model)
        number, last = 0, False
        while not last:
            if hosts.reasons_to_stop("task questions", None, _reason(hosts)):
                return False
            data = hosts.broadcast_from_leader(f"question {number}", next_message)
            number += 1
            if data == b"null":
                continue
            requests, last = from_peer(data, tuple[list[Request], bool], "the leader's question")
            left_s = max(0.0, end - clock())
            gate = Gate(hosts, left_s if math.isfinite(left_s) else None, clock)
            with hosts.scope("generate") as scope:
                generation = generate_on_all(
                    scope,
                    lambda: (ready, model, None),
                    requests,
                    find_stop=find_stop,
                    gate=gate,
                    watchdog=watchdog,
                )
            completions = generation.completions
            if generation.ended:
                return False
            if any(each.finish_reason == FinishReason.BUDGET for each in completions):
                raise PeerError(_too_slow(max_seconds, "not all requests are answered"), hosts.count)
            if last:
                hosts.barrier("tasks end")
            if thread is not None:
                thread.answer(completions)
        thread = None
        return True
    finally:
        if thread is not None:
            thread.give_up()
        hosts.phase("training")


def _reason(hosts: Hosts) -> str | None:
    return "the job is asked to end" if hosts.preemption.requested() else None


def _too_slow(max_seconds: float, what: str) -> str:
    return (
        f"the round of tasks has lasted {max_seconds:g} s (tasks.max_seconds) and {what}. Raise tasks.max_seconds, or "
        "lower tasks.limit."
    )
