"""A plan in numbers: what the tables show and what ``--json`` writes."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Final

from lockstep.engine import layout_text
from lockstep.plan.planner import Plan, SamplingPlan
from lockstep.plan.step_time import DECODE_ERRORS, DECODE_OVER_BEST, EXPECTED_ERRORS, StepTime, train_time
from lockstep.plan.train_step import TrainStepPlan, peak
from lockstep.training import SLOW_STEP_S, CheckpointerConfig
from lockstep.xla import CollectiveSum, vmem

TRAINING = "training step"

WRITTEN_AS: Final = {"reshard": "relay", "copy_pages": "fork", "page_copies": "forks", "idle_replicas": "resting"}
"""Keys of ``--json`` whose program or capacity has another name in the code: readers of the file know these."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Moment:
    """The memory of a device at one moment of a run."""

    name: str
    parts: Mapping[str, int]  # bytes per device by what they are for, with the same keys at every moment
    memory: int

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def headroom(self) -> int:
        """The bytes that are left; negative where the parts do not fit."""
        return self.memory - self.total


def moments(plan: Plan) -> list[Moment]:
    """The moments that could need most memory: the train step, and each round of sampling beside the training state."""
    state = {"parameters": plan.parameters, "optimizer": plan.optimizer, "reference model": plan.reference}
    moments_ = []
    if plan.training is not None:
        code = plan.training.summary.memory.generated_code_size_in_bytes
        parts = state | {
            "batch": plan.training.batch,
            "activations": plan.training.activations,
            "KV pages": 0,
            "decode weights": 0,
            "temporaries": plan.training.temporaries - code,
            "more while weights move": 0,
            "programs": code,
        }
        moments_.append(Moment(name=TRAINING, parts=parts, memory=plan.memory))
    for sampling in plan.sampling:
        need = sampling.sizing.compiled or sampling.sizing.predicted
        step = plan.training.summary.memory.generated_code_size_in_bytes if plan.training else 0
        parts = state | {
            "batch": plan.training.batch if plan.training else 0,
            "activations": 0,
            "KV pages": need.pool,
            "decode weights": need.weights,
            # The footprint counts the code of the larger program among the temporaries.
            "temporaries": max(0, need.temporaries - sampling.code),
            # The weights are resharded before there is a page pool.
            "more while weights move": max(0, need.reshard - need.pool - need.temporaries),
            "programs": sampling.code + step,
        }
        moments_.append(Moment(name=sampling.workload.name or "sampling", parts=parts, memory=plan.memory))
    return moments_


@dataclasses.dataclass(frozen=True, kw_only=True)
class StopTime:
    """The time from SIGTERM to the end of the save, at worst."""

    save_s: float  # seconds that the host which writes most of a checkpoint takes
    steps: int  # number of train steps until all hosts have stopped
    step_s: float  # the least seconds of a step
    grace_s: float  # seconds that SIGTERM leaves

    @property
    def seconds(self) -> float:
        """The seconds where no other save is under way: nothing is lost."""
        return self.steps * self.step_s + self.save_s

    @property
    def with_pending_s(self) -> float:
        """The seconds where a save began just before, which is waited for."""
        return max(self.steps * self.step_s, self.save_s) + self.save_s


