"""The train step of a plan and its state: compiled from shapes, memory by use, and the largest microbatch that fits."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import haliax as hax
import jax
from jax.sharding import Mesh

from lockstep.errors import HbmError
from lockstep.models import (
    LlamaLMHeadModel,
    LoraModel,
    join_trained,
    skeleton,
    split_trained,
)
from lockstep.placement import CP, PP, data_shards
from lockstep.placement.device import block_bytes, program_bytes
from lockstep.plan.step_flops import flops_on
from lockstep.plan.workload import Infeasibility, InfeasibleError, TrainingWorkload, Workload
from lockstep.training import (
    TrainStep,
    batch_structs,
    busiest_bytes,
    parameter_shardings,
    state_structs,
)
from lockstep.xla import CompileCache, Summary


@dataclasses.dataclass(frozen=True, kw_only=True)
class State:
    """The training state, which is on the devices for the whole run."""

    structs: Any  # the state as shapes with shardings
    shardings: Any
    parameters: int  # bytes per device of the model's parameters
    trained: int  # bytes per device of those that are trained
    optimizer: int  # bytes per device of the optimizer's state
    reference: int  # bytes per device of a frozen copy of the model, of a teacher and of reward models
    checkpoint: int  # bytes that the host which writes most writes of a checkpoint

    @property
    def resident(self) -> int:
        """The bytes per device of all of it."""
        return self.parameters + self.optimizer + self.reference


def make_state(workload: Workload, mesh: Mesh) -> State:
    """The shapes and the bytes of the parameters and of the optimizer's state."""
    training = workload.training
    assert training is not None
    precision = training.trainer.precision
    optimizer = training.optimizer.build(training.trainer.num_train_steps, training.renewal)
    structs, shardings = state_structs(
        lambda key: split_trained(init_trained(workload)(key))[0], optimizer, mesh, precision
    )
    trained, checkpoint = _bytes(structs.model), busiest_bytes(jax.tree.leaves(structs))
    if training.lora is not None:
        base = model_structs(workload, mesh)
        structs = structs.join(LoraModel(base=base, adapters=None, scale=training.lora.scale))
    parameters = _bytes(structs.model)
    reference = parameters * precision.compute.itemsize // precision.param.itemsize if training.reference else 0
    for frozen in training.frozen:
        dtype = precision.compute.name
        shape = dataclasses.replace(workload, model=frozen.config, vocab_size=frozen.vocab_size, dtype=dtype)
        reference += _bytes(model_structs(shape, mesh))
    return State(
        structs=structs,
        shardings=shardings,
        parameters=parameters,
        trained=trained,
        optimizer=_bytes(structs.opt_state),
        reference=reference,
        checkpoint=checkpoint,
    )


def model_structs(workload: Workload, mesh: Mesh) -> LlamaLMHeadModel:
    """A model that is not trained, as shapes on a mesh."""
    shapes = skeleton(workload.vocab_size, workload.model)
    return jax.tree.map(
        lambda shape, sharding: jax.ShapeDtypeStruct(shape.shape, jax.numpy.dtype(workload.dtype), sharding=sharding),
        shapes,
        parameter_shardings(shapes, mesh),
    )


def init_trained(workload: Workload) -> Callable[[jax.Array], LlamaLMHeadModel | LoraModel]:
    """Return what makes the model that is trained, from a key."""
    lora = None if workload.training is None else workload.training.lora

    def init(key: jax.Array) -> LlamaLMHeadModel | LoraModel:
        base = LlamaLMHeadModel.init(hax.Axis("vocab", workload.vocab_size), workload.model, key=key)
        if lora is None:
            return base
        return LoraModel(base=base, adapters=lora.init(workload.model, key), scale=lora.scale)

    return init


def _bytes(tree: Any) -> int:
    return sum(block_bytes(leaf) for leaf in jax.tree.leaves(tree))


NAME = "train_step"
LIMIT = "trainer.memory_bytes_per_device"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainStepPlan:
    """A train step that fits."""

    summary: Summary
    batch: int  # bytes per device of a batch
    activations: int  # bytes per device that the forward pass keeps for the backward pass
    temporaries: int  # bytes per device of everything else at the worst moment
    microbatches: int  # number of parts that a batch is split into
    flops: float  # the floating-point operations of the whole step, over all devices
    bubble: float  # the share of a pipeline's steps in which a stage has no microbatch; 0 without stages


def compile_step(
    workload: Workload, mesh: Mesh, state: State, cache: CompileCache, *, microbatches: int, length: int | None = None
) -> Summary:
    """Compile the train step as the trainer makes it, for sequences of ``length`` or as configured."""
    training = workload.training
    assert training is not None
    steps = training.trainer.num_train_steps
    step = TrainStep(
        loss_fn=training.loss,
        optimizer=training.optimizer.build(steps, training.renewal),
        schedule=training.optimizer.schedule(steps),
        mesh=mesh,
        shardings=state.shardings,
        settings=training.trainer.step_settings,
        microbatches=microbatches,
    )
    batch = batch_structs(_columns(training, length), training.trainer.train_batch_size, mesh)
    return cache(step.lower(state.structs, batch), NAME)


