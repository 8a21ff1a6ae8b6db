"""What each mesh shape costs, with plans that are made up."""

import dataclasses
import io
from types import SimpleNamespace
from unittest import mock

import jax
import pytest
from rich.console import Console

from lockstep.errors import CapacityError, CompilerError, HbmError
from lockstep.models import POLICIES
from lockstep.placement import make_mesh
from lockstep.plan import alternatives, train_step
from lockstep.plan.alternatives import mesh_costs, print_meshes, print_remat, remat_costs
from lockstep.plan.step_flops import step_flops
from lockstep.xla import CollectiveSum
from tests.unit.plan.test_train_step import compiled, workload_of
from tests.unit.plan.test_train_step import workload as with_parallelism

GATHERS = CollectiveSum(kind="all-gather", count=7, bytes=3 * 2**30, devices=16, crosses_hosts=True)
INSIDE = CollectiveSum(kind="reduce-scatter", count=2, bytes=2**30, devices=4, crosses_hosts=False)
ROLLOUT, SAMPLES = SimpleNamespace(steps=2), SimpleNamespace(steps=None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    mesh_shape: str = "1,2,-1"
    sampling: list = dataclasses.field(default_factory=lambda: [ROLLOUT, SAMPLES])


def sizing():
    return SimpleNamespace(
        layout={"tensor": 1}, estimate=SimpleNamespace(total_s=6.0), predicted=SimpleNamespace(total=2**33)
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
    two = [SimpleNamespace(total=2**30), SimpleNamespace(total=2**31)]
    with (
        mock.patch.object(alternatives, "make_plan", plan),
        mock.patch.object(alternatives, "predict_sampling", predicted),
        mock.patch.object(alternatives, "train_time", lambda plan: time),
        mock.patch.object(alternatives, "moments", lambda plan: two),
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


class OnCpu:
    """Compiles for this machine; the fourth program it refuses, for a CPU has no host memory beside its own."""

    def __init__(self):
        self.programs = 0

    def __call__(self, lowered, name):
        self.programs += 1
        if self.programs == 4:
            raise CompilerError("no host memory here")
        found = lowered.compile().memory_analysis()
        sizes = {name: getattr(found, f"{name}_size_in_bytes") for name in ("argument", "temp", "generated_code")}
        # What the compiler for CPUs calls the peak is without temporaries.
        memory = {f"{name}_size_in_bytes": size for name, size in sizes.items()}
        memory["peak_memory_in_bytes"] = found.argument_size_in_bytes + found.temp_size_in_bytes
        return SimpleNamespace(memory=SimpleNamespace(**memory))


@pytest.mark.slow
def test_each_policy_is_compiled_and_what_keeps_less_computes_more():
    workload = workload_of()
    workload = dataclasses.replace(workload, model=dataclasses.replace(workload.model, num_layers=3))
    found = remat_costs(workload, SimpleNamespace(devices=jax.devices()[:1]), OnCpu(), 2**40)
    costs = {cost.policy: cost for cost in found}
    assert tuple(costs) == POLICIES
    assert costs["nothing"].needed > costs["dots"].needed > costs["full"].needed > 0
    assert costs["nothing"].flops < costs["dots"].flops < costs["full"].flops == costs["offload"].flops
    assert costs["full"].fits and costs["offload"].error == "no host memory here"


def test_a_line_for_each_with_the_verdict_and_operations_in_the_bubble_of_stages_too(monkeypatch):
    def refuse(*rest, **options):
        raise HbmError("too large", needed=3 * 2**30, limit=2**30)

    monkeypatch.setattr(alternatives, "compile_step", refuse)
    workload, console = dataclasses.replace(workload_of(), mesh_shape="pp=2"), Console(file=io.StringIO(), width=120)
    costs = remat_costs(workload, SimpleNamespace(devices=jax.devices()[:2]), None, 2**30)
    print_remat(costs, console)
    lines = console.file.getvalue().splitlines()
    assert [line.split()[0] for line in lines[1:5]] == list(POLICIES)
    assert all("3.00 GiB" in line and line.endswith("does not fit") for line in lines[1:5])
    for cost in costs:
        model = dataclasses.replace(workload.model, gradient_checkpointing=cost.policy)
        # All rows of a stage at once: two microbatches in three steps.
        assert cost.flops == step_flops(dataclasses.replace(workload, model=model), vocab_blocks=False, idle=1 / 3)


def test_each_policy_has_the_rows_that_auto_takes_with_it(monkeypatch):
    """Made-up steps of 8 rows: `full` needs 80, 50, 30, 20 MiB with 1, 2, 4, 8 microbatches, and others more."""
    more = {"nothing": 71 << 20, "dots": 25 << 20, "full": 0, "offload": 0}

    def compile_step(workload, *rest, microbatches, length=None):
        step = compiled(microbatches=microbatches)
        step.memory.peak_memory_in_bytes += more[workload.model.gradient_checkpointing]
        if microbatches == 1:
            raise HbmError("too large", needed=step.memory.peak_memory_in_bytes, limit=90 << 20)
        return step

    for module in (alternatives, train_step):
        monkeypatch.setattr(module, "compile_step", compile_step)
    monkeypatch.setattr(train_step, "saved_bytes", lambda *rest: 0)
    topology, console = SimpleNamespace(devices=jax.devices()[:1]), Console(file=io.StringIO(), width=120)
    asked = dataclasses.replace(with_parallelism("auto", 60 << 20), mesh_shape="1,1,1")
    costs = remat_costs(asked, topology, None, 90 << 20)
    assert [(cost.rows, cost.needed >> 20, cost.fits) for cost in costs] == [
        (1, 91, False), (2, 55, True), (4, 50, True), (4, 50, True)
    ]  # fmt: skip
    print_remat(costs, console)
    lines = console.file.getvalue().splitlines()
    assert lines[1].endswith("1 row   does not fit") and lines[2].endswith("2 rows  fits")
    mesh = make_mesh("1,1,1", topology.devices)
    for cost in costs[1:]:
        model = dataclasses.replace(asked.model, gradient_checkpointing=cost.policy)
        planned = dataclasses.replace(asked, model=model)
        plan = train_step.plan_largest_step(planned, mesh, train_step.make_state(planned, mesh), None, 90 << 20)
        assert (plan.microbatches, plan.flops) == (8 // cost.rows, cost.flops), "as the plan above it"
