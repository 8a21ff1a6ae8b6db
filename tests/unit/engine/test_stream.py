"""More prompts than are held at a time: the same tokens, nothing compiled, what is not prepared for refused by name."""

import gc

import jax
import pytest

from lockstep.engine import Engine, EngineConfig
from lockstep.errors import CapacityError, ConfigError, PromptError
from tests.oracle import assert_same_tokens, oracle_completions
from tests.unit.engine.models import mesh_of, mixed_requests, model_on, request


def test_prompts_stream_through() -> None:
    model, requests = model_on("1,2,1"), mixed_requests()
    engine = Engine(EngineConfig(max_prompts_per_batch=2, max_steps_per_launch=5, page_size=8), mesh_of("1,2,1"))
    with pytest.raises(AssertionError, match="prepare"):
        next(engine.stream(model, requests))
    engine.prepare(model, requests)
    sizing = engine.sizing
    assert sizing is not None
    # Two prompts at a time have at most 3 + 2 sequences.
    assert sizing.sizes.sequences == 5 and sizing.reasons["max_seqs"] == (5, "max_prompts_per_batch")
    assert sizing.reasons["max_prompts_per_batch"] == (2, "cap given")
    assert "max_prompts_per_batch 2: cap given" in sizing.describe()
    compiled, live, read = engine.compilations, len(jax.live_arrays()), []

    def source():
        for one in requests:
            read.append(one.prompt_id)
            yield one

    parts, known = [], []
    for part in engine.stream(model, source()):
        parts += part
        known.append(len(read))
    assert known[0] < len(requests) and len(known) > 2, "all was read before anything was answered"
    assert engine.compilations == compiled and len(jax.live_arrays()) == live
    order = {one.prompt_id: at for at, one in enumerate(requests)}
    parts.sort(key=lambda c: (order[c.prompt_id], c.generation_id))
    assert assert_same_tokens(oracle_completions(model, requests), parts) == 0
    assert engine.run(model, requests) == parts

    gc.collect()  # what the oracle left behind
    live = len(jax.live_arrays())
    closed = engine.stream(model, requests)
    next(closed)
    assert len(jax.live_arrays()) > live
    closed.close()
    assert len(jax.live_arrays()) == live, "an iterator that is closed leaves its cache behind"


def test_what_was_not_prepared_for_is_refused_when_it_is_read() -> None:
    model, first = model_on("1,1,1"), request(0, 5, 4)
    engine = Engine(EngineConfig(max_prompts_per_batch=1), mesh_of("1,1,1"))
    engine.prepare(model, [first])
    for second, error, text in (
        (request(0, 5, 4), ConfigError, "prompt_id 0 is used by several requests"),
        (request(1, (99,), 4), PromptError, "token 0 of prompt 1 is 99"),
        (request(1, 40, 8), CapacityError, "prompt 1 has 40 tokens .* max_seq_len is 16"),
    ):
        with pytest.raises(error, match=text):
            list(engine.stream(model, [first, second]))


def test_auto_fills_every_slot_twice() -> None:
    engine = Engine(EngineConfig(max_seqs=6), mesh_of("1,1,1"))
    engine.prepare(model_on("1,1,1"), [request(i, 3, 2, n_generations=2) for i in range(20)])
    sizing = engine.sizing
    assert sizing is not None and sizing.reasons["max_prompts_per_batch"] == (6, "fills max_seqs twice")
    with pytest.raises(ConfigError, match="max_prompts_per_batch is 0; it must be at least 1"):
        EngineConfig(max_prompts_per_batch=0)
