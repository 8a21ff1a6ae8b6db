"""The loop over launches with programs that only take notes; the gate and stop strings on real devices."""

import contextlib
import dataclasses
import gc
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.engine import Engine, EngineConfig, Session
from lockstep.engine.decoder.build import Programs
from lockstep.engine.launches import Devices, Gate, launch_all
from lockstep.engine.schedule import DecodeResults, Scheduler
from lockstep.errors import ConfigError, PeerError
from lockstep.hosts import Hosts, current
from lockstep.models import DecoderWeights
from lockstep.placement import make_decode_mesh
from lockstep.placement.device import Program
from lockstep.types import Completion, FinishReason, Request
from tests.memory import live_arrays
from tests.multiprocess.harness import run_threads
from tests.unit.engine.models import Between, mesh_of, mixed_requests, model_on, request
from tests.unit.engine.schedule.test_schedule import find_stop
from tests.unit.engine.schedule.test_scheduler import capacity_of
from tests.unit.engine.schedule.test_scheduler import request as plain_request


class Notes:
    """Programs, gate, scheduler's work and callback in one list of what happened, in order."""

    def __init__(self, **scheduler: Any) -> None:
        self.capacity = capacity_of(slots=2, sequences=2, steps=4)
        self.seen: list[str] = []
        self.scheduler = Scheduler(self.capacity, [plain_request(i, 3, 6) for i in range(3)], **scheduler)
        for name in ("work_ahead", "commit"):
            setattr(self.scheduler, name, self._noted(name.replace("_", " "), getattr(self.scheduler, name)))

    def _noted(self, what: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*given: Any) -> Any:
            self.seen.append(what)
            return work(*given)

        return noted

    def prefill(self, weights: Any, pool: Any, given: Any) -> Any:
        self.seen.append("prefill")
        return pool, None

    def decode(self, weights: Any, pool: Any, given: Any) -> Any:
        self.seen.append("decode")
        # One word for the number of steps, then two each, for the two slots, of token, position and remaining.
        steps, remaining = int(given[0, 0]), np.asarray(given)[:, 5:7]
        tokens = np.where(np.arange(4) < np.minimum(remaining, steps)[..., None], 1, -1).astype(np.int32)
        return pool, jnp.asarray(DecodeResults.of(tokens, np.zeros(tokens.shape, np.float32)).packed)

    def run(self, gate: Gate) -> None:
        """The loop, from the first launch to the last."""
        decode = mock.Mock(spec=Program, side_effect=self.decode)
        decode.name = "decode"
        programs = mock.Mock(spec=Programs, prefill=self.prefill, decode=decode)
        weights, mesh = mock.Mock(spec=DecoderWeights), make_decode_mesh(mesh_of("1,1,1"), 1)
        for _ in launch_all(Devices(programs, weights, jnp.zeros(1), mesh), self.scheduler, gate):
            self.seen.append("yield")


class NotedGate(Gate):
    """A gate that takes notes, and raises another error for an error."""

    def __init__(self, seen: list[str], between_launches: Callable[..., object] | None = None, **options: Any) -> None:
        super().__init__(observer=Between(between_launches or (lambda _: seen.append("observer"))), **options)
        self.seen = seen

    def __call__(self, error: Exception | None, *, done: bool = False, idle: bool = False) -> None:
        self.seen.append(f"gate {error or ''}{'done' if done else ''}".strip())
        if error is not None:
            raise RuntimeError("known to all") from error

    @contextlib.contextmanager
    def launch(self, program: str) -> Iterator[None]:
        yield
        self.seen.append(f"end of {program}")


def test_the_gate_is_the_last_thing_before_a_launch() -> None:
    notes = Notes()
    notes.run(NotedGate(notes.seen))
    first = ["observer", "gate", "prefill", "end of prefill", "observer", "gate", "decode", "work ahead"]
    assert notes.seen[:8] == first
    assert notes.seen[8:12] == ["end of decode", "commit", "observer", "gate"]
    assert notes.seen[-3:] == ["observer", "gate done", "yield"]
    launches = [at for at, what in enumerate(notes.seen) if what in ("decode", "prefill")]
    assert all("gate" in notes.seen[at - 2 : at] for at in launches)
    assert [len(c.tokens) for c in notes.scheduler.completions()] == [6, 6, 6]


