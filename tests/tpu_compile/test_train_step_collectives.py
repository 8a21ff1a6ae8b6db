"""What the layers of Llama-3-8B receive in a train step on a v5p-64, against what FSDP needs, by the TPU compiler."""

import dataclasses

import pytest

pytest.importorskip("libtpu", reason="the extra [plan] brings the TPU compiler")

from benchmarks.tpu_train_step import CASES, train_step, workload_of
from lockstep.placement import make_mesh
from lockstep.plan.fsdp import fsdp_bytes
from lockstep.plan.train_step import make_state
from lockstep.xla import CompileCache, Hlo, collectives, topology

LAYERS = 2


@pytest.mark.nightly
def test_layers_gather_weights_twice_and_scatter_gradients_once_per_microbatch():
    """The floor is two gathers and one scatter; one gather more, or an all-reduced gradient, would be a third more."""
    case = next(dataclasses.replace(case, layers=LAYERS) for case in CASES if case.model == "llama-3-8b")
    found = topology(case.slice_name)
    summary = train_step(case, found, CompileCache(case.slice_name, None, lambda *_: None))
    workload, mesh = workload_of(case), make_mesh("auto", list(found.devices))
    assert workload.training is not None
    microbatches = workload.training.trainer.microbatches(mesh)
    layers = make_state(workload, mesh).structs.model.layers
    # Only what is in the loop over layers runs so often.
    in_layers = [one for one in collectives(Hlo(summary.text), mesh.size) if one.times % (LAYERS * microbatches) == 0]
    moved = fsdp_bytes(layers, mesh.shape, in_layers, microbatches=microbatches, itemsize=2)
    assert moved.ratio is not None and 0.9 < moved.ratio < 1.15
