"""The round of tasks between threads, with a made-up engine: who asks, who answers, and how it ends everywhere."""

import threading

import pytest

from lockstep.callback.evaluation import round as tasks_round
from lockstep.callback.evaluation.harness import HarnessThread
from lockstep.callback.evaluation.round import run_tasks
from lockstep.engine import Session
from lockstep.errors import PeerError
from lockstep.hosts import Hosts, Ledger
from lockstep.placement import make_mesh
from lockstep.types import Completion, FinishReason
from tests import tiny
from tests.multiprocess.harness import run_threads

REQUESTS = tiny.requests(lengths=(3, 5))
OVER = threading.Event()
"""Set when a host's round is over."""
MODEL = (tiny.CONFIG, tiny.placed_weights(make_mesh("auto")))


class Engine:
    """Notes the requests; answers with their first token."""

    def __init__(self, finish=FinishReason.LENGTH, fails_on=None):
        self.asked, self.finish, self.fails_on = [], finish, fails_on
        self.index, self.ledger = 0, Ledger()

    def free_bytes(self, model):
        return 1

    def check(self, model, requests):
        raise AssertionError("a round of tasks is checked by its first question")

    def prepare(self, model, requests, *, free):
        self.asked.append(list(requests))
        if self.index == self.fails_on:
            raise MemoryError("no room for a batch")
        return {}

    def stream(self, model, requests, *, find_stop, gate):
        gate(None)
        yield [
            Completion(
                prompt_id=each.prompt_id,
                generation_id=0,
                tokens=each.prompt_tokens[:1],
                logprobs=(-1.0,),
                finish_reason=self.finish,
            )
            for each in requests
        ]


def both(ask):
    return [ask(REQUESTS[:1], False), ask(REQUESTS, True)]


def body(hosts, work, made, max_seconds=30.0, late=None):
    """What a host came to: the outcome, what its engine was asked, what the harness found."""
    engine, found, started = made(), [], []
    engine.index = hosts.index

    def harness(model):
        assert hosts.is_leader and model == MODEL
        started.append(HarnessThread(work, lambda *each: found.append(each)))
        return started[0]

    outcome = None
    try:
        with hosts.scope("tasks") as scope:
            outcome = run_tasks(
                scope,
                facts={"step": "3" if late is None else str(hosts.index)},
                session=Session(engine),
                model=MODEL,
                harness=harness,
                max_seconds=max_seconds,
            )
    except Exception as error:
        outcome = f"{type(error).__name__}: {error}"
    OVER.set()
    for thread in started:
        assert thread.wait(60), "the harness has ended, too"
    hosts.barrier("ended")
    return outcome, engine.asked, found


def test_every_host_answers_what_the_leaders_harness_asks_in_its_order():
    results = run_threads(body, 3, both, Engine)
    for outcome, asked, _ in results:
        assert outcome is True and asked == [REQUESTS[:1], REQUESTS]
    ((answers, error),) = results[0][2]
    assert error is None and [[each.prompt_id for each in one] for one in answers] == [[0], [0, 1]]
    assert [found for _, _, found in results[1:]] == [[], []]


def test_a_harness_that_takes_its_time_keeps_the_others_informed(monkeypatch):
    monkeypatch.setattr(tasks_round, "TICK_S", 0.01)
    informed = threading.Event()
    broadcast = Hosts.broadcast_from_leader

    def noted(hosts, name, work):
        message = broadcast(hosts, name, work)
        if name == "question 3" and not hosts.is_leader:
            informed.set()
        return message

    monkeypatch.setattr(Hosts, "broadcast_from_leader", noted)

    def slow(ask):
        assert informed.wait(60), "nobody was told that there is no question yet"
        return both(ask)

    results = run_threads(body, 2, slow, Engine)
    assert [(outcome, asked) for outcome, asked, _ in results] == [(True, [REQUESTS[:1], REQUESTS])] * 2


def raises(ask):
    ask(REQUESTS[:1], False)
    raise KeyError("no such field")


@pytest.mark.parametrize(
    ("work", "made", "max_seconds", "text"),
    [
        (raises, Engine, 30.0, "PeerError: 1 of 2 processes failed at 'tasks#1/question 1'. process 0: KeyError"),
        (lambda ask: OVER.wait(60), Engine, 0.05, "has lasted 0.05 s (tasks.max_seconds) and the harness"),
        (both, lambda: Engine(FinishReason.BUDGET), 30.0, "has lasted 30 s (tasks.max_seconds) and not all requests"),
        (both, lambda: Engine(fails_on=1), 30.0, "process 1: MemoryError: no room for a batch"),
    ],
)
def test_what_fails_on_one_host_gives_the_round_up_on_all(work, made, max_seconds, text):
    OVER.clear()
    results = run_threads(body, 2, work, made, max_seconds)
    (outcome,) = {outcome for outcome, _, _ in results}
    assert outcome.startswith(PeerError.__name__) and text in outcome
    assert [found for _, _, found in results] == [[], []], "nothing is scored"


def test_hosts_that_are_at_different_steps_ask_nothing():
    results = run_threads(body, 2, both, Engine, 30.0, True)
    assert all("disagree" in outcome and asked == [] for outcome, asked, _ in results)


@pytest.mark.parametrize("index", [0, 1])
def test_a_job_that_is_asked_to_end_ends_the_round_on_all_hosts(index):
    def signalled(hosts):
        if hosts.index == index:
            hosts.preemption.note(15)
        return body(hosts, both, Engine)

    assert [(outcome, asked) for outcome, asked, _ in run_threads(signalled, 2)] == [(False, [])] * 2
