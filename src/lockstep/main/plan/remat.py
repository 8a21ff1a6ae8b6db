"""What each rematerialisation policy costs: the train step, compiled with each of them."""

import dataclasses

from rich.console import Console

from lockstep.errors import CompilerError, HbmError
from lockstep.main.plan.cache import CompileCache
from lockstep.main.plan.topology import Topology
from lockstep.main.plan.train_state import make_state
from lockstep.main.plan.train_step import compile_step, makes_vocab_blocks, peak, step_flops
from lockstep.main.plan.workload import Workload
from lockstep.models import POLICIES
from lockstep.placement import make_mesh
from lockstep.printable import bytes_text


@dataclasses.dataclass(frozen=True, kw_only=True)
class RematCost:
    """The train step with one policy.

    Args:
        policy: The name of the policy.
        needed: The bytes per device at the worst moment; 0 where the compiler does not say.
        memory: The bytes of a device that programs may use.
        flops: The floating-point operations of a step over all devices.
        error: Why the compiler refused it; None where it did not.
    """

    policy: str
    needed: int
    memory: int
    flops: float
    error: str | None = None

    @property
    def fits(self) -> bool:
        """Whether the step fits a device."""
        return self.error is None and self.needed <= self.memory


def remat_costs(workload: Workload, topology: Topology, cache: CompileCache, memory: int) -> list[RematCost]:
    """Compile the train step with every policy; nothing else of the plan changes.

    Args:
        workload: What is asked of the devices, with training.
        topology: The slice.
        cache: The compiler.
        memory: The bytes of a device that programs may use.

    Returns:
        One entry per policy.
    """
    assert workload.training is not None
    mesh = make_mesh(workload.mesh_shape, topology.devices)
    microbatches = workload.training.trainer.microbatches(mesh)
    vocab_blocks = makes_vocab_blocks(workload, mesh, microbatches)
    found = []
    for policy in POLICIES:
        changed = dataclasses.replace(
            workload, model=dataclasses.replace(workload.model, gradient_checkpointing=policy)
        )
        state, flops = make_state(changed, mesh), step_flops(changed, vocab_blocks=vocab_blocks)
        needed, error = 0, None
        try:
            needed = state.reference + peak(compile_step(changed, mesh, state, cache, microbatches=microbatches))
        except HbmError as refused:
            needed, error = refused.needed + state.reference, "does not fit"
        except CompilerError as refused:
            error = str(refused)
        found.append(RematCost(policy=policy, needed=needed, memory=memory, flops=flops, error=error))
    return found


def print_remat(costs: list[RematCost], console: Console) -> None:
    """Print a line per policy.

    Args:
        costs: What `remat_costs` returned.
        console: The console to print to.
    """
    least = min(cost.flops for cost in costs)
    console.print("model.gradient_checkpointing: HBM per device in the train step, and operations")
    for cost in costs:
        size = bytes_text(cost.needed) if cost.needed else "-"
        verdict = "fits" if cost.fits else cost.error or "does not fit"
        console.print(f"  {cost.policy:<8} {size:>11}  {cost.flops / least:.2f} x  {verdict}", highlight=False)
    console.print()