@pytest.mark.parametrize("what", ["commit", "work_ahead", "next_batch", "observer"])
def test_an_error_goes_to_the_gate_and_nothing_is_launched_after_it(what: str) -> None:
    notes = Notes()

    def fail(*_: Any) -> None:
        if "decode" in notes.seen:
            raise ValueError("broken")

    if what != "observer":
        before = getattr(notes.scheduler, what)
        setattr(notes.scheduler, what, lambda *given: (fail(), before(*given))[1])
    with pytest.raises(RuntimeError, match="known to all") as raised:
        notes.run(NotedGate(notes.seen, fail if what == "observer" else None))
    assert isinstance(raised.value.__cause__, ValueError)
    assert notes.seen.count("decode") == 1 and notes.seen[-1].startswith("gate broken")


def test_without_hosts_an_error_is_the_callers() -> None:
    notes = Notes()
    with pytest.raises(ZeroDivisionError):
        notes.run(Gate(observer=Between(lambda _: 1 / 0)))
    assert notes.seen == []


def test_a_reason_to_stop_ends_the_run_with_what_there_is() -> None:
    notes = Notes()
    ticks = iter(range(4))
    notes.run(Gate(None, 2.5, clock=lambda: float(next(ticks))))
    assert notes.seen.count("decode") == 1
    assert [(len(c.tokens), c.finish_reason) for c in notes.scheduler.completions()] == [
        (4, FinishReason.BUDGET), (4, FinishReason.BUDGET), (0, FinishReason.BUDGET),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(EngineConfig(page_size=8, max_seqs=4, max_steps_per_launch=5), mesh_of("1,2,2"))


@pytest.fixture(scope="module")
def model() -> Any:
    return model_on("1,2,2")


@pytest.fixture(scope="module")
def plain(engine: Engine, model: Any) -> dict[tuple[int, int], Completion]:
    return {(c.prompt_id, c.generation_id): c for c in engine.generate(model, mixed_requests())}


def letters(tokens: tuple[int, ...]) -> str:
    return "".join(chr(ord("a") + token) for token in tokens)


def test_a_stop_string_ends_its_own_sequence_and_no_other(engine: Engine, model: Any, plain: dict[Any, Any]) -> None:
    # The third and fourth token of prompt 0: complete in the middle of a launch.
    stop = letters(plain[0, 0].tokens[2:4])
    requests = [
        request(r.prompt_id, r.prompt_tokens, r.params.max_new_tokens, **_options(r), stop=(stop,))
        if r.prompt_id == 0
        else r
        for r in mixed_requests()
    ]
    got = engine.generate(model, requests, find_stop=find_stop)
    assert [(each.prompt_id, each.generation_id) for each in got] == list(plain)
    for completion in got:
        before = plain[completion.prompt_id, completion.generation_id]
        if completion.prompt_id != 0:
            assert completion == before
            continue
        assert completion.finish_reason is FinishReason.STOP
        end = letters(before.tokens).index(stop) + 2
        assert completion.tokens == before.tokens[:end] and completion.logprobs == before.logprobs[:end]


def _options(one: Request) -> dict[str, Any]:
    params = one.params
    return {"temperature": params.temperature, "seed": params.seed, "n_generations": params.n_generations}


def test_stop_strings_without_a_finder_are_refused_by_name(engine: Engine, model: Any) -> None:
    with pytest.raises(Exception, match=r"prompt 3 has the stop strings \['x'\]; the engine knows no tokenizer"):
        engine.generate(model, [request(3, 5, stop=("x",))])
    with pytest.raises(ConfigError, match=r"stop is '###'; it must be a list\. Use \['###'\]"):
        request(3, 5, stop="###")
    with pytest.raises(ConfigError, match="stop has an empty string at place 1"):
        request(3, 5, stop=("x", ""))


def test_cancelling_leaves_the_others_as_they_were(engine: Engine, model: Any, plain: dict[Any, Any]) -> None:
    live = len(live_arrays())
    calls = 0

    def cancel(scheduler: Scheduler) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            scheduler.cancel(1, 0)  # shares its pages with (1, 1), before anything was prefilled
            scheduler.cancel(6, 0)  # waits
        if (2, 1) in scheduler.unfinished() and scheduler.tokens_so_far(2, 1):
            scheduler.cancel(2, 1)

    got = engine.generate(model, mixed_requests(), observer=Between(cancel))
    assert [c.prompt_id for c in got if c.finish_reason is FinishReason.CANCELLED] == [1, 2, 6]
    for completion in got:
        before = plain[completion.prompt_id, completion.generation_id]
        if completion.finish_reason is FinishReason.CANCELLED:
            assert completion.tokens == before.tokens[: len(completion.tokens)]
            assert bool(completion.tokens) == (completion.prompt_id == 2)
        else:
            assert completion == before
    assert len(live_arrays()) == live


@pytest.mark.parametrize(
    "launches", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)]
)
def test_when_the_time_is_over_all_come_back_with_what_they_have(
    engine: Engine, model: Any, plain: dict[Any, Any], launches: int
) -> None:
    live = len(live_arrays())
    ticks = iter(np.arange(100.0))
    with current().scope("test-budget") as hosts:
        gate = Gate(hosts, launches + 0.5, clock=lambda: float(next(ticks)))
        got = Session(engine).generate(hosts, model, mixed_requests(), gate=gate).completions
    over = [c for c in got if c.finish_reason is FinishReason.BUDGET]
    assert over and (launches > 0 or not any(c.tokens for c in got))
    assert (len(over) == len(got)) == (launches < 4)
    for completion in got:
        before = plain[completion.prompt_id, completion.generation_id]
        assert completion.tokens == before.tokens[: len(completion.tokens)]
        if completion not in over:
            assert completion == before
    assert len(live_arrays()) == live
    assert engine.generate(model, mixed_requests()) == list(plain.values()), "the next run is not touched"


