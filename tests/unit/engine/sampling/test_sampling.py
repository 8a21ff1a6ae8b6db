"""Every sampling parameter through the whole engine, against full forward passes and NumPy."""

import dataclasses
import functools
from typing import Any

import pytest

from lockstep.engine import Engine, EngineConfig
from lockstep.engine.schedule import DecodeBatch, sampling_sizes
from lockstep.errors import CapacityError
from lockstep.types import Completion, FinishReason, Request, SamplingParams
from tests.oracle import Expected, assert_same_logprobs, assert_same_tokens, oracle_completions
from tests.unit.engine.models import LLAMA, mesh_of, mixed_requests, model_on, request

CONFIG = dataclasses.replace(LLAMA, num_kv_heads=4)
ODD = 39
"""A vocabulary that neither two nor four devices share evenly."""


def requests() -> list[Request]:
    """Each feature alone and all together, greedy and drawn, beside requests that use none."""
    drawn: dict[str, Any] = {"temperature": 0.9}
    every: dict[str, Any] = {
        "top_k": 12,
        "top_p": 0.9,
        "min_p": 0.02,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "logit_bias": ((7, 2.5), (11, -3.0)),
        "allowed_token_ids": tuple(range(0, 36, 2)) + (7, 11),
        "stop_token_ids": tuple(range(2, 20, 2)),
        "min_tokens": 3,
        "top_logprobs": 3,
    }
    features: list[dict[str, Any]] = [
        {},
        drawn,
        {**drawn, "top_k": 3},
        {**drawn, "top_p": 0.6, "seed": 5},
        {**drawn, "min_p": 0.2},
        {**drawn, "top_k": 9, "top_p": 0.8, "min_p": 0.05, "n_generations": 3},
        {"repetition_penalty": 1.5},
        {**drawn, "repetition_penalty": 0.8},
        {"frequency_penalty": 1.1},
        {**drawn, "presence_penalty": 2.0},
        {"logit_bias": ((4, 6.0), (9, 6.0), (0, -100.0))},
        {**drawn, "allowed_token_ids": (3, 1, 38, 20, 3)},
        {"allowed_token_ids": (30,)},
        {"stop_token_ids": tuple(range(1, 33)), "min_tokens": 7},
        {**drawn, "stop_token_ids": tuple(range(1, 33)), "min_tokens": 12},
        {"stop_token_ids": tuple(range(1, 39)), "ignore_eos": True},
        {"top_logprobs": 5},
        {**drawn, **every, "n_generations": 2},
        every,
    ]
    lengths = (1, 5, 17, 24, 9, 33)
    return [request(i, lengths[i % len(lengths)], 12, **params) for i, params in enumerate(features)]


@functools.cache
def expected() -> list[Expected]:
    return oracle_completions(model_on("1,4,1", CONFIG, ODD), requests())


