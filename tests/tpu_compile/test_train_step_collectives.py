"""What the train step of Llama-3-8B receives on a v5p-64, against what FSDP needs, by the TPU compiler."""

import dataclasses

import pytest

pytest.importorskip("libtpu", reason="the extra [plan] brings the TPU compiler")

from benchmarks.tpu_train_step import CASES, figures, train_step
from lockstep.plan.cache import CompileCache
from lockstep.plan.topology import topology

LAYERS = 2


@pytest.mark.slow
def test_weights_are_gathered_twice_and_gradients_scattered_once_per_microbatch(monkeypatch):
    """The layers are a loop, so that a few tell what many receive; an all-reduce of a gradient would be twice it."""
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    case = next(dataclasses.replace(case, layers=LAYERS) for case in CASES if case.model == "llama-3-8b")
    found = topology(case.slice_name)
    cache = CompileCache(case.slice_name, None, lambda *_: None)
    assert 0.9 < figures(case, found, train_step(case, found, cache))["fsdp_ratio"] < 1.15
