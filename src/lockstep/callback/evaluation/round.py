"""Rounds of tasks on all hosts: the leader's harness asks, every host answers in lockstep (docs/adr/0025-tasks.md)."""

import dataclasses
import json
import math
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from lockstep.callback.evaluation.config import TasksConfig
from lockstep.callback.evaluation.harness import Harness, HarnessThread
from lockstep.callback.evaluation.model_session import ModelSession, limits_of
from lockstep.callback.evaluation.scoring import TaskResults
from lockstep.engine import Engine, EngineConfig, Gate, Session
from lockstep.engine.sampling.filters import check_filters_of
from lockstep.errors import DisagreementError, LockstepError, PeerError
from lockstep.hosts import Hosts, JobHosts, digest, environment
from lockstep.json_text import from_peer
from lockstep.models import DecoderWeights, LlamaConfig
from lockstep.printable import get_logger
from lockstep.text import tokenizer_digest
from lockstep.types import FinishReason, Request

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TICK_S = 2.0
"""Seconds after which the leader lets the other hosts know that the harness still works on its next question."""


def run_tasks(
    hosts: Hosts,
    *,
    facts: Mapping[str, str],
    session: Session,
    model: Any,
    harness: Callable[[Any], HarnessThread[Any]],
    max_seconds: float,
    clock: Callable[[], float] = time.monotonic,
) -> bool:
    """Answer what the harness asks until it has no more questions; every host makes the same steps or none.

    The scores are computed in the harness's thread after the hosts have gone on.

    Args:
        hosts: The processes, inside a scope of this round's own; its ``timeout_s`` bounds every wait and device call.
        facts: What must be the same on every host before anything else happens (step, configuration).
        model: The model, which is read once for the round.
        harness: A function of the model as it was read that starts the harness; called on the leader alone.
        max_seconds: The seconds that the round may last, by the leader's clock. A launch is never interrupted.

    Returns:
        False where the job is asked to end: the round was aborted at the same place on every host.

    Raises:
        PeerError: A phase failed on at least one host, or the time was over; raised on every host.
        DisagreementError: The hosts differ; raised on every host.
        LaunchMismatchError: The hosts launched different programs; raised on every host.
        HostTimeoutError: A host is missing.
    """
    end = clock() + max_seconds
    thread: HarnessThread[Any] | None = None

    def next_message() -> bytes:
        """The leader's message to all: a question, or null where there is none yet."""
        assert thread is not None
        left_s = end - clock()
        question = thread.next_question(max(0.0, min(left_s, TICK_S, hosts.timeout_s / 4)))
        if question is None and left_s <= 0:
            raise LockstepError(_too_slow(max_seconds, "the harness has not asked its next question"))
        requests = question and [dataclasses.asdict(item) for item in question.requests]
        return json.dumps(question and [requests, question.last]).encode()

    try:
        with hosts.run_on_all("begin tasks") as begun:
            begun.agree({**facts, **environment()})
            model = session.read(hosts, model)
            if hosts.is_leader:
                thread = harness(model)
        number, last = 0, False
        while not last:
            reason = "the job is asked to end" if hosts.preemption.requested() else None
            if hosts.reasons_to_stop("task questions", None, reason):
                return False
            data = hosts.broadcast_from_leader(f"question {number}", next_message)
            number += 1
            if data == b"null":
                continue
            requests, last = from_peer(data, tuple[list[Request], bool], "the leader's question")
            check_filters_of("the leader's question", [request.params for request in requests], ())  # a task has none
            left_s = max(0.0, end - clock())
            gate = Gate(hosts, left_s if math.isfinite(left_s) else None, clock, watchdog=session.watchdog)
            with hosts.scope("generate") as scope:
                generation = session.generate(scope, model, requests, gate=gate)
            completions = generation.completions
            if generation.ended:
                return False
            if any(item.finish_reason == FinishReason.BUDGET for item in completions):
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


