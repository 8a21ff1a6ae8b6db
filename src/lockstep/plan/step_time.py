"""The least time of a train step, by its compiled program or by sizes alone, and the time to expect of it."""

import dataclasses
import math
from typing import Final

import jax.numpy as jnp

from lockstep.models import layer_products, recomputes_layers
from lockstep.placement import PP, make_mesh
from lockstep.placement.device import chip_of, tile_of
from lockstep.plan.fsdp import fsdp_floor
from lockstep.plan.planner import Plan
from lockstep.plan.step_flops import flops_on
from lockstep.plan.train_step import make_state
from lockstep.plan.workload import Workload
from lockstep.xla import Topology

EXPOSED_BYTES: Final = 1.38e-3
"""Bytes per floating-point operation that go between memory and core while no matrix product runs: what published steps
take longer than at best, times the bandwidth of their chips, over their operations. The mean of ten steps
(``benchmarks.published``), whose own are 0.9 to 1.6e-3."""
EXPECTED_ERRORS: Final = (-0.06, 0.08)
"""The lowest and the highest relative error of `StepTime.expected_s` for these steps, each by the nine others."""
DECODE_OVER_BEST: Final = 1.86
"""Seconds of a published decode step over the least: the geometric mean of five (``benchmarks.published``)."""
DECODE_ERRORS: Final = (-0.23, 0.30)
"""The lowest and the highest relative error of that for these steps, each by the four others."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTime:
    """The least time of a train step, each part as if the others took no time."""

    compute_s: float  # seconds of the matrix products at the chip's peak
    memory_s: float  # seconds of reading and writing what has to be read and written
    collectives_s: float  # seconds of receiving what has to be received over the links
    tokens: int
    slices_s: float = 0.0  # seconds of what slices exchange; 0 where there is one, or no published rate
    slices_bytes: int = 0  # bytes that a device receives for that
    exact_s: float = 0.0  # seconds of the forward pass that `numerics: exact` has beside that of the gradient
    merge_s: float = 0.0  # seconds of those in which it merges adapters
    merge_bytes: int = 0  # bytes that a device reads and writes for that
    exposed_s: float = 0.0  # seconds beyond the least ones that published steps take, by `EXPOSED_BYTES`

    @property
    def step_s(self) -> float:
        """The seconds of a step: the longest part, for at best all overlap; and the pass of `numerics: exact`."""
        return max(self.compute_s, self.memory_s, self.collectives_s, self.slices_s) + self.exact_s

    @property
    def expected_s(self) -> float:
        """The seconds to expect of a step, with the relative errors `EXPECTED_ERRORS`."""
        return self.step_s + self.exposed_s


def train_time(plan: Plan) -> StepTime | None:
    """The least time of the train step; None where none is planned."""
    if plan.training is None or plan.workload.training is None:
        return None
    time = _time(
        plan,
        microbatches=plan.training.microbatches,
        idle=plan.training.bubble,
        flops=plan.training.flops,
        received=sum(collective.bytes for collective in plan.training_collectives if not collective.crosses_slices),
        between=sum(collective.bytes for collective in plan.training_collectives if collective.crosses_slices),
    )
    if not plan.workload.model.exact:
        return time
    merge_s, merge_bytes = _exact_merge(plan)
    exact_s = _exact_forward_s(plan, time.tokens) + merge_s
    return dataclasses.replace(time, exact_s=exact_s, merge_s=merge_s, merge_bytes=merge_bytes)


def least_time(workload: Workload, topology: Topology) -> StepTime:
    """The least time of a train step by sizes alone: nothing is compiled, nor is it known whether it fits.

    As `train_time`, with what FSDP has to receive (`fsdp_floor`) in place of what the program does receive, and without
    what slices exchange and ``numerics: exact`` adds: never more than it.
    """
    training = workload.training
    assert training is not None
    mesh = make_mesh(workload.mesh_shape, topology.devices)
    state, chip = make_state(workload, mesh), chip_of(topology.devices[0])
    microbatches = training.microbatches(mesh) * mesh.shape.get(PP, 1)
    idle = training.bubble(mesh)
    itemsize = training.trainer.precision.compute.itemsize
    received = fsdp_floor(state.structs.model, mesh.shape, microbatches=microbatches, itemsize=itemsize, bubble=idle)
    plan = Plan(
        workload=workload, topology=topology, mesh_shape=dict(mesh.shape), chip=chip, memory=chip.memory,
        parameters=state.parameters, optimizer=state.optimizer, frozen=state.parameters - state.trained,
        infeasibilities=(),
    )  # fmt: skip
    flops = flops_on(workload, mesh)
    return _time(plan, microbatches=microbatches, idle=idle, flops=flops, received=received, between=0)


def _time(plan: Plan, *, microbatches: int, idle: float, flops: float, received: int, between: int) -> StepTime:
    """The times of a step with so many operations on all devices, of which each receives so many bytes."""
    chip, training = plan.chip, plan.workload.training
    assert training is not None
    trainer, devices = training.trainer, math.prod(plan.mesh_shape.values())
    trained = plan.parameters - plan.frozen
    # In the compute type, in which they are gathered; most of the adapters beside frozen weights is whole already.
    frozen = plan.frozen / jnp.dtype(plan.workload.dtype).itemsize * plan.mesh_shape["fsdp"]
    whole = trained / trainer.precision.param.itemsize * (1 if plan.frozen else plan.mesh_shape["fsdp"]) + frozen
    whole *= trainer.precision.compute.itemsize
    passes = 3 if recomputes_layers(plan.workload.model.gradient_checkpointing) else 2
    moved = 2 * (trained + plan.optimizer) + microbatches / (1 - idle) * passes * whole
    return StepTime(
        compute_s=flops / devices / chip.flops,
        memory_s=moved / chip.bandwidth,
        collectives_s=received / chip.link.bandwidth,
        tokens=trainer.train_batch_size * training.sequences_per_row * training.length,
        slices_s=between / chip.dcn if chip.dcn else 0.0,
        slices_bytes=between,
        exposed_s=EXPOSED_BYTES * flops / devices / chip.bandwidth,
    )


def _exact_forward_s(plan: Plan, tokens: int) -> float:
    """The least seconds of the exact forward pass, which reads all weights again for each tile of rows.

    Where layers are computed again for their gradients it takes the place of their first computation.
    """
    config, split = plan.workload.model, plan.mesh_shape.get("tp", 1)
    assert plan.workload.training is not None
    weights = (layer_products(config) + config.hidden_dim * plan.workload.vocab_size) / split
    rows = tokens * split / math.prod(plan.mesh_shape.values())
    compute = plan.workload.training.trainer.precision.compute
    tile = tile_of(math.ceil(rows), compute, plan.topology.devices[0].platform)
    read = weights * compute.itemsize * math.ceil(rows / tile)
    instead = layer_products(config) / split if recomputes_layers(config.gradient_checkpointing) else 0
    return max(2 * weights * rows / plan.chip.flops, read / plan.chip.bandwidth) - 2 * instead * rows / plan.chip.flops


def _exact_merge(plan: Plan) -> tuple[float, int]:
    """The least seconds in which the forward passes of a step with exact numerics merge adapters, and the bytes that a
    device reads and writes for that: its blocks of the weights, the merged ones, and sums in float32.

    On CPU a sum is written and read once; elsewhere for every 8 numbers of the rank (`low_rank_product`).
    """
    training, config = plan.workload.training, plan.workload.model
    if training is None or plan.training is None or training.lora is None or not config.exact:
        return 0.0, 0
    pairs, rank = training.lora.shapes(config), training.lora.r
    sides = [(pair.a.array.shape, pair.b.array.shape) for pair in pairs.values()]
    # One side of each matrix is that of A, the other that of B: their product, with those of the stack counted once.
    adapted = sum(
        math.prod(a) * math.prod(b) // (rank**2 * math.prod(a[: 2 if name.startswith("expert_") else 1]))
        for name, (a, b) in zip(pairs, sides, strict=True)
    )
    own = adapted * plan.training.microbatches / math.prod(plan.mesh_shape.values())
    own *= plan.mesh_shape.get("dp", 1) * plan.mesh_shape.get("dcn", 1)  # copies
    sums = 1 if plan.topology.devices[0].platform == "cpu" else math.ceil(rank / 8)
    moved = own * (2 * training.trainer.precision.compute.itemsize + 8 * sums)
    return max(2 * rank * own / plan.chip.flops, moved / plan.chip.bandwidth), round(moved)
