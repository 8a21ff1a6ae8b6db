"""Cases that are drawn, on several processes: one launch of processes answers many."""

import dataclasses
import random

import pytest

from lockstep.types import Completion, FinishReason
from tests.multiprocess.harness import run_processes
from tests.unit.engine.combinations import CONFIGS, Case, answer, check, pool
from tests.unit.engine.models import FAMILIES


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


def body(hosts, cases):
    return [
        [dataclasses.asdict(completion) for completion in answer(Case(family, config, tuple(prompts)), hosts)]
        for family, config, prompts in cases
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "devices"), [(2, 2), pytest.param(4, 1, marks=pytest.mark.nightly)])
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
        got = [
            Completion(**c | {"tokens": tuple(c["tokens"]), "finish_reason": FinishReason(c["finish_reason"])})
            for c in answers
        ]
        ties += check(case, got)
        tokens += sum(len(c.tokens) for c in got)
    print(f"{ties} ties in {tokens} tokens of {len(cases)} cases on {processes} processes")
