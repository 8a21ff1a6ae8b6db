"""``per_device_parallelism: auto`` in a plan: as the run, with the largest microbatch that the compiler accepts."""

import dataclasses

from jax.sharding import Mesh

from lockstep.main.plan.cache import CompileCache
from lockstep.main.plan.infeasibility import InfeasibleError
from lockstep.main.plan.train_state import State
from lockstep.main.plan.train_step import TrainStepPlan, plan_step
from lockstep.main.plan.workload import Workload


def plan_largest_step(workload: Workload, mesh: Mesh, state: State, cache: CompileCache, memory: int) -> TrainStepPlan:
    """Compile the train step; where the number of rows at a time is open, with the largest that fits.

    Args:
        workload: What is asked of the devices, with training.
        mesh: The mesh of the run.
        state: The training state.
        cache: The compiler.
        memory: The bytes of a device that programs may use.

    Raises:
        InfeasibleError: The step does not fit, or does not even with one row at a time.
        ConfigError: The mesh does not divide the batch.
    """
    assert workload.training is not None
    try:
        return plan_step(workload, mesh, state, cache, memory)
    except InfeasibleError as error:
        found = error.infeasibility
        trainer = workload.training.trainer
        is_open = trainer.per_device_parallelism == "auto" and found.key == "trainer.per_device_parallelism"
        if not (is_open and found.largest):
            raise
    trainer = dataclasses.replace(trainer, per_device_parallelism=found.largest)
    training = dataclasses.replace(workload.training, trainer=trainer)
    return plan_step(dataclasses.replace(workload, training=training), mesh, state, cache, memory)
