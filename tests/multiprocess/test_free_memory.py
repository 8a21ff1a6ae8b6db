"""Hosts that have different memory left choose the same: what the device with least free memory allows."""

import dataclasses

import pytest

from lockstep.engine import Engine, EngineConfig
from lockstep.placement import make_mesh
from lockstep.types import Completion, FinishReason
from tests import tiny
from tests.multiprocess.harness import run_processes, run_threads
from tests.oracle import assert_same_tokens, oracle_completions


def least(hosts, values):
    with hosts.scope("least") as scope:
        got = scope.all_min("free", values[hosts.index])
        scope.barrier("end")
    return got


def test_least():
    assert run_threads(least, 3, [2**62, 7, 12]) == [7, 7, 7]


def all_requests():
    return tiny.requests(lengths=(1, 5, 9, 17, 20, 3, 12, 16))


def body(hosts, share):
    mesh = make_mesh("auto")
    model = (tiny.CONFIG, tiny.placed_weights(mesh))
    options = {"layout": {"tensor": 2}, "page_size": 8, "max_prefill_size": 8}
    roomy = Engine(EngineConfig(**options), mesh)
    roomy.prepare(model, all_requests(), free=2**40)
    need = roomy.sizing.compiled
    # The last process has less: a part of the KV cache does not fit there.
    fits = need.total - int(share * need.pool) if hosts.index == hosts.count - 1 else 4 * need.total
    free = int(fits / 0.9)
    engine = Engine(EngineConfig(memory_bytes_per_device=free, **options), mesh)
    completions = engine.generate(model, all_requests(), hosts=hosts)
    return {
        "own": free,
        "agreed": engine.sizing.free,
        "pages": [roomy.sizes.pages, engine.sizes.pages],
        "text": engine.sizing.describe(),
        "completions": [dataclasses.asdict(completion) for completion in completions],
    }


@pytest.mark.slow
def test_hosts_with_different_memory_choose_the_smaller():
    results = run_processes(body, timeout_s=180, args=(0.4,))
    assert results[0]["own"] > results[1]["own"]
    assert [result["agreed"] for result in results] == [results[1]["own"]] * 2
    assert results[0]["text"] == results[1]["text"]
    print(results[0]["text"])
    for result in results:
        before, now = result["pages"]
        assert 2 <= now < before
    got = [
        Completion(**c | {"tokens": tuple(c["tokens"]), "finish_reason": FinishReason(c["finish_reason"])})
        for c in results[0]["completions"]
    ]
    expected = oracle_completions((tiny.CONFIG, tiny.numpy_weights()), all_requests())
    assert assert_same_tokens(expected, got) == 0
