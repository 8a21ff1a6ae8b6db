"""Requests that arrive on one host while all generate: every host schedules the same next request."""

import dataclasses
import json
import time
from typing import Any

from lockstep.engine import Arrivals, Session
from lockstep.engine.schedule import Scheduler
from lockstep.errors import PeerError
from lockstep.hosts import Ledger
from tests.multiprocess.harness import run_threads
from tests.unit.engine.schedule.fake_device import FakeDevice, answer_alone
from tests.unit.engine.schedule.test_scheduler import capacity_of, request
from tests.unit.engine.test_session import MODEL

TURNS, CONVERSATIONS = 3, 4


class Engine:
    """A scheduler on a fake device, behind the gate."""

    def __init__(self) -> None:
        self.ledger, self.launches = Ledger(), list[str]()

    def free_bytes(self, model: Any) -> int:
        return 8

    def check(self, model: Any, requests: Any) -> None:
        raise AssertionError("a generation is checked as it is prepared")

    def prepare(self, model: Any, requests: Any, *, free: int) -> dict[str, str]:
        return {"decode": "digest"}

    def stream(self, model: Any, requests: Any, *, find_stop: Any, gate: Any) -> Any:
        scheduler = Scheduler(capacity_of(pages=40, pages_per_sequence=20), iter(requests))
        device = FakeDevice(scheduler.capacity)
        while True:
            gate.observer.between_launches(scheduler)
            batch = scheduler.next_batch()
            if gate(None, done=scheduler.done, idle=batch is None) is not None:
                return scheduler.counts
            yield scheduler.take_answered()
            if batch is not None:
                self.ledger.record(type(batch).__name__, "digest")
                device.launch(scheduler, batch)
            elif scheduler.done:
                return scheduler.counts


class Echo(Arrivals):
    """Conversations whose environment says the last token again, as late as its host pleases."""

    def __init__(self, hosts: Any, slow: int, fails: int | None = None) -> None:
        self.index, self.count, self.slow, self.fails = hosts.index, hosts.count, slow, fails
        self.requests: list[Any] = []
        self.said: list[tuple[float, list[int]]] = []
        self.asked, self.ended, self.asked_in_order = [0] * CONVERSATIONS, 0, list[int]()
        self.forgotten: list[int] = []
        self.tokens: dict[int, tuple[int, ...]] = {}
        for number in range(CONVERSATIONS):
            self.ask(number, (number, 1, 2))

    def ask(self, number: int, tokens: tuple[int, ...]) -> None:
        one = request(self.asked[number] * CONVERSATIONS + number, tokens, 4)
        self.tokens[number] = tokens
        self.requests.append(dataclasses.replace(one, conversation=number))
        self.asked_in_order.append(one.prompt_id)
        self.asked[number] += 1

    def __iter__(self) -> Any:
        while self.ended < CONVERSATIONS:
            yield self.requests.pop(0) if self.requests else None

    def take(self, wait_s: float) -> str:
        if self.fails == self.index and self.asked[0] > 1:
            raise KeyError("no such thing")
        time.sleep(wait_s)
        due = [words for at, words in self.said if at <= time.monotonic()]
        self.said = [pair for pair in self.said if pair[0] > time.monotonic()]
        return json.dumps(due) if due else ""

    def hear(self, texts: Any) -> None:
        for number, tokens in (words for text in texts if text for words in json.loads(text)):
            self.ask(number, tuple(tokens))

    def answered(self, completions: Any) -> None:
        for completion in completions:
            number = completion.prompt_id % CONVERSATIONS
            if self.asked[number] == TURNS:
                self.ended += 1
                self.forgotten.append(number)
            elif number % self.count == self.index:
                tokens = [*self.tokens[number], *completion.tokens, completion.tokens[-1]]
                self.said.append((time.monotonic() + 0.01 * self.slow * (number % 3), [number, tokens]))

    def between_launches(self, scheduler: Scheduler) -> None:
        while self.forgotten:
            scheduler.forget(self.forgotten.pop())


def body(hosts: Any, slow: dict[int, int], fails: int | None = None) -> Any:
    echo, engine = Echo(hosts, slow[hosts.index], fails), Engine()
    try:
        with hosts.scope("round") as scope:
            found = Session(engine).generate(scope, MODEL, largest=[request(0, 9, 9)], observer=echo)
    except PeerError as error:
        found = str(error)
    hosts.barrier("ended")
    return found, engine.ledger.launches, echo.asked_in_order


def test_every_host_schedules_what_arrives_on_one() -> None:
    answers = []
    for slow in ({0: 0, 1: 0}, {0: 0, 1: 4}, {0: 7, 1: 1}):
        (first, launches, asked), (second, others, asked_there) = run_threads(body, 2, slow)
        assert first.completions == second.completions and launches == others and asked == asked_there
        assert [each.prompt_id for each in first.completions] == list(range(TURNS * CONVERSATIONS))
        assert first.counts.prefilled_again == 0 and first.counts.prefilled > 0
        assert 0 <= first.seconds["arrivals"] <= first.seconds["generate"]
        answers.append({each.prompt_id: each.tokens for each in first.completions})
    assert answers[0] == answers[1] == answers[2], "tokens depend on when replies come"
    for number in range(CONVERSATIONS):
        assert answers[0][number] == answer_alone(request(number, (number, 1, 2), 4), 0)[0]


def test_what_fails_on_one_host_is_raised_on_all() -> None:
    for found, _, _ in run_threads(body, 2, {0: 0, 1: 0}, 1):
        assert "process 1: KeyError: 'no such thing'" in found
