"""What the train step of a published model receives on a slice, against what FSDP needs, by the TPU compiler."""

import dataclasses

import pytest

pytest.importorskip("libtpu", reason="the extra [plan] brings the TPU compiler")

from benchmarks.tpu_train_step import CASES, figures, train_step
from lockstep.plan.cache import CompileCache
from lockstep.plan.topology import topology

LAYERS = 2


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama-3-8b", pytest.param("llama-3.1-70b", marks=pytest.mark.nightly)])
def test_weights_are_gathered_twice_and_gradients_scattered_once_per_microbatch(model, monkeypatch):
    """The layers are a loop: a few tell what many receive. An all-reduce of a gradient would be twice its bytes."""
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    case = next(dataclasses.replace(case, layers=LAYERS) for case in CASES if case.model == model)
    found = topology(case.slice_name)
    cache = CompileCache(case.slice_name, None, lambda *_: None)
    assert 0.9 < figures(case, found, train_step(case, found, cache))["fsdp_ratio"] < 1.15
