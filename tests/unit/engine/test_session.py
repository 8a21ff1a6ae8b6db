"""The protocol of generation between threads, with a made-up engine: what each host does when one of them fails."""

import dataclasses

import jax
import pytest

from lockstep.engine import Observer, Session
from lockstep.engine.audit import Auditor, AuditResult
from lockstep.engine.schedule import Counts
from lockstep.errors import DisagreementError, PeerError
from lockstep.hosts import Ledger
from lockstep.placement import make_mesh
from lockstep.types import Completion, Drafts, FinishReason
from tests import tiny
from tests.multiprocess.harness import run_threads

REQUESTS = tiny.requests(lengths=(3, 5, 7))
MODEL = (tiny.CONFIG, tiny.placed_weights(make_mesh("auto")))
COUNTS = Counts(finished=3, tokens=(6,), pages=0, max_pages=8, steps=4, drafted=3, right=2)


def answer(request, token=1):
    return Completion(
        prompt_id=request.prompt_id,
        generation_id=0,
        tokens=(token,),
        logprobs=(-1.0,),
        finish_reason=FinishReason.LENGTH,
    )


class Engine:
    """Notes what it is asked to do; answers the requests last to first."""

    def __init__(self, free=8, fails=None, token=1):
        self.ledger, self.seen, self.free, self.fails, self.token = Ledger(), [], free, fails, token

    def _do(self, what, *details):
        self.seen.append((what, *details))
        if what == self.fails:
            raise MemoryError(f"no room to {what}")

    def free_bytes(self, model):
        assert model == MODEL
        self._do("measure")
        return self.free

    def check(self, model, requests):
        raise AssertionError("a generation is checked as it is prepared")

    def prepare(self, model, requests, *, free):
        self._do("prepare", len(requests), free)
        return {"decode": "digest"}

    def stream(self, model, requests, *, find_stop, gate):
        error = None
        for request in reversed(list(requests)):
            try:
                self._do("launch")
            except MemoryError as caught:
                error = caught
            if gate(error) is not None:
                return COUNTS
            self.ledger.record("decode", "digest")
            yield [answer(request, self.token)]
        return COUNTS


def body(hosts, engines, options, requests=REQUESTS):
    engine = engines[hosts.index]
    try:
        with hosts.scope("round") as scope:
            found = Session(engine).generate(scope, MODEL, requests, **options.get(hosts.index, {}))
    except Exception as error:
        found = error
    hosts.barrier("ended")
    return found


def run(*engines, **options):
    by_host = dict.fromkeys(range(len(engines)), options)
    return run_threads(body, len(engines), engines, by_host)


def test_completions_come_in_the_order_of_the_requests_whatever_the_order_they_are_made_in():
    engines = [Engine(free=8), Engine(free=5)]
    for found in run(*engines, largest=REQUESTS[:2]):
        assert found.completions == [answer(each) for each in REQUESTS] and not found.ended
        assert found.drafts is None, "no request has drafts"
        assert set(found.seconds) == {"prepare", "generate"}
    for engine in engines:
        assert engine.seen == [("measure",), ("prepare", 2, 5), *[("launch",)] * 3], "the least free memory of all"


def test_counts_of_drafts_come_from_the_engine():
    drafted = [dataclasses.replace(each, drafts=Drafts(answers=())) for each in REQUESTS]
    (found,) = run_threads(body, 1, [Engine()], {}, drafted)
    assert found.drafts == COUNTS.of_drafts


@pytest.mark.parametrize(("fails", "after"), [("measure", 1), ("prepare", 2), ("launch", 3)])
def test_what_fails_on_one_host_is_raised_on_all_before_the_next_launch(fails, after):
    engines = [Engine(), Engine(fails=fails)]
    errors = run(*engines)
    assert {type(error) for error in errors} == {PeerError} and len({str(error) for error in errors}) == 1
    assert f"process 1: MemoryError: no room to {fails}" in str(errors[0])
    assert [len(engine.seen) for engine in engines] == [after, after]
    assert all(engine.ledger.count == 0 for engine in engines)


def test_hosts_that_sampled_other_tokens_disagree():
    errors = run(Engine(), Engine(token=2))
    assert {type(error) for error in errors} == {DisagreementError} and "tokens" in str(errors[0])


def test_hosts_with_other_requests_or_facts_prepare_nothing():
    engines = [Engine(), Engine()]
    by_host = {0: {"facts": {"step": "1"}}, 1: {"facts": {"step": "2"}}}
    errors = run_threads(body, 2, engines, by_host)
    assert {type(error) for error in errors} == {DisagreementError} and "step" in str(errors[0])
    assert [engine.seen for engine in engines] == [[("measure",)]] * 2


class Answered(Observer):
    """Gives answers to a function."""

    def __init__(self, answered):
        self.answered = answered


def test_an_error_of_an_observer_is_raised_on_all_after_the_last_launch():
    def fail(completions):
        raise KeyError("no such row")

    engines = [Engine(), Engine()]
    errors = run_threads(body, 2, engines, {1: {"observer": Answered(fail)}})
    assert {type(error) for error in errors} == {PeerError} and "process 1: KeyError: 'no such row'" in str(errors[0])
    assert [engine.ledger.count for engine in engines] == [3, 3]


