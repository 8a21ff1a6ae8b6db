"""Cases that are drawn, on several processes: one launch of processes answers many."""

import dataclasses
import random

import pytest

from lockstep.engine import Engine
from lockstep.types import Completion, FinishReason
from tests.multiprocess.harness import run_processes
from tests.oracle import assert_same_logprobs, assert_same_tokens, oracle_completions
from tests.unit.engine.combinations import CONFIGS, Case, answer, check, pool
from tests.unit.engine.models import FAMILIES, mesh_of, model_on
from tests.unit.engine.random_engines import random_case

RANDOM_EXPERTS = (5, 9, 33)
"""Numbers of random engines on four devices: 9 experts split by width, 8 shared out over both hosts, 5 with `auto`."""


def draw(count, seed):
    """Every family and every configuration at least once, where there are enough cases."""
    rng = random.Random(seed)
    families = sorted(FAMILIES)
    return [
        Case(
            families[i % len(families)],
            i % len(CONFIGS),
            tuple(rng.sample(range(len(pool())), rng.randint(1, len(pool())))),
        )
        for i in range(count)
    ]


def completions(answers):
    return [
        Completion(**c | {"tokens": tuple(c["tokens"]), "finish_reason": FinishReason(c["finish_reason"])})
        for c in answers
    ]


def body(hosts, cases):
    return [
        [dataclasses.asdict(completion) for completion in answer(Case(family, config, tuple(prompts)), hosts)]
        for family, config, prompts in cases
    ]


@pytest.mark.nightly  # in make slow: test_same_tokens.py
@pytest.mark.parametrize(("processes", "devices"), [(2, 2), (4, 1)])
def test_tokens_depend_on_the_request_alone_on_several_processes(processes, devices):
    cases = draw(12, processes)
    results = run_processes(
        body,
        processes=processes,
        devices=devices,
        timeout_s=540,
        args=([[case.family, case.config, case.prompts] for case in cases],),
    )
    assert all(result == results[0] for result in results[1:])
    ties = tokens = 0
    for case, answers in zip(cases, results[0], strict=True):
        got = completions(answers)
        ties += check(case, got)
        tokens += sum(len(c.tokens) for c in got)
    print(f"{ties} ties in {tokens} tokens of {len(cases)} cases on {processes} processes")


def random_body(hosts, numbers):
    answers = []
    for number in numbers:
        case = random_case(number)
        model = model_on(case.mesh, case.model, case.vocab)
        got = Engine(case.engine, mesh_of(case.mesh)).generate(model, case.requests, hosts=hosts)
        answers.append([dataclasses.asdict(completion) for completion in got])
    return answers


@pytest.mark.nightly  # in make slow: test_same_tokens.py
def test_random_engines_with_experts_answer_alike_on_two_processes():
    first, second = run_processes(random_body, processes=2, devices=2, timeout_s=300, args=(RANDOM_EXPERTS,))
    assert first == second
    for number, answers in zip(RANDOM_EXPERTS, first, strict=True):
        case, got = random_case(number), completions(answers)
        want = oracle_completions(
            model_on("1,1,1", case.model, case.vocab), case.requests, length=case.model.max_seq_len
        )
        ties = assert_same_tokens(want, got)
        assert ties <= 1, "a second tie in so few tokens is an error"
        if not ties:
            assert_same_logprobs(want, got)
