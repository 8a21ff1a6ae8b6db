"""The audit: the engine's log-probabilities are the training forward's, and a wrong one is found."""

import dataclasses
import functools
import math
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lockstep
from lockstep.engine import Auditor, Engine, EngineConfig
from lockstep.engine.audit import _Differences
from lockstep.errors import CapacityError, ConfigError
from lockstep.models import as_trainable, read_decoder
from lockstep.types import Completion, FinishReason
from tests.memory import live_arrays
from tests.unit.engine.models import FAMILIES, mesh_of, mixed_requests, model_on, request

TOLERANCE = 1e-5


def answers(mesh: str, model: Any, **options: Any) -> list[Completion]:
    return Engine(EngineConfig(), mesh_of(mesh), **options).generate(model, mixed_requests())


SLOW = ("gemma", "gemma3", "experts")
"""The families of `make slow`; the decoder is compared with a plain forward for each."""


def marks(family: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.slow] if family in SLOW else [pytest.mark.nightly]


@pytest.mark.parametrize(
    ("mesh", "family"), [("1,1,1", "llama"), *(pytest.param("1,2,2", name, marks=marks(name)) for name in FAMILIES)]
)
def test_the_engine_agrees_with_the_training_forward(mesh: str, family: str) -> None:
    model = model_on(mesh, FAMILIES[family])
    result = lockstep.audit(model, mixed_requests(), answers(mesh, model))
    print(f"{family} on {mesh}: {result}")
    assert result.logprob_gap <= TOLERANCE
    assert result.logprob_noise is None and result.logprob_noise_mean is None


@pytest.mark.slow
def test_a_wrong_log_probability_is_found() -> None:
    model = model_on("1,2,2")
    right = answers("1,2,2", model)
    pair, tokens = read_decoder(model), sum(len(each.tokens) for each in right)
    for at, change, gap in ((0, 1e-3, 1e-3), (-1, -0.25, 0.25), (2, math.nan, math.inf)):
        logprobs = list(right[at].logprobs)
        logprobs[-1] += change
        wrong = list(right)
        wrong[at] = dataclasses.replace(right[at], logprobs=tuple(logprobs))
        result = lockstep.audit(pair, mixed_requests(), wrong)
        assert result.logprob_gap == pytest.approx(gap, abs=TOLERANCE)
        assert result.logprob_gap_mean == pytest.approx(gap / tokens, abs=TOLERANCE / 10)


@pytest.mark.slow
def test_tokens_beyond_the_vocabulary_have_no_part_in_it() -> None:
    model = model_on("1,2,2")
    got = answers("1,2,2", model, vocab_size=30)
    assert lockstep.audit(model, mixed_requests(), got, vocab_size=30).logprob_gap <= TOLERANCE
    assert lockstep.audit(model, mixed_requests(), got).logprob_gap > 1e-3


@pytest.mark.slow
def test_half_precision_is_compared_in_half_precision_and_with_what_it_costs() -> None:
    model = model_on("1,2,2")
    got = Engine(EngineConfig(dtype="bfloat16"), mesh_of("1,2,2")).generate(model, mixed_requests())
    result = lockstep.audit(model, mixed_requests(), got, dtype="bfloat16")
    print(result)
    assert result.logprob_noise is not None and 1e-3 < result.logprob_noise < 0.1
    assert result.logprob_gap <= 2 * result.logprob_noise
    assert result.logprob_noise_mean is not None and 0 < result.logprob_gap_mean <= 2 * result.logprob_noise_mean


def test_one_program_for_all_rounds_and_nothing_left_behind() -> None:
    model = model_on("1,2,2")
    got = answers("1,2,2", model)
    auditor = Auditor(mesh_of("1,2,2"))
    with jax.no_execution(True):
        digests = auditor.prepare(model, mixed_requests())
    live = len(live_arrays())
    gaps = []
    for _ in range(2):
        assert auditor.prepare(model, mixed_requests()) == digests
        gaps.append(auditor.run(model, mixed_requests(), got))
    assert gaps[0] == gaps[1] and [program.traces for program in auditor.programs.values()] == [1]
    assert auditor.ledger.launches == ["audit"] * 2 * -(-len(got) // 4)
    assert len(live_arrays()) == live


@functools.cache
def prepared() -> Auditor:
    """An auditor whose program is compiled once for several tests."""
    auditor = Auditor(mesh_of("1,1,1"))
    auditor.prepare(model_on("1,1,1"), mixed_requests())
    return auditor


def test_an_audit_that_does_not_fit_is_refused() -> None:
    auditor = prepared()
    auditor.check_memory(2**30)
    with pytest.raises(CapacityError, match="the audit needs .* for sequences of 64 tokens; there are 90 B: hbm_util"):
        auditor.check_memory(100)


def test_an_audit_needs_its_temporaries_its_output_and_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    auditor = prepared()
    memory = SimpleNamespace(temp_size_in_bytes=100, output_size_in_bytes=20, generated_code_size_in_bytes=3)
    monkeypatch.setattr(Auditor, "programs", {"audit": SimpleNamespace(memory=lambda: memory)})
    auditor.check_memory(137)  # of which it may use 0.9
    with pytest.raises(CapacityError, match="the audit needs 123 B .* there are 122 B"):
        auditor.check_memory(136)


def test_nothing_sampled_nothing_to_compare() -> None:
    model = model_on("1,1,1")
    nothing = Completion(prompt_id=0, generation_id=0, tokens=(), logprobs=(), finish_reason=FinishReason.BUDGET)
    assert lockstep.audit(model, [request(0, 3)], [nothing]).logprob_gap == 0
    assert lockstep.audit(model, [], []).logprob_gap == 0


def test_completions_of_other_requests_and_other_models_are_refused() -> None:
    model = model_on("1,1,1")
    stranger = Completion(prompt_id=9, generation_id=0, tokens=(1,), logprobs=(0.0,), finish_reason=FinishReason.LENGTH)
    with pytest.raises(lockstep.LockstepError, match="a completion is of prompt 9, which none of the 1 requests has"):
        lockstep.audit(model, [request(0, 3)], [stranger])
    auditor = prepared()
    with pytest.raises(ConfigError, match="not those that the auditor prepared for. Call prepare"):
        auditor.run(jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), model), [request(0, 3)], [])


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "tied"])
def test_the_view_is_the_model(family: str) -> None:
    model = model_on("1,1,1", FAMILIES[family])
    config, weights = read_decoder(model)
    view = as_trainable(config, weights)
    assert jax.tree.structure(view) == jax.tree.structure(model)
    assert all(a is b for a, b in zip(jax.tree.leaves(view), jax.tree.leaves(model), strict=True))
    assert view.config == FAMILIES[family]


def test_differences_have_a_mean_and_what_is_not_a_number_is_infinite() -> None:
    differences = _Differences()
    assert differences.mean == 0.0
    differences.add(np.array([-1.0, -2.0]), np.array([-1.5, -2.0]))
    differences.add(np.array([-3.0]), np.array([-2.0]))
    assert (differences.largest, differences.mean) == (1.0, 0.5)
    differences.add(np.array([np.nan]), np.array([-2.0]))
    assert differences.largest == differences.mean == np.inf
