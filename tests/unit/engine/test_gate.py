"""The gate, stop strings and cancel on real devices: whoever ends, the others' tokens are what they were."""

import dataclasses
import gc
from typing import Any

import jax
import numpy as np
import pytest

from lockstep.engine import Engine, EngineConfig, Gate
from lockstep.engine.schedule import Scheduler
from lockstep.errors import ConfigError, PeerError
from lockstep.hosts import current
from lockstep.types import Completion, FinishReason, Request
from tests.unit.engine.models import mesh_of, mixed_requests, model_on, request
from tests.unit.engine.schedule.test_schedule import find_stop


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
    with pytest.raises(ConfigError, match=r"stop is '###'; it must be a list of strings\. Use \['###'\]"):
        request(3, 5, stop="###")
    with pytest.raises(ConfigError, match="stop has an empty string at place 1"):
        request(3, 5, stop=("x", ""))


def test_cancelling_leaves_the_others_as_they_were(engine: Engine, model: Any, plain: dict[Any, Any]) -> None:
    live = len(jax.live_arrays())
    calls = 0

    def cancel(scheduler: Scheduler) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            scheduler.cancel(1, 0)  # shares its pages with (1, 1), before anything was prefilled
            scheduler.cancel(6, 0)  # waits
        if (2, 1) in scheduler.unfinished() and scheduler.tokens_so_far(2, 1):
            scheduler.cancel(2, 1)

    got = engine.generate(model, mixed_requests(), between_launches=cancel)
    assert [c.prompt_id for c in got if c.finish_reason is FinishReason.CANCELLED] == [1, 2, 6]
    for completion in got:
        before = plain[completion.prompt_id, completion.generation_id]
        if completion.finish_reason is FinishReason.CANCELLED:
            assert completion.tokens == before.tokens[: len(completion.tokens)]
            assert bool(completion.tokens) == (completion.prompt_id == 2)
        else:
            assert completion == before
    assert len(jax.live_arrays()) == live


@pytest.mark.parametrize("launches", [0, 1, 4])
def test_when_the_time_is_over_all_come_back_with_what_they_have(
    engine: Engine, model: Any, plain: dict[Any, Any], launches: int
) -> None:
    live = len(jax.live_arrays())
    ticks = iter(np.arange(100.0))
    with current().scope("test-budget") as hosts:
        gate = Gate(hosts, launches + 0.5, clock=lambda: float(next(ticks)))
        engine.prepare(model, mixed_requests())
        got = engine.run(model, mixed_requests(), gate=gate)
    over = [c for c in got if c.finish_reason is FinishReason.BUDGET]
    assert over and (launches > 0 or not any(c.tokens for c in got))
    assert (len(over) == len(got)) == (launches < 4)
    for completion in got:
        before = plain[completion.prompt_id, completion.generation_id]
        assert completion.tokens == before.tokens[: len(completion.tokens)]
        if completion not in over:
            assert completion == before
    assert len(jax.live_arrays()) == live
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


@pytest.mark.parametrize("what", ["find_stop", "between_launches"])
def test_what_fails_between_launches_fails_the_run_and_leaves_nothing(engine: Engine, model: Any, what: str) -> None:
    requests = [dataclasses.replace(r, params=dataclasses.replace(r.params, stop=("x",))) for r in mixed_requests()]
    with pytest.raises(PeerError, match="between launches failed: ValueError: no such text"):
        engine.generate(model, requests, **{"find_stop": find_stop, what: failing})
    gc.collect()
    live = len(jax.live_arrays())
    assert engine.generate(model, mixed_requests()), "the next run is not touched"
    assert len(jax.live_arrays()) == live


@pytest.mark.parametrize("before", [1, 3, 20])
def test_a_request_that_cannot_be_read_fails_the_run(engine: Engine, model: Any, before: int) -> None:
    """Also one that is read while the devices work."""
    requests = [dataclasses.replace(mixed_requests()[0], prompt_id=number) for number in range(before)]
    engine.prepare(model, mixed_requests())
    with current().scope("test-gate-stream") as hosts:
        answers = engine.stream(model, [*requests, requests[0]], gate=Gate(hosts))
        with pytest.raises(PeerError, match="between launches failed: ConfigError: prompt_id 0 is used by several"):
            list(answers)
