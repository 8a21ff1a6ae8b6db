"""From a configuration's work and a slice to a plan: everything compiled for exactly that mesh, nothing launched."""

import concurrent.futures
import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from lockstep.device.chips import Chip, chip_of
from lockstep.device.memory import block_bytes
from lockstep.engine import Engine, Sizing, never_used
from lockstep.errors import CapacityError, CompilerError, ConfigError
from lockstep.models import DecoderWeights, LlamaConfig, read_decoder, skeleton
from lockstep.placement import make_mesh
from lockstep.plan.cache import CompileCache
from lockstep.plan.collectives import CollectiveSum, collectives, summed
from lockstep.plan.hlo import Hlo, vmem
from lockstep.plan.infeasibility import Infeasibility, InfeasibleError, agreeing, key_in, largest_in
from lockstep.plan.topology import Topology, names_of
from lockstep.plan.train_step import State, TrainStepPlan, make_state, plan_step
from lockstep.plan.workload import SamplingWork, Work
from lockstep.training import parameter_shardings
from lockstep.types import Request

_TRAINER_KEYS = ("train_batch_size", "per_device_parallelism", "mesh_shape", "mp")
_ENGINE_KEYS = (
    "max_seq_len", "max_seqs", "page_size", "max_pages", "max_prefill_size", "layout", "hbm_utilization",
    "max_new_tokens", "dtype", "kv_cache_dtype",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingPlan:
    """A round of sampling that fits.

    Args:
        work: what was asked.
        sizing: layout, capacities, what else was considered; the engine's own.
        digests: of each program by name.
        collectives: of a launch of each program; of decode, without those of its steps.
        step_collectives: of a step of decode: per decoded token and sequence. With the filters that the requests ask
            for and no others.
        vmem: bytes of vector memory of the hungriest operation of each program.
        code: bytes per device of the programs themselves.
    """

    work: SamplingWork
    sizing: Sizing
    digests: dict[str, str]
    collectives: dict[str, list[CollectiveSum]]
    step_collectives: list[CollectiveSum]
    vmem: dict[str, int]
    code: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """A configuration on a slice.

    Args:
        work: what was asked.
        topology: the slice.
        mesh_shape: axes and sizes of the mesh that the model lies on.
        chip: numbers that predictions used.
        memory: bytes of a device that programs may use.
        parameters: bytes per device.
        optimizer: bytes per device of its state.
        reference: bytes per device of a frozen copy of the model.
        training: the train step; None if there is none.
        training_collectives: per train step.
        sampling: rounds of sampling.
        refusals: why it cannot run; none if it can.
        seconds: that compiling took, all programs together; of cached ones, that it took then.
    """

    work: Work
    topology: Topology
    mesh_shape: dict[str, int]
    chip: Chip
    memory: int
    parameters: int
    optimizer: int
    reference: int
    training: TrainStepPlan | None
    training_collectives: list[CollectiveSum]
    sampling: list[SamplingPlan]
    refusals: list[Infeasibility]
    seconds: float

    @property
    def fits(self) -> bool:
        """Whether it can run."""
        return not self.refusals

    @property
    def resident(self) -> int:
        """Bytes per device that lie there all the time."""
        return self.parameters + self.optimizer + self.reference


def make_plan(work: Work, topology: Topology, cache: CompileCache) -> Plan:
    """Compile a configuration's programs for a slice.

    The train step is compiled in a thread of its own, beside the programs of the engine.

    Args:
        work: what the configuration asks.
        topology: the slice.
        cache: compiles.

    Returns:
        The plan, with refusals where something does not fit.
    """
    refusals = list(work.refusals)
    if work.hosts is not None and work.hosts != topology.hosts:
        refusals.append(
            Infeasibility(
                key="trainer.distributed.require_process_count",
                value=work.hosts,
                largest=topology.hosts,
                text=f"trainer.distributed.require_process_count is {work.hosts}, and {topology.name} has "
                f"{topology.hosts} hosts: the run would end at its start. Set it to {topology.hosts}.",
            )
        )
    devices = topology.on_host() if work.one_host else topology.devices
    chip = chip_of(topology.devices[0])
    try:
        mesh = make_mesh(work.mesh_shape, devices)
        state, model, weights = _model(work, mesh)
    except ConfigError as error:
        refusals.append(_config_refusal(work, None, error))
        return _plan(work, topology, {}, chip, refusals)
    resident = state.resident if state else sum(block_bytes(leaf) for leaf in _leaves(weights))
    hosts = [device.process_index for device in mesh.devices.flat]
    training: TrainStepPlan | None = None
    sampling: list[SamplingPlan] = []
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        step = pool.submit(plan_step, work, mesh, state, cache, chip.memory) if state else None
        free = chip.memory - resident
        for one in work.sampling:
            try:
                sampling.append(_plan_sampling(work, one, mesh, model, weights, cache, free, hosts))
            except InfeasibleError as refused:
                refusals.append(refused.refusal)
        if step is not None:
            try:
                training = step.result()
            except InfeasibleError as refused:
                refusals.append(_with_slice(refused.refusal, work, topology, state))
            except ConfigError as error:
                refusals.append(_config_refusal(work, None, error))
            except CompilerError as error:
                refusals.append(
                    Infeasibility(key=work.model_key, value="the train step", largest=None, text=str(error))
                )
    return Plan(
        work=work,
        topology=topology,
        mesh_shape=dict(mesh.shape),
        chip=chip,
        memory=chip.memory,
        parameters=state.parameters if state else resident,
        optimizer=state.optimizer if state else 0,
        reference=state.reference if state else 0,
        training=training,
        training_collectives=summed(collectives(Hlo(training.summary.text), len(hosts)), hosts) if training else [],
        sampling=sampling,
        refusals=agreeing(refusals),
        seconds=sum(summary.seconds for summary in cache.summaries.values()),
    )


def _plan(
    work: Work, topology: Topology, mesh_shape: dict[str, int], chip: Chip, refusals: list[Infeasibility]
) -> Plan:
    """Of a configuration that fails before anything is compiled."""
    return Plan(
        work=work, topology=topology, mesh_shape=mesh_shape, chip=chip, memory=chip.memory, parameters=0, optimizer=0,
        reference=0, training=None, training_collectives=[], sampling=[], refusals=refusals, seconds=0.0,
    )  # fmt: skip


def _model(work: Work, mesh: Mesh) -> tuple[State | None, LlamaConfig, DecoderWeights]:
    """The model as it lies: of a training run with its state, else alone."""
    if work.training is not None:
        state = make_state(work, mesh)
        return state, *read_decoder(state.structs.model)
    return None, *read_decoder(model_structs(work, mesh))


def model_structs(work: Work, mesh: Mesh) -> object:
    """A model without training, as shapes on a mesh.

    Raises:
        ConfigError: the mesh does not divide an axis.
    """
    shapes = skeleton(work.vocab_size, work.model)
    return jax.tree.map(
        lambda shape, sharding: jax.ShapeDtypeStruct(shape.shape, jnp.dtype(work.dtype), sharding=sharding),
        shapes,
        parameter_shardings(shapes, mesh),
    )


def _leaves(weights: DecoderWeights) -> list[jax.ShapeDtypeStruct]:
    return jax.tree.leaves(weights)


def _plan_sampling(
    work: Work,
    one: SamplingWork,
    mesh: Mesh,
    model: LlamaConfig,
    weights: DecoderWeights,
    cache: CompileCache,
    free: int,
    hosts: Sequence[int],
) -> SamplingPlan:
    """What `Engine.prepare` chooses there: the very function that sizes the engine on the pod."""
    try:
        engine = Engine(one.engine, mesh, vocab_size=one.vocab_size, compile_with=cache)
        engine.prepare((model, weights), one.requests, free=free)
    except CapacityError as error:
        raise InfeasibleError(_shorter(one, mesh, model, weights, cache, free, error)) from error
    except ConfigError as error:
        raise InfeasibleError(_config_refusal(work, one, error)) from error
    except CompilerError as error:
        key = one.key("max_prefill_size")
        value = one.engine.max_prefill_size
        raise InfeasibleError(Infeasibility(key=key, value=value, largest=None, text=str(error))) from error
    assert engine.sizing is not None
    programs = engine.programs
    unmet = never_used(request.params for request in one.requests)
    found = {name: collectives(Hlo(program.text(), unmet), len(hosts)) for name, program in programs.items()}
    steps = [each for each in found["decode"] if each.in_step]
    found["decode"] = [each for each in found["decode"] if not each.in_step]
    return SamplingPlan(
        work=one,
        sizing=engine.sizing,
        digests={name: program.digest for name, program in programs.items()},
        collectives={name: summed(of_program, hosts) for name, of_program in found.items()},
        step_collectives=summed(steps, hosts),
        vmem={name: vmem(program.text()) for name, program in programs.items()},
        code=sum(int(program.memory().generated_code_size_in_bytes) for program in programs.values()),
    )


def _shorter(
    one: SamplingWork,
    mesh: Mesh,
    model: LlamaConfig,
    weights: DecoderWeights,
    cache: CompileCache,
    free: int,
    error: CapacityError,
) -> Infeasibility:
    """The longest answers that fit: searched with the engine's prediction, then confirmed by the compiler."""
    given = max(request.params.max_new_tokens for request in one.requests)

    def works(longest: int, *, compiled: bool) -> bool:
        engine = Engine(one.engine, mesh, vocab_size=one.vocab_size, compile_with=cache)
        ask = engine.prepare if compiled else engine.check
        try:
            ask((model, weights), _cut(one.requests, longest), free=free)
        except (CapacityError, CompilerError):
            return False
        return True

    low, high = 0, given
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if works(middle, compiled=False) else (low, middle)
    while low and not works(low, compiled=True):
        low = low * 3 // 4
    return Infeasibility(key=one.key("max_new_tokens"), value=given, largest=low or None, text=str(error))


def _cut(requests: Sequence[Request], most: int) -> list[Request]:
    return [
        dataclasses.replace(
            request,
            params=dataclasses.replace(request.params, max_new_tokens=min(most, request.params.max_new_tokens)),
        )
        for request in requests
    ]


def _config_refusal(work: Work, one: SamplingWork | None, error: ConfigError) -> Infeasibility:
    """Points at the key that the error names."""
    keys = {f"trainer.{name}": f"trainer.{name}" for name in _TRAINER_KEYS} | {"mesh_shape": "trainer.mesh_shape"}
    keys |= {"data.max_seq_len": "data.max_seq_len"}
    if one is not None:
        keys |= {name: one.key(name) for name in _ENGINE_KEYS}
    key = key_in(str(error), keys)
    value = getattr(one.engine, key.rpartition(".")[2], None) if one is not None and key is not None else None
    return Infeasibility(key=key or work.model_key, value=value, largest=largest_in(str(error)), text=str(error))


def _with_slice(refusal: Infeasibility, work: Work, topology: Topology, state: State | None) -> Infeasibility:
    """Where no number of the configuration helps: the smallest slice of the generation whose devices could hold it."""
    if refusal.key != work.model_key or state is None:
        return refusal
    chip = chip_of(topology.devices[0])
    names = names_of(topology.name.rpartition("-")[0])
    counts = {name: int(name.rpartition("-")[2]) for name in names}
    here = counts[topology.name]
    enough = [
        name for name in names if state.resident * here / counts[name] < 0.8 * chip.memory and counts[name] > here
    ]
    if not enough:
        return refusal
    smallest = min(enough, key=lambda name: counts[name])
    return dataclasses.replace(
        refusal, text=f"{refusal.text} The smallest slice that holds them with room to work is {smallest}."
    )
