"""Alternatives side by side: meshes, and rematerialisation policies."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jax.sharding import Mesh
from rich import box
from rich.table import Table

from lockstep.engine import Sizing
from lockstep.errors import CapacityError, CompilerError, HbmError
from lockstep.models import POLICIES
from lockstep.placement import data_shards, make_mesh
from lockstep.plan.planner import Plan, make_plan, predict_sampling
from lockstep.plan.step_flops import flops_on
from lockstep.plan.step_time import train_time
from lockstep.plan.summary import moments
from lockstep.plan.train_step import State, bytes_for_step, compile_step, largest_rows, make_state, peak, with_rows
from lockstep.plan.workload import Workload
from lockstep.printable import bytes_text, seconds_text
from lockstep.terminal import Console
from lockstep.xla import CompileCache, Topology

MESH_SHAPES = ("auto", "host_local")  # full-device FSDP; and data parallel over hosts with FSDP inside each


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshCost:
    """The cost of a train step, and of the rollout that it learns from, on a mesh at best."""

    mesh_shape: str
    sizes: Mapping[str, int]
    fits: bool
    needed: int  # bytes per device at the worst moment
    received: int  # bytes that a device receives in the collectives of the update
    received_across_hosts: int  # the part of `received` in collectives between devices of several hosts
    collectives: int
    compute_s: float  # seconds of the update's matrix products
    collectives_s: float  # seconds of the update's collectives
    update_s: float  # seconds of the update, see `StepTime.step_s`
    layout: Any = None
    rollout_s: float = 0.0  # seconds of the rollout per train step, prefill left out

    @property
    def step_s(self) -> float:
        """The seconds of rollout and update, one after the other."""
        return self.rollout_s + self.update_s


def mesh_costs(
    workload: Workload, topology: Topology, cache: CompileCache, calibration: str | None = None
) -> list[MeshCost]:
    """Compile the train step for each of `MESH_SHAPES`, which are one mesh on one host, and predict its rollout."""
    if calibration is not None:
        workload = workload.calibrated(calibration)
    costs = []
    for shape in MESH_SHAPES if topology.hosts > 1 else MESH_SHAPES[:1]:
        changed = dataclasses.replace(workload, mesh_shape=shape)
        plan = make_plan(dataclasses.replace(changed, sampling=[]), topology, cache, calibration)
        cost = update_cost(plan)
        for sampling in changed.sampling:
            if sampling.steps is not None and plan.mesh_shape:
                try:
                    sizing = predict_sampling(changed, sampling, topology)
                except CapacityError:
                    cost = dataclasses.replace(cost, fits=False)
                else:
                    cost = with_rollout(cost, sizing, plan.resident, sampling.steps)
        costs.append(cost)
    return costs


def update_cost(plan: Plan) -> MeshCost:
    """Return what the plan of a workload without sampling says of the update on its mesh."""
    time = train_time(plan)
    return MeshCost(
        mesh_shape=plan.workload.mesh_shape,
        sizes=plan.mesh_shape,
        fits=plan.fits,
        needed=max((moment.total for moment in moments(plan)), default=0),
        received=sum(collective.bytes for collective in plan.training_collectives),
        received_across_hosts=sum(
            collective.bytes for collective in plan.training_collectives if collective.crosses_hosts
        ),
        collectives=sum(collective.count for collective in plan.training_collectives),
        compute_s=0.0 if time is None else time.compute_s,
        collectives_s=0.0 if time is None else time.collectives_s,
        update_s=0.0 if time is None else time.step_s,
    )


def with_rollout(cost: MeshCost, sizing: Sizing, resident: int, steps: int) -> MeshCost:
    """Return the cost with that of a rollout, from which ``steps`` train steps learn."""
    return dataclasses.replace(
        cost,
        needed=max(cost.needed, resident + sizing.predicted.total),
        layout=sizing.layout,
        rollout_s=sizing.estimate.total_s / steps,
    )


def print_meshes(costs: list[MeshCost], console: Console) -> None:
    """Print a column per mesh."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("trainer.mesh_shape", no_wrap=True)
    for cost in costs:
        table.add_column(cost.mesh_shape, justify="right")

    table.add_row(", ".join(costs[0].sizes) or "mesh", *(", ".join(map(str, cost.sizes.values())) for cost in costs))
    table.add_row("HBM per device at the worst moment", *(bytes_text(cost.needed) for cost in costs))
    table.add_row("update: collectives", *(f"{cost.collectives:,}" for cost in costs))
    table.add_row("update: received per device", *(bytes_text(cost.received) for cost in costs))
    table.add_row("  of it across hosts", *(bytes_text(cost.received_across_hosts) for cost in costs))
    table.add_row("update: compute", *(seconds_text(cost.compute_s) for cost in costs))
    table.add_row("update: collectives, at best", *(seconds_text(cost.collectives_s) for cost in costs))
    table.add_row("update, at best", *(seconds_text(cost.update_s) for cost in costs))
    if any(cost.layout is not None for cost in costs):
        table.add_row("rollout, without prefill", *(seconds_text(cost.rollout_s) for cost in costs))
        table.add_row("step, at best", *(seconds_text(cost.step_s) for cost in costs))
    table.add_row("fits", *("yes" if cost.fits else "no" for cost in costs))
    console.print(table)
    if len(costs) == 1:
        console.print("one host: host_local is the same mesh as auto\n")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RematCost:
    """The train step with one policy."""

    policy: str
    rows: int  # rows of a device at a time: as configured, or for auto the most that fit
    needed: int  # bytes per device at the worst moment; 0 where the compiler does not say
    memory: int  # bytes of a device that programs may use
    flops: float  # the floating-point operations of a step over all devices, those in a bubble among them
    error: str | None = None  # why it cannot run; None where nothing but `memory` may be in its way

    @property
    def fits(self) -> bool:
        return self.error is None and self.needed <= self.memory