def check(want: list[Expected], got: list[Completion]) -> None:
    ties = assert_same_tokens(want, got)
    worst = assert_same_logprobs(want, got)
    print(f"{ties} ties in {sum(len(e.tokens) for e in want)} tokens; log-probabilities differ by {worst:.1e} at most")


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        pytest.param(
            {"tensor": 1}, {"page_size": 8, "max_seqs": 6, "max_steps_per_launch": 5}, marks=pytest.mark.nightly
        ),
        pytest.param({"tensor": 2}, {}, marks=pytest.mark.nightly),
        pytest.param({"tensor": 4}, {"max_steps_per_launch": 4}, marks=pytest.mark.nightly),
        pytest.param("training", {"max_seqs": 8}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_every_feature_in_every_layout(layout: Any, options: dict[str, int]) -> None:
    engine = Engine(EngineConfig(layout=layout, **options), mesh_of("1,4,1"))
    model = model_on("1,4,1", CONFIG, ODD)
    check(expected(), engine.generate(model, requests()))
    decode = engine.programs["decode"]
    order = {(e.prompt_id, e.generation_id): e for e in expected()}
    turned = engine.generate(model, requests()[::-1])
    check([order[c.prompt_id, c.generation_id] for c in turned], turned)
    assert engine.programs["decode"] is decode and decode.traces == 1


def test_what_is_compared_shows_each_feature() -> None:
    answers = {(e.prompt_id, e.generation_id): e for e in expected()}
    plain = oracle_completions(
        model_on("1,4,1", CONFIG, ODD),
        [request(r.prompt_id, r.prompt_tokens, 12, temperature=r.params.temperature) for r in requests()],
    )
    changed = {e.prompt_id for e in plain if answers[e.prompt_id, 0].tokens != e.tokens}
    neutral = {0, 1, 15, 16}  # no feature, ignore_eos, top_logprobs
    assert changed == set(range(19)) - neutral
    assert len(answers[13, 0].tokens) == 8 and answers[13, 0].finish_reason is FinishReason.STOP
    assert len(answers[14, 0].tokens) == 12 and answers[14, 0].finish_reason is FinishReason.LENGTH
    assert len(answers[15, 0].tokens) == 12 and answers[15, 0].finish_reason is FinishReason.LENGTH
    assert set(answers[12, 0].tokens) == {30} and set(answers[11, 0].tokens) <= {1, 3, 20, 38}


@pytest.fixture(scope="module")
def grown() -> Engine:
    """An engine whose programs have every feature."""
    engine = Engine(EngineConfig(layout={"tensor": 2}), mesh_of("1,4,1"))
    engine.generate(model_on("1,4,1", CONFIG, ODD), requests())
    return engine


@pytest.mark.slow
def test_each_request_alone_is_what_it_is_in_company(grown: Engine) -> None:
    model = model_on("1,4,1", CONFIG, ODD)
    together = grown.generate(model, requests())
    decode = grown.programs["decode"]
    alone = [completion for one in requests() for completion in grown.generate(model, [one])]
    assert alone == together, "tokens and log-probabilities, bit for bit"
    assert grown.programs["decode"] is decode


@pytest.mark.slow
def test_features_that_others_use_change_nothing_bit_for_bit(grown: Engine) -> None:
    model, plain = model_on("1,4,1", CONFIG, ODD), mixed_requests()
    bare = Engine(grown.config, grown.mesh)
    # The same capacities without the features, so that nothing but the features tells the programs apart.
    kept = ("max_new_tokens", "stop_token_ids", "n_generations")
    bare.prepare(
        model,
        [
            dataclasses.replace(one, params=SamplingParams(**{name: getattr(one.params, name) for name in kept}))
            for one in requests()
        ],
    )
    assert bare.generate(model, plain) == grown.generate(model, plain)
    assert bare.sizes is not None and grown.sizes is not None
    features = {name: getattr(grown.sizes, name) for name in sampling_sizes([])}
    assert dataclasses.replace(bare.sizes, **features) == grown.sizes != bare.sizes


@pytest.mark.parametrize(
    ("params", "inputs", "outputs"),
    [
        pytest.param({"repetition_penalty": 1.1}, ("history", "prompt_length", "penalties"), 0, marks=pytest.mark.slow),
        ({"logit_bias": ((1, 1.0),)}, ("bias_ids", "bias"), 0),
        pytest.param({"allowed_token_ids": (1, 2)}, ("allowed_ids",), 0, marks=pytest.mark.slow),
        pytest.param({"stop_token_ids": (1,), "min_tokens": 1}, ("stop_from",), 0, marks=pytest.mark.slow),
        pytest.param({"top_logprobs": 2}, (), 4, marks=pytest.mark.slow),  # an id and a log-probability of each
        pytest.param({"temperature": 1.0, "min_p": 0.1}, ("top_k", "top_p", "log_min_p"), 0, marks=pytest.mark.slow),
        pytest.param({"top_k": 3, "top_p": 0.5}, (), 0, marks=pytest.mark.slow),  # greedy
        pytest.param({"stop_token_ids": (1,), "ignore_eos": True}, (), 0, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_feature_is_in_the_program_only_when_used(
    params: dict[str, Any], inputs: tuple[str, ...], outputs: int
) -> None:
    model, engine = model_on("1,1,1"), Engine(EngineConfig(), mesh_of("1,1,1"))

    def sizes(requests: list[Request]) -> tuple[int, int]:
        """The numbers that a replica is given, and those that it returns for each token."""
        engine.prepare(model, requests)
        compiled = engine.programs["decode"]._compiled
        return compiled.args_info[0][-1].shape[-1], compiled.out_info[-1].shape[1]

    plain, featured = [request(0, 9, 4)], [request(0, 9, 4, **params)]
    before_in, before_out = sizes(plain)
    bare = engine.programs["decode"]
    after_in, after_out = sizes(featured)
    assert engine.sizes is not None
    given = DecodeBatch.empty(engine.sizes, 1).arrays()
    added = sum(given[name][0].size for name in inputs)
    assert (after_in - before_in, after_out - before_out) == (added, outputs)
    if not inputs and not outputs:
        assert engine.programs["decode"] is bare, "an argument, so nothing is compiled again"
    # What is there stays: the same requests as before need no other program.
    decode = engine.programs["decode"]
    sizes(plain)
    assert engine.programs["decode"] is decode


@pytest.mark.slow
def test_other_lists_need_no_other_program() -> None:
    model, engine = model_on("1,1,1"), Engine(EngineConfig(), mesh_of("1,1,1"))
    programs = set()
    for count in (1, 5, 8):
        ids = tuple(range(count))
        engine.prepare(
            model,
            [request(0, 9, 4, allowed_token_ids=ids, logit_bias=tuple((i, 1.0 + i) for i in ids), top_logprobs=2)],
        )
        programs.add(id(engine.programs["decode"]))
    assert len(programs) == 1


def test_what_was_not_prepared_for() -> None:
    model, engine = model_on("1,1,1"), Engine(EngineConfig(), mesh_of("1,1,1"))
    engine.prepare(model, [request(0, 9, 4)])
    launches = len(engine.ledger.launches)
    for asked, needed in (({"top_logprobs": 2}, "top_logprobs 2"), ({"prompt_logprobs": True}, "prompt_logprobs 1")):
        with pytest.raises(
            CapacityError, match=f"prompt 0 needs {needed} of the sampler; the programs were built with"
        ):
            next(engine.stream(model, [request(0, 9, 4, **asked)]))
    assert len(engine.ledger.launches) == launches


@pytest.mark.slow
def test_many_most_probable_tokens_of_a_split_vocabulary() -> None:
    # More than one device has, and all there are.
    engine = Engine(EngineConfig(layout={"tensor": 4}), mesh_of("1,4,1"), vocab_size=18)
    model = model_on("1,4,1", CONFIG, ODD)
    asked = [request(0, 9, 3, top_logprobs=18), request(1, 5, 3, temperature=1.0, top_logprobs=1)]
    want, got = oracle_completions(model, asked, vocab_size=18), engine.generate(model, asked)
    check(want, got)
    assert [[len(tops) for tops in c.top_logprobs] for c in got] == [[18] * 3, [1] * 3]
    for have, expect in zip(got, want, strict=True):
        assert [[i for i, _ in tops] for tops in have.top_logprobs] == [[i for i, _ in t] for t in expect.top_logprobs]
