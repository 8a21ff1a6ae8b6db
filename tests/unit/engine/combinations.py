"""What the engine's tokens must not depend on, as cases to draw: company, order, pages, chunks, launches, layouts."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from lockstep.engine import Engine, EngineConfig
from lockstep.types import Completion, Request
from tests.oracle import Expected, assert_same_logprobs, assert_same_tokens, oracle_completions
from tests.unit.engine.models import FAMILIES, mesh_of, model_on, request

CONFIGS: tuple[tuple[str, Any, dict[str, Any]], ...] = (
    ("2,2,1", {"tensor": 2}, {"page_size": 8, "max_prefill_size": 16, "max_steps_per_launch": 5, "max_seqs": 5}),
    ("1,4,1", "auto", {"page_size": 128, "max_steps_per_launch": 64}),
    ("1,2,2", "training", {"page_size": 16, "max_prefill_size": 32, "max_pages": 9, "max_prompts_per_batch": 3}),
    ("1,4,1", {"tensor": 1}, {"page_size": 8, "max_steps_per_launch": 1, "max_seqs": 3, "share_prefixes": False}),
    ("1,2,2", {"tensor": 2}, {"page_size": 64, "max_steps_per_launch": 7, "max_pages": 4}),
    ("4,1,1", "auto", {"page_size": 32, "max_prefill_size": 32, "max_steps_per_launch": 3, "share_prefixes": False}),
    ("1,2,2", {"tensor": 2}, {"page_size": 16, "max_prefill_size": 16, "max_seqs": 5, "kv_cache_dtype": "fp8"}),
    ("1,2,2", {"tensor": 4, "context": 2}, {"page_size": 8, "max_steps_per_launch": 5, "max_seqs": 5}),
)
"""Mesh of four devices, layout, capacities. Few, for each is compiled once per family."""


@dataclasses.dataclass(frozen=True)
class Case:
    """Which requests, in which order, on which engine; all JSON."""

    family: str
    config: int
    prompts: tuple[int, ...]


@functools.cache
def pool() -> tuple[Request, ...]:
    """Requests to draw from: greedy and sampled, alone and in groups, of all lengths; many share a prefix."""
    sampled = {"temperature": 0.8, "seed": 5}
    lengths = (1, 2, 8, 9, 17, 23, 33, 40, 48, 12)
    return tuple(
        request(
            at,
            length,
            3 + 2 * (at % 4),
            n_generations=1 + at % 3,
            stop_token_ids=tuple(range(at % 5, 39, 7)) if at % 2 else (),
            **(sampled if at % 4 >= 2 else {}),
        )
        for at, length in enumerate(lengths)
    )


@functools.cache
def expected(family: str, fp8_cache: bool) -> dict[tuple[int, int], Expected]:
    """What each request must be answered, by prompt and generation; by full forward passes in this process."""
    answers = oracle_completions(model_on("1,1,1", FAMILIES[family]), pool(), fp8_cache=fp8_cache)
    return {(one.prompt_id, one.generation_id): one for one in answers}


@functools.cache
def engine_of(family: str, config: int) -> Engine:
    """Prepared for all requests, so that it compiles once whatever is drawn."""
    mesh, layout, options = CONFIGS[config]
    # Memory is given, so that what is prepared does not hang on what each process finds free.
    options = {"max_seq_len": 64, "memory_bytes_per_device": 2**30, **options}
    engine = Engine(EngineConfig(layout=layout, **options), mesh_of(mesh))
    engine.prepare(model_on(mesh, FAMILIES[family]), pool())
    return engine


def answer(case: Case) -> list[Completion]:
    """Runs a case; nothing may be compiled beyond what `engine_of` did."""
    engine = engine_of(case.family, case.config)
    before = engine.compilations
    requests = [pool()[at] for at in case.prompts]
    got = engine.generate(model_on(CONFIGS[case.config][0], FAMILIES[case.family]), requests)
    assert engine.compilations == before, "a program was compiled for requests that were prepared for"
    return got


def check(case: Case, got: Sequence[Completion]) -> int:
    """Compares with the oracle; returns the number of ties."""
    answers = expected(case.family, "kv_cache_dtype" in CONFIGS[case.config][2])
    want = [answers[at, g] for at in case.prompts for g in range(pool()[at].params.n_generations)]
    ties = assert_same_tokens(want, got)
    if not ties:
        assert_same_logprobs(want, got)
    return ties