@pytest.mark.parametrize("index", [0, 1])
def test_a_job_that_is_asked_to_end_launches_nothing(index):
    engines = [Engine(), Engine()]

    def signalled(hosts):
        if hosts.index == index:
            hosts.preemption.note(15)
        return body(hosts, engines, {})

    for found in run_threads(signalled, 2):
        assert found.ended and len(found.completions) == 3
        assert {(each.finish_reason, each.tokens) for each in found.completions} == {(FinishReason.CANCELLED, ())}
    assert [engine.seen for engine in engines] == [[("measure",)]] * 2


class Audit(Auditor):
    """Finds what it is made to find, once all is answered."""

    def __init__(self):
        self.ledger = Ledger()

    def prepare(self, model, largest):
        return {"audit": "digest"}

    def check_memory(self, free):
        assert free == 8

    def run(self, model, requests, completions, *, around_launch, hosts):
        assert [each.prompt_id for each in completions] == [each.prompt_id for each in requests]
        self.ledger.record("audit", "digest")
        return AuditResult(logprob_gap=0.25)


class Audited(Session):
    """A session with an audit."""

    def __init__(self, engine):
        super().__init__(engine)
        self.audit = Audit()

    def auditor(self):
        return self.audit


@pytest.mark.parametrize("ends", [False, True])
def test_what_is_answered_is_audited_unless_the_job_is_asked_to_end(ends):
    def audited(hosts):
        def answered(completions):
            if ends and hosts.index == 1:
                hosts.preemption.note(15)

        with hosts.scope("round") as scope:
            return Audited(Engine()).generate(scope, MODEL, REQUESTS, observer=Answered(answered))

    for found in run_threads(audited, 2):
        assert (found.audit, found.ended) == ((None, True) if ends else (AuditResult(logprob_gap=0.25), False))
        assert ("audit" in found.seconds) is not ends


def test_no_requests_are_no_work():
    engine = Engine()
    (found,) = run_threads(body, 1, [engine], {}, [])
    assert found.completions == [] and not found.ended and engine.seen == [("measure",)]


def test_batches_of_a_stream_are_agreed_on_before_they_are_there():
    def stream(hosts, engines):
        seen, batches = [], []
        with hosts.scope("round") as scope:
            session, observer = Session(engines[hosts.index]), Answered(seen.extend)
            agreed = session.stream(scope, MODEL, REQUESTS, largest=REQUESTS[:1], free=4, batch=2, observer=observer)
        try:
            for batch in agreed:
                batches.append([each.prompt_id for each in batch])
        except DisagreementError as error:
            batches.append(str(error))
        hosts.barrier("ended")
        return seen, batches

    backwards = [request.prompt_id for request in reversed(REQUESTS)]
    for seen, batches in run_threads(stream, 2, [Engine(), Engine()]):
        assert batches == [backwards[:2], backwards[2:]] and [each.prompt_id for each in seen] == backwards
    for _, batches in run_threads(stream, 2, [Engine(), Engine(token=2)]):
        assert len(batches) == 1 and "tokens" in batches[0]


def test_a_stream_measures_memory_where_nobody_has_and_prepares_for_the_least_of_all():
    def stream(hosts, engines):
        with hosts.scope("round") as scope:
            return list(Session(engines[hosts.index]).stream(scope, MODEL, REQUESTS, largest=REQUESTS[:1], batch=9))

    engines = [Engine(free=8), Engine(free=5)]
    assert run_threads(stream, 2, engines) == [[[answer(each) for each in reversed(REQUESTS)]]] * 2
    assert [engine.seen[:2] for engine in engines] == [[("measure",), ("prepare", 1, 5)]] * 2


def test_a_host_by_itself_agrees_with_nobody():
    def stream(hosts, engines):
        session = Session(engines[hosts.index])
        return list(session.stream(None, MODEL, REQUESTS, largest=REQUESTS[:1], free=4, batch=2))

    for token, batches in zip((1, 2), run_threads(stream, 2, [Engine(), Engine(token=2)]), strict=True):
        assert [[each.tokens for each in batch] for batch in batches] == [[(token,)] * 2, [(token,)]]


def test_a_stream_works_under_settings_of_its_own_and_leaves_those_of_its_caller():
    class Strict(Engine):
        def prepare(self, *arguments, **options):
            assert jax.config.jax_numpy_rank_promotion == "allow"
            return super().prepare(*arguments, **options)

        def stream(self, *arguments, **options):
            for answered in super().stream(*arguments, **options):
                assert jax.config.jax_numpy_rank_promotion == "allow"
                yield answered

    def stream(hosts):
        with jax.numpy_rank_promotion("raise"):
            with hosts.scope("round") as scope:
                agreed = Session(Strict()).stream(scope, MODEL, REQUESTS, largest=REQUESTS[:1], free=4, batch=2)
            settings = [jax.config.jax_numpy_rank_promotion for _ in agreed]
            return [*settings, jax.config.jax_numpy_rank_promotion]

    assert run_threads(stream, 2) == [["raise"] * 3] * 2


def test_a_stream_that_is_asked_to_end_yields_no_unfinished_answer():
    """A forged notice of a preemption made a job that samples write half answers as answers, and end with code 0."""

    class Stopped(Engine):
        def stream(self, model, requests, *, gate, **options):
            assert gate(None) == FinishReason.CANCELLED
            yield from super().stream(model, requests, gate=lambda *_, **__: None, **options)

    def stream(hosts):
        if hosts.index == 1:
            hosts.preemption.note(15)
        with hosts.scope("round") as scope, pytest.raises(PeerError, match="is asked to end. Start it again"):
            list(Session(Stopped()).stream(scope, MODEL, REQUESTS, largest=REQUESTS[:1], free=4, batch=2))

    run_threads(stream, 2)