def stop_time(plan: Plan) -> StopTime:
    """The time that SIGTERM has to leave."""
    assert plan.workload.training is not None
    time = train_time(plan)
    step_s = 0.0 if time is None else time.step_s
    return StopTime(
        save_s=plan.checkpoint / plan.write_bandwidth,
        steps=1 if step_s > SLOW_STEP_S else 2,
        step_s=step_s,
        grace_s=(plan.workload.training.trainer.checkpointer or CheckpointerConfig()).grace_s,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutStep:
    """The least time of a train step with its share of the rollout that it learns from."""

    rollout_s: float  # seconds of the rollout, prefill left out, per train step
    update_s: float

    @property
    def step_s(self) -> float:
        return self.rollout_s + self.update_s


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunCost:
    """The expected cost of all steps of a run, without start, samples, checkpoints and waiting."""

    steps: int
    step_s: float  # seconds to expect of a step, its share of a rollout among them
    chip_hours: float
    dollars: float | None  # by the rate that the user gave; None without one


def run_cost(plan: Plan) -> RunCost | None:
    """The cost of all steps; None where there is no train step."""
    time, split = train_time(plan), rollout_step(plan)
    if time is None or plan.workload.training is None:
        return None
    steps = plan.workload.training.trainer.num_train_steps
    step_s = time.expected_s + (0.0 if split is None else DECODE_OVER_BEST * split.rollout_s)
    hours, rate = steps * step_s * plan.topology.chips / 3600, plan.dollars_per_chip_hour
    return RunCost(steps=steps, step_s=step_s, chip_hours=hours, dollars=None if rate is None else rate * hours)


def rollout_step(plan: Plan) -> RolloutStep | None:
    """The least time of a train step and its rollout; None where no train step learns from one."""
    time = train_time(plan)
    for sampling in plan.sampling:
        if time is not None and sampling.workload.steps is not None:
            return RolloutStep(
                rollout_s=sampling.sizing.estimate.total_s / sampling.workload.steps, update_s=time.step_s
            )
    return None


def as_json(plan: Plan) -> dict[str, Any]:
    """The plan as ``--json`` writes it; its keys stay as they are when something is renamed in the code."""
    time = train_time(plan)
    split = rollout_step(plan)
    stop, cost = None if plan.training is None else stop_time(plan), run_cost(plan)
    every = moments(plan)
    worst = max(every, key=lambda moment: moment.total, default=None)
    return {
        "command": plan.workload.command,
        "topology": {
            "name": plan.topology.name,
            "grid": list(plan.topology.grid),
            "chips": plan.topology.chips,
            "devices": len(plan.topology.devices),
            "hosts": plan.topology.hosts,
            "devices_per_host": plan.topology.devices_per_host,
            "kind": plan.topology.kind,
        },
        "mesh": plan.mesh_shape,
        "chip": {
            "name": plan.chip.name,
            "memory_bytes": plan.memory,
            "bandwidth_bytes_per_s": plan.chip.bandwidth,
            "flops_per_s": plan.chip.flops,
            "link_bytes_per_s": plan.chip.link.bandwidth,
            "collective_s": plan.chip.link.latency_s,
            "hop_s": plan.chip.link.hop_s,
            "source": plan.chip.source,
        },
        "fits": plan.fits,
        "refusals": [dataclasses.asdict(infeasibility) for infeasibility in plan.infeasibilities],
        "worst_moment": worst.name if worst else None,
        "hbm_bytes_per_device": {
            moment.name: {**moment.parts, "total": moment.total, "headroom": moment.headroom} for moment in every
        },
        "train_step": None if plan.training is None or time is None else _train_step(plan, plan.training, time),
        "checkpoint": None
        if stop is None
        else {
            "bytes_per_host": plan.checkpoint,
            "seconds": stop.save_s,
            "write_bytes_per_s": plan.write_bandwidth,
            "grace_s": stop.grace_s,
            "steps_until_stopped": stop.steps,
            "seconds_after_sigterm": stop.seconds,
            "seconds_after_sigterm_with_pending_save": stop.with_pending_s,
        },
        "sampling": {planned.workload.name or "sampling": _sampling(planned) for planned in plan.sampling},
        "rollout_step": None if split is None else {**dataclasses.asdict(split), "step_s": split.step_s},
        "run": None if cost is None else dataclasses.asdict(cost),
        "notes": list(plan.workload.notes),
        "compile_seconds": plan.seconds,
    }


def _train_step(plan: Plan, training: TrainStepPlan, time: StepTime) -> dict[str, Any]:
    fsdp = plan.fsdp
    return {
        "digest": training.summary.digest,
        "microbatches": training.microbatches,
        "bubble": training.bubble,
        "peak_bytes_per_device": peak(training.summary),
        "vmem_bytes": vmem(training.summary.text),
        "flops": training.flops,
        "collectives": _collectives(plan.training_collectives),
        "fsdp": None
        if fsdp is None
        else {
            "floor_bytes": fsdp.floor,
            "received_bytes": fsdp.received,
            "ratio": fsdp.ratio,
            "thin_pieces": [dataclasses.asdict(pieces) for pieces in fsdp.thin],
        },
        "predicted_at_best": {
            **dataclasses.asdict(time),
            "step_s": time.step_s,
            "tokens_per_s": time.tokens / time.step_s,
        },
        "expected": {
            "step_s": time.expected_s,
            "errors": list(EXPECTED_ERRORS),
            "tokens_per_s": time.tokens / time.expected_s,
        },
    }


def _renamed(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same values under the keys that the file has."""
    return {WRITTEN_AS.get(name, name): value for name, value in values.items()}


def _collectives(sums: Sequence[CollectiveSum]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(collective) for collective in sums]


def _sampling(planned: SamplingPlan) -> dict[str, Any]:
    sizing, estimate = planned.sizing, planned.sizing.estimate
    return {
        "layout": sizing.layout,
        "attention": sizing.attention,
        "sizes": _renamed(dataclasses.asdict(sizing.sizes)),
        "capacities": {name: {"value": value, "bound_by": why} for name, (value, why) in sizing.reasons.items()},
        "digests": _renamed(planned.digests),
        "vmem_bytes": _renamed(planned.vmem),
        "collectives_per_decode_step": _collectives(planned.step_collectives),
        "collectives_per_decode_launch": _collectives(planned.collectives["decode"]),
        "collectives_per_relay": _collectives(planned.collectives.get("reshard", [])),
        "collectives_per_prefill_launch": _collectives(planned.collectives["prefill"]),
        "budget_bytes": sizing.budget,
        "predicted_at_best": {
            "bandwidth_floor_s": estimate.memory_s,
            "compute_s": estimate.compute_s,
            "collectives_s": estimate.collectives_s,
            "step_s": estimate.step_s,
            "relay_s": estimate.reshard_s,
            "round_s": estimate.total_s,
            "sequences_at_a_time": estimate.active,
            "tokens_per_s": estimate.active / estimate.step_s,
        },
        "expected": {"step_s": DECODE_OVER_BEST * estimate.step_s, "errors": list(DECODE_ERRORS)},
        "drafts": [dataclasses.asdict(entry) for entry in planned.drafts],
        "considered": [
            {
                "layout": layout_text(choice.layout),
                "fits": choice.sizes is not None,
                "bytes_per_device": choice.footprint.total,
                "step_s": choice.estimate.step_s if choice.estimate else None,
                "round_s": choice.estimate.total_s if choice.estimate else None,
            }
            for choice in sizing.considered
        ],
    }
