"""What each mesh shape costs, with plans that are made up."""

import dataclasses
import io
from types import SimpleNamespace
from unittest import mock

import pytest
from rich.console import Console

from lockstep.errors import CapacityError
from lockstep.main.plan import meshes
from lockstep.main.plan.collectives import CollectiveSum
from lockstep.main.plan.meshes import mesh_costs, print_meshes

GATHERS = CollectiveSum(kind="all-gather", count=7, bytes=3 * 2**30, devices=16, crosses_hosts=True)
INSIDE = CollectiveSum(kind="reduce-scatter", count=2, bytes=2**30, devices=4, crosses_hosts=False)
ROLLOUT, SAMPLES = SimpleNamespace(steps=2), SimpleNamespace(steps=None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    mesh_shape: str = "1,2,-1"
    sampling: list = dataclasses.field(default_factory=lambda: [ROLLOUT, SAMPLES])


def sizing():
    return SimpleNamespace(
        layout={"tensor": 1},
        estimate=SimpleNamespace(total_s=6.0),
        predicted=SimpleNamespace(total=2**33),
    )


def costs(hosts, predict):
    """What `mesh_costs` finds where the planner and the engine say what is given here, and what it asked them."""
    asked = []

    def plan(workload, topology, cache, calibration):
        asked.append((workload.mesh_shape, workload.sampling))
        return SimpleNamespace(
            workload=workload, mesh_shape={"dp": 1, "fsdp": 16, "tp": 1}, training_collectives=[GATHERS, INSIDE],
            resident=2**31, fits=True,
        )  # fmt: skip

    def predicted(workload, one, topology):
        asked.append((workload.mesh_shape, one))
        return predict()

    time = SimpleNamespace(compute_s=0.75, collectives_s=0.5, step_s=0.75)
    with (
        mock.patch.object(meshes, "make_plan", plan),
        mock.patch.object(meshes, "predict_sampling", predicted),
        mock.patch.object(meshes, "train_time", lambda plan: time),
        mock.patch.object(meshes, "moments", lambda plan: [SimpleNamespace(total=2**30), SimpleNamespace(total=2**31)]),
    ):
        return mesh_costs(Work(), SimpleNamespace(hosts=hosts), None), asked


@pytest.mark.parametrize(("hosts", "shapes"), [(4, ["auto", "host_local"]), (1, ["auto"])])
def test_each_shape_is_planned_with_its_rollout_and_one_host_has_one_mesh(hosts, shapes):
    found, asked = costs(hosts, sizing)
    assert asked == [each for shape in shapes for each in ((shape, []), (shape, ROLLOUT))]
    for cost in found:
        assert (cost.collectives, cost.received, cost.received_across_hosts) == (9, 2**32, 3 * 2**30)
        assert cost.needed == 2**31 + 2**33, "the rollout beside the training state is the worst moment"
        assert cost.layout == {"tensor": 1} and cost.rollout_s == 3.0, "two steps learn from a rollout"
        assert cost.update_s == 0.75 and cost.step_s == 3.75 and cost.fits
    console = Console(file=io.StringIO(), width=100)
    print_meshes(found, console)
    text = console.file.getvalue()
    assert [cost.mesh_shape for cost in found] == shapes
    assert text.count("3.00 GiB") == len(shapes) and text.count("3.75 s") == len(shapes)
    assert ("one host: host_local is the same mesh as auto" in text) == (hosts == 1)


def test_a_rollout_that_can_never_fit():
    def refused():
        raise CapacityError("too long")

    (cost,), _ = costs(1, refused)
    assert not cost.fits and cost.layout is None and cost.needed == 2**31