def remat_costs(workload: Workload, topology: Topology, cache: CompileCache, memory: int) -> list[RematCost]:
    """Compile the train step with every policy, each with rows of its own where the configuration leaves them open."""
    mesh = make_mesh(workload.mesh_shape, topology.devices)
    costs = []
    for policy in POLICIES:
        changed = dataclasses.replace(
            workload, model=dataclasses.replace(workload.model, gradient_checkpointing=policy)
        )
        costs.append(_remat_cost(changed, mesh, cache, memory))
    return costs


def _remat_cost(workload: Workload, mesh: Mesh, cache: CompileCache, memory: int) -> RematCost:
    assert workload.training is not None
    trainer, state = workload.training.trainer, make_state(workload, mesh)
    every = trainer.train_batch_size // data_shards(mesh)
    rows, limit = every // workload.training.microbatches(mesh), bytes_for_step(workload, state, memory)
    needed, error = 0, None
    try:
        needed, fits = _attempt(workload, mesh, state, cache, limit, every // rows)
        if not fits and trainer.per_device_parallelism == "auto":
            rows = largest_rows(workload, mesh, state, cache, limit, needed) or 1
            needed, fits = _attempt(workload, mesh, state, cache, limit, every // rows)
        needed, error = needed + state.reference, None if fits else "does not fit"
    except CompilerError as refused:
        error = str(refused)
    return RematCost(
        policy=str(workload.model.gradient_checkpointing),
        rows=rows,
        needed=needed,
        memory=memory,
        flops=flops_on(with_rows(workload, rows), mesh),
        error=error,
    )


def _attempt(
    workload: Workload, mesh: Mesh, state: State, cache: CompileCache, limit: int, microbatches: int
) -> tuple[int, bool]:
    """The bytes of the train step, and whether it fits."""
    try:
        needed = peak(compile_step(workload, mesh, state, cache, microbatches=microbatches))
    except HbmError as refused:
        return refused.needed, False
    return needed, needed <= limit


def print_remat(costs: list[RematCost], console: Console) -> None:
    """Print a line per policy."""
    least = min(cost.flops for cost in costs)
    console.print("model.gradient_checkpointing: HBM per device in the train step, operations, and rows at a time")
    for cost in costs:
        size = bytes_text(cost.needed) if cost.needed else "-"
        rows = f"{cost.rows:>4} row{'s' if cost.rows != 1 else ' '}"
        verdict = "fits" if cost.fits else cost.error or "does not fit"
        console.print(f"  {cost.policy:<8} {size:>11}  {cost.flops / least:.2f} x  {rows}  {verdict}")
    console.print()