def _too_slow(max_seconds: float, state: str) -> str:
    return (
        f"the round of tasks has lasted {max_seconds:g} s (tasks.max_seconds) and {state}. Raise tasks.max_seconds, or "
        "lower tasks.limit."
    )


log = get_logger(__name__)

type OnResults = Callable[[int, TaskResults | Exception], object]
"""Takes what a round found after a step, or what failed after the hosts had gone on; called in the harness's thread."""


class TaskRounds:
    """Runs the tasks of a configuration on all hosts, again and again; every host makes the same calls.

    It has an engine of its own, so that rounds of samples have the programs and the capacities that they have without
    tasks. Between rounds it keeps compiled programs and nothing else on the devices.

    Args:
        max_seconds: The seconds that a round may last where the configuration does not say.
    """

    def __init__(
        self,
        name: str,
        config: TasksConfig,
        engine: EngineConfig,
        tokenizer: "PreTrainedTokenizerBase",
        on_results: OnResults,
        job_hosts: JobHosts,
        timeout_s: float,
        max_seconds: float = math.inf,
    ) -> None:
        self.config = config
        self.max_seconds = max_seconds if config.max_seconds is None else config.max_seconds
        """The seconds that a round may last."""
        self.rounds = 0  # rounds whose requests were all answered
        self.skipped_rounds = 0  # rounds that failed, or ran out of time, and were given up on every host
        self._name, self._on_results = name, on_results
        self._job_hosts, self._timeout_s = job_hosts, timeout_s
        self._harness = Harness(config, tokenizer)
        self._thread: HarnessThread[TaskResults] | None = None
        self._session = ModelSession(engine, tokenizer)
        self._facts = {
            "tasks": digest(json.dumps([dataclasses.asdict(config), dataclasses.asdict(engine)], sort_keys=True)),
            "tokenizer": tokenizer_digest(tokenizer),
        }

    @property
    def engine(self) -> Engine | None:
        """The engine, or None before the first round."""
        return self._session.engine

    def check(self) -> None:
        """Find out what would make every round fail; called on the leader alone."""
        self._harness.check()

    def run(self, step: int, model: Any) -> bool:
        """Run the tasks after a step.

        Args:
            model: What `lockstep.models.read_decoder` reads; it is not kept.

        Returns:
            False where the job is asked to end, and the round was aborted on every host.

        Raises:
            PeerError, DisagreementError: The round failed; the same on every host.
            LaunchMismatchError: Hosts launched different programs; the same on every host.
            HostTimeoutError: A host is missing.
        """
        try:
            with self._job_hosts().scope(f"{self._name}/tasks", self._timeout_s) as hosts:
                done = run_tasks(
                    hosts,
                    facts={"step": str(step), **self._facts},
                    session=self._session,
                    model=model,
                    harness=lambda read: self._start(step, read),
                    max_seconds=self.max_seconds,
                )
        except (PeerError, DisagreementError):
            self.skipped_rounds += 1
            raise
        self.rounds += done
        return done

    def wait(self, timeout_s: float) -> bool:
        """Wait until the last round is scored, on the leader alone; return whether it is."""
        return self._thread is None or self._thread.wait(timeout_s)

    def _start(self, step: int, read: tuple[LlamaConfig, DecoderWeights]) -> HarnessThread[TaskResults]:
        if self._thread is not None and self._thread.alive:
            raise LockstepError(
                "the harness still works on an earlier round: it scores slowly, or hangs. Run the tasks less often "
                "(inference_eval.tasks.every), or lower inference_eval.tasks.limit."
            )
        limits = limits_of(read)  # the thread keeps this alone, and no array

        def done(result: TaskResults | None, error: Exception | None) -> None:
            outcome = error if result is None else result
            assert outcome is not None
            self._on_results(step, outcome)

        self._thread = HarnessThread(lambda ask: self._harness.run(ask, step, limits), done)
        return self._thread