def bytes_for_step(workload: Workload, state: State, memory: int) -> int:
    """The bytes of a device with ``memory`` that a run gives the train step: its limit, or what no reference takes."""
    assert workload.training is not None
    return workload.training.trainer.step_bytes(lambda: memory - state.reference)


def plan_step(workload: Workload, mesh: Mesh, state: State, cache: CompileCache, memory: int) -> TrainStepPlan:
    """Compile the train step, or find out what would fit.

    Raises:
        InfeasibleError: The step does not fit; it names the largest microbatch or row that does.
        ConfigError: The mesh does not divide the batch.
    """
    training = workload.training
    assert training is not None
    memory = bytes_for_step(workload, state, memory)
    microbatches, stages = training.microbatches(mesh), mesh.shape.get(PP, 1)
    try:
        summary = _fitting(compile_step(workload, mesh, state, cache, microbatches=microbatches), memory)
    except HbmError as error:
        raise InfeasibleError(_what_fits(workload, mesh, state, cache, memory, error)) from error
    batch = sum(
        block_bytes(leaf) for leaf in batch_structs(training.columns, training.trainer.train_batch_size, mesh).values()
    )
    rows = training.trainer.train_batch_size // data_shards(mesh) // microbatches
    beyond = max(0, peak(summary) - state.parameters - state.optimizer - batch)
    idle = training.bubble(mesh)
    # A stage keeps what its layers need of each step of the schedule.
    steps = stages * microbatches / (1 - idle) if stages > 1 else 1
    row = mesh.shape["tp"] * mesh.shape.get(CP, 1)
    kept = min(beyond, int(saved_bytes(workload, rows) * steps) // stages // row)
    return TrainStepPlan(
        summary=summary,
        batch=batch,
        activations=kept,
        temporaries=beyond - kept,
        microbatches=stages * microbatches,
        flops=flops_on(workload, mesh),
        bubble=idle,
    )


def peak(summary: Summary) -> int:
    """Bytes per device at the worst moment of a program, its own code included."""
    return program_bytes(summary.memory, "tpu")


def saved_bytes(workload: Workload, rows: int) -> int:
    """The bytes that the forward pass of some rows keeps for the backward pass, without the parameters."""
    training = workload.training
    assert training is not None
    precision = training.trainer.precision

    def residuals() -> Any:
        model = precision.cast_to_compute(init_trained(workload)(jax.random.key(0)))
        trained, frozen = split_trained(model)
        arrays, rest = eqx.partition(trained, eqx.is_array)
        batch = {
            name: jax.numpy.zeros((rows, *column.shape), column.dtype) for name, column in training.columns.items()
        }

        def loss(part: Any) -> Any:
            return training.loss(join_trained(eqx.combine(part, rest), frozen), batch).total

        return jax.tree.leaves(model), jax.vjp(loss, arrays)[1]

    model, kept = jax.eval_shape(residuals)
    weights = {leaf.shape for leaf in model}
    return sum(
        math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(kept) if leaf.shape not in weights
    )


def _fitting(summary: Summary, memory: int) -> Summary:
    if peak(summary) > memory:
        raise HbmError(
            f"program {NAME!r} needs {peak(summary) / 2**30:.2f} GiB of device memory (HBM) and there are "
            f"{memory / 2**30:.2f} GiB.",
            needed=peak(summary),
            limit=memory,
        )
    return summary


def _what_fits(
    workload: Workload, mesh: Mesh, state: State, cache: CompileCache, memory: int, error: HbmError
) -> Infeasibility:
    """The largest microbatch, else the longest row, that the compiler accepts."""
    training = workload.training
    assert training is not None
    trainer = training.trainer
    rows = trainer.train_batch_size // data_shards(mesh)
    tried, limit = rows // training.microbatches(mesh), trainer.memory_bytes_per_device
    room = f"{memory / 2**30:.2f} GiB" + (f" ({LIMIT} is {limit})" if limit is not None else "")
    first = f"the train step needs {error.needed / 2**30:.2f} GiB per device and there are {room}"
    fixed = state.parameters + state.optimizer
    if fixed >= memory:
        return Infeasibility(
            key=workload.model_key if limit is None else LIMIT,
            value=f"{fixed / 2**30:.2f} GiB" if limit is None else limit,
            largest=None,
            text=f"parameters and optimizer state take {fixed / 2**30:.2f} GiB per device, of which there are "
            f"{room}: no batch is small enough. {'' if limit is None else f'Raise {LIMIT}, or set it to null. '}"
            "Use a larger slice or a smaller model, or set trainer.mp to p=bf16.",
        )
    best = largest_rows(workload, mesh, state, cache, memory, error.needed)
    if best is not None:
        return Infeasibility(
            key="trainer.per_device_parallelism",
            value=trainer.per_device_parallelism,
            largest=best,
            text=f"{first}: {tried} {training.rows} of {training.length} tokens at a time are too many for a device. "
            f"The largest trainer.per_device_parallelism that works is {best}.",
        )
    unit, constant = 128, fixed + state.trained
    lengths = list(range(unit, training.length, unit))
    scale = max(1.0, (error.needed - constant) / tried / training.length)
    guesses = [length for length in lengths if constant + scale * length <= memory]

    def works(length: int) -> bool:
        return _fits(workload, mesh, state, cache, memory, microbatches=rows, length=length)

    longest = largest_that_works(lengths, guesses[-1] if guesses else unit, works)
    return Infeasibility(
        key=training.row_key,
        value=training.length,
        largest=longest,
        text=f"{first}, even with one of {training.rows} at a time. "
        + (
            f"The largest {training.row_key} that works, in steps of {unit}, is {longest} (with "
            "trainer.per_device_parallelism 1)."
            if longest
            else f"Not even {unit} tokens work: {f'raise {LIMIT}' if limit is not None else 'use a larger slice'}."
        ),
    )


def largest_rows(
    workload: Workload, mesh: Mesh, state: State, cache: CompileCache, memory: int, needed: int
) -> int | None:
    """The largest number of rows at a time with which the train step fits; None where one row does not.

    Args:
        memory: The bytes of a device for the step and its state.
        needed: The bytes that it needs with the rows of the configuration, which are too many.
    """
    assert workload.training is not None
    training = workload.training
    rows = training.trainer.train_batch_size // data_shards(mesh)
    tried = rows // training.microbatches(mesh)
    if state.parameters + state.optimizer >= memory:
        return None
    # Gradients are added up from microbatch to microbatch: as large as the parameters that are trained.
    constant = state.parameters + state.optimizer + state.trained
    sizes = [size for size in range(1, tried) if rows % size == 0]
    per_row = max(1.0, (needed - constant) / tried)
    guess = [size for size in sizes if constant + per_row * size <= memory]

    def works(size: int) -> bool:
        return _fits(workload, mesh, state, cache, memory, microbatches=rows // size)

    return largest_that_works(sizes, guess[-1] if guess else 1, works)


def _fits(workload: Workload, mesh: Mesh, state: State, cache: CompileCache, memory: int, **sizes: Any) -> bool:
    try:
        _fitting(compile_step(workload, mesh, state, cache, **sizes), memory)
    except HbmError:
        return False
    return True


def largest_that_works(values: Sequence[int], guess: int, works: Callable[[int], bool]) -> int | None:
    """Search the largest value that works, or None, from a guess. Those that work are smaller than all others."""
    low, high = -1, len(values)
    at = values.index(guess) if guess in values else 0
    stride = 1
    while high - low > 1:
        if works(values[at]):
            low = at
            at = min(at + stride, high - 1) if high == len(values) else (low + high) // 2
        else:
            high = at
            at = max(at - stride, low + 1) if low == -1 else (low + high) // 2
        stride *= 2
    return None if low < 0 else values[low]


def _columns(training: TrainingWorkload, length: int | None) -> dict[str, jax.ShapeDtypeStruct]:
    if length is None:
        return dict(training.columns)
    changed = {}
    for name, column in training.columns.items():
        shape = tuple(length if size == training.length else size for size in column.shape)
        changed[name] = jax.ShapeDtypeStruct(shape, column.dtype)
    return changed


def plan_largest_step(workload: Workload, mesh: Mesh, state: State, cache: CompileCache, memory: int) -> TrainStepPlan:
    """Compile the train step; where the number of rows at a time is open, with the largest that fits.

    Args:
        memory: The bytes of a device that programs may use; the limit of the configuration counts as it does in a run.

    Raises:
        InfeasibleError: The step does not fit, or does not even with one row at a time; or it fits only the limit.
        ConfigError: The mesh does not divide the batch.
    """
    assert workload.training is not None
    limit = workload.training.trainer.memory_bytes_per_device
    try:
        step = plan_step(workload, mesh, state, cache, memory)
    except InfeasibleError as error:
        open_rows = workload.training.trainer.per_device_parallelism == "auto"
        largest = error.infeasibility.largest
        if not (open_rows and error.infeasibility.key == "trainer.per_device_parallelism" and largest):
            raise
        chosen = with_rows(workload, largest)
        step = plan_step(chosen, mesh, state, cache, memory if limit is None else limit + state.reference)
    if limit is not None and peak(step.summary) > (left := memory - state.reference):
        text = (
            f"{LIMIT} is {limit}, and a run takes as many rows at a time as fit in it: the train step then needs "
            f"{peak(step.summary)} bytes per device, of which there are {left}. Set it to at most {left}, or to null."
        )
        raise InfeasibleError(Infeasibility(key=LIMIT, value=limit, largest=left, text=text))
    return step


def with_rows(workload: Workload, rows: int) -> Workload:
    """The workload with a number of rows at a time that was found, in place of a search."""
    assert workload.training is not None
    trainer = dataclasses.replace(workload.training.trainer, per_device_parallelism=rows, memory_bytes_per_device=None)
    return dataclasses.replace(workload, training=dataclasses.replace(workload.training, trainer=trainer))