class Clock:
    """Seconds that a test sets."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_gate_counts_from_when_it_was_made() -> None:
    clock = Clock()
    with current().scope("test-gate-clock") as hosts:
        gate = Gate(hosts, 5.0, clock=clock)
        clock.now = 104.9
        assert gate(None) is None
        clock.now = 105.0
        assert gate(None, done=True) is None, "what is done needs no time"
        assert gate(None) is FinishReason.BUDGET and not gate.preempted


def test_without_a_limit_no_time_is_too_long() -> None:
    clock = Clock()
    with current().scope("test-gate-none") as hosts:
        gate = Gate(hosts, clock=clock)
        clock.now = 1e9
        assert gate(None) is None


def test_no_message_ends_a_run_that_has_no_limit() -> None:
    def body(hosts: Hosts) -> Any:
        if hosts.index == 0:
            return Gate(hosts)(None)
        return hosts.reasons_to_stop("between launches", None, FinishReason.BUDGET)

    assert run_threads(body, 2)[0] is None


def test_an_error_ends_a_run_whatever_else_does() -> None:
    clock, error = Clock(), ValueError("no such text")
    with current().scope("test-gate-error") as hosts:
        gate = Gate(hosts, 5.0, clock=clock)
        clock.now = 1e9
        with pytest.raises(PeerError, match="between launches failed: ValueError: no such text") as raised:
            gate(error)
        assert raised.value.__cause__ is error


def failing(*_: Any) -> None:
    raise ValueError("no such text")


@pytest.mark.parametrize("what", ["find_stop", pytest.param("observer", marks=pytest.mark.nightly)])
def test_what_fails_between_launches_fails_the_run_and_leaves_nothing(engine: Engine, model: Any, what: str) -> None:
    requests = [dataclasses.replace(r, params=dataclasses.replace(r.params, stop=("x",))) for r in mixed_requests()]
    engine.prepare(model, requests)
    gc.collect()
    live = len(live_arrays())
    gc.disable()  # training goes on at once, and needs the memory
    try:
        with pytest.raises(PeerError, match="between launches failed: ValueError: no such text"):
            options = {"find_stop": failing} if what == "find_stop" else {"observer": Between(failing)}
            engine.generate(model, requests, **{"find_stop": find_stop, **options})
        assert len(live_arrays()) == live
    finally:
        gc.enable()
    assert engine.generate(model, mixed_requests()), "the next run is not touched"
    assert len(live_arrays()) == live


@pytest.mark.parametrize("before", [1, 3, 20])
def test_a_request_that_cannot_be_read_fails_the_run(engine: Engine, model: Any, before: int) -> None:
    """Also one that is read while the devices work."""
    requests = [dataclasses.replace(mixed_requests()[0], prompt_id=number) for number in range(before)]
    engine.prepare(model, mixed_requests())
    with current().scope("test-gate-stream") as hosts:
        answers = engine.stream(model, [*requests, requests[0]], gate=Gate(hosts))
        with pytest.raises(PeerError, match="between launches failed: ConfigError: prompt_id 0 is used by several"):
            list(answers)
