"""Log-probabilities of prompt tokens are those of the training forward, whatever the pages, chunks and layout."""

import dataclasses
from typing import Any

import equinox as eqx
import haliax as hax
import numpy as np
import pytest

from lockstep.engine import Engine, EngineConfig
from lockstep.engine.decoder import prefill as module
from lockstep.types import Request
from tests.oracle import assert_same_tokens, oracle_completions
from tests.sampling_oracle import log_softmax
from tests.unit.engine.models import FAMILIES, VOCAB, mesh_of, model_on, request

forward = eqx.filter_jit(lambda model, ids: model(ids))


def by_the_training_forward(model: Any, one: Request) -> np.ndarray:
    """``[prompt token, vocabulary]``: what the model says in each token's place, given those before it."""
    logits = forward(model, hax.named(np.asarray([one.prompt_tokens]), ("batch", "position"))).array
    return np.stack([log_softmax(np.asarray(row, np.float32)) for row in logits[0]])[:-1]


def requests_with_and_without() -> list[Request]:
    return [
        request(0, 34, 4, prompt_logprobs=True, n_generations=3, temperature=0.8),
        request(1, 17, 4),
        request(2, 1, 4, prompt_logprobs=True),
        request(3, 40, 4, prompt_logprobs=True, top_logprobs=3),
        request(4, 34, 4),
        request(5, 34, 4, prompt_logprobs=True),
    ]


@pytest.mark.parametrize(
    ("family", "mesh", "layout", "options"),
    [
        pytest.param("llama3", "1,1,1", "auto", {"page_size": 16}, marks=pytest.mark.nightly),
        pytest.param(
            "qwen3",
            "1,2,2",
            {"tensor": 2},
            {"page_size": 8, "max_prefill_size": 16, "max_seqs": 3},
            marks=pytest.mark.nightly,
        ),
        pytest.param("experts", "1,4,1", {"tensor": 4}, {"page_size": 16, "max_seqs": 4}, marks=pytest.mark.nightly),
        pytest.param("tied", "2,2,1", "training", {"page_size": 32, "max_prefill_size": 32}, marks=pytest.mark.nightly),
    ],
)
def test_they_are_the_models(
    family: str, mesh: str, layout: Any, options: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PROMPT_LOGPROBS_CHUNK", 12)  # several chunks, the last one not full
    model, requests = model_on(mesh, FAMILIES[family]), requests_with_and_without()
    engine = Engine(EngineConfig(layout=layout, **options), mesh_of(mesh))
    got = engine.generate(model, requests)
    by_id = {one.prompt_id: one for one in requests}
    worst = 0.0
    for c in got:
        one = by_id[c.prompt_id]
        if not one.params.prompt_logprobs:
            assert c.prompt_logprobs == () == c.prompt_top_logprobs
            continue
        assert c.prompt_logprobs[0] is None and len(c.prompt_logprobs) == len(one.prompt_tokens)
        if len(one.prompt_tokens) == 1:
            continue
        want = by_the_training_forward(model_on("1,1,1", FAMILIES[family]), one)
        own = want[np.arange(len(want)), one.prompt_tokens[1:]]
        worst = max(worst, float(np.abs(own - np.asarray(c.prompt_logprobs[1:])).max()))
        if one.params.top_logprobs:
            assert c.prompt_top_logprobs[0] == ()
            for row, top in zip(want, c.prompt_top_logprobs[1:], strict=True):
                assert [i for i, _ in top] == np.argsort(-row, kind="stable")[:3].tolist()
                worst = max(worst, max(abs(row[i] - value) for i, value in top))
        else:
            assert c.prompt_top_logprobs == ()
    print(f"log-probabilities of prompt tokens differ by {worst:.1e} at most")
    assert worst < 1e-5

    # Who asks samples what it would sample anyway, and so does everybody else.
    assert assert_same_tokens(oracle_completions(model, requests), got) == 0
    silent = [dataclasses.replace(r, params=dataclasses.replace(r.params, prompt_logprobs=False)) for r in requests]
    fresh = Engine(EngineConfig(layout=layout, **options), mesh_of(mesh))
    plain = fresh.generate(model, silent)
    assert "prompt_logprobs" in engine.programs and "prompt_logprobs" not in fresh.programs
    assert [dataclasses.replace(c, prompt_logprobs=(), prompt_top_logprobs=()) for c in got] == plain


@pytest.mark.slow
def test_logits_are_held_in_chunks() -> None:
    vocab = 4096
    model = model_on("1,1,1", dataclasses.replace(FAMILIES["llama"], max_seq_len=1024), vocab)
    engine = Engine(EngineConfig(max_prefill_size=1024, page_size=128), mesh_of("1,1,1"))
    prompt = tuple(np.random.default_rng(0).integers(0, VOCAB, 1000).tolist())
    engine.prepare(model, [request(0, prompt, 1, prompt_logprobs=True)])
    temporaries = engine.programs["prompt_logprobs"].memory().temp_size_in_bytes
    print(f"{temporaries / 2**20:.1f} MiB of temporaries; all logits would be {1000 * vocab * 4 / 2**20:.1f} MiB")
    assert (
        temporaries - engine.programs["prefill"].memory().temp_size_in_bytes
        < 4 * module.PROMPT_LOGPROBS_CHUNK * vocab * 4
    )


def test_those_of_one_prompt_are_the_models() -> None:
    model, one = model_on("1,1,1"), request(0, 11, 1, prompt_logprobs=True)
    (got,) = Engine(EngineConfig(page_size=4, max_prefill_size=4), mesh_of("1,1,1")).generate(model, [one])
    want = by_the_training_forward(model, one)[np.arange(10), one.prompt_tokens[1:]]
    assert got.prompt_logprobs[0] is None
    np.testing.assert_allclose(got.prompt_logprobs[1:], want, atol=1e-5)
