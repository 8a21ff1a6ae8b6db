"""From a workload and a slice to a plan: every program compiled for that very mesh, none launched."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
from jax.sharding import Mesh

from lockstep.engine import Engine, Sizing, never_used
from lockstep.errors import CapacityError, CompilerError, ConfigError
from lockstep.exits import give_work_up
from lockstep.models import DecoderWeights, LlamaConfig, read_decoder
from lockstep.placement import make_mesh
from lockstep.placement.device import Chip, block_bytes, calibrated, chip_of
from lockstep.plan.fsdp import FsdpBytes, fsdp_bytes
from lockstep.plan.traffic import DraftBytes, draft_bytes
from lockstep.plan.train_step import State, TrainStepPlan, make_state, model_structs, plan_largest_step
from lockstep.plan.workload import (
    Infeasibility,
    InfeasibleError,
    SamplingWorkload,
    Workload,
    key_in,
    largest_in,
    with_common_largest,
)
from lockstep.types import Request
from lockstep.xla import Collective, CollectiveSum, CompileCache, Hlo, Topology, collectives, names_of, summed, vmem

type Decoder = tuple[LlamaConfig, DecoderWeights]
_TRAINER_KEYS = ("train_batch_size", "per_device_parallelism", "mesh_shape", "pipeline_repeats", "mp")
_ENGINE_KEYS = (
    "max_seq_len", "max_seqs", "page_size", "max_pages", "max_prefill_size", "layout", "hbm_utilization",
    "max_new_tokens", "dtype", "kv_cache_dtype", "weight_dtype",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingPlan:
    """A round of sampling that fits."""

    workload: SamplingWorkload
    sizing: Sizing  # the layout, the capacities and what else was considered, as the engine chose them
    digests: dict[str, str]  # the digest of each program, by the program's name
    collectives: dict[str, list[CollectiveSum]]  # of a launch of each program, without those of a step
    step_collectives: list[CollectiveSum]  # of a decode step, with the filters that are asked for
    vmem: dict[str, int]  # bytes of vector memory of the operation that needs most, by the program's name
    code: int  # bytes per device of the programs themselves
    drafts: list[DraftBytes]  # what each program that verifies drafts moves per token; none without drafts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The memory and the time of a workload on a slice."""

    workload: Workload
    topology: Topology
    mesh_shape: dict[str, int] = dataclasses.field(default_factory=dict)  # the size of each axis, by its name
    chip: Chip  # the published numbers of the chip, which the predictions use
    memory: int  # bytes of a device that programs may use
    parameters: int = 0  # bytes per device of the parameters
    optimizer: int = 0  # bytes per device of the optimizer's state
    reference: int = 0  # bytes per device of a frozen copy of the model
    training: TrainStepPlan | None = None  # the train step; None where there is none, or where it does not fit
    training_collectives: Sequence[CollectiveSum] = ()
    fsdp: FsdpBytes | None = None  # what FSDP needs of them and what they are; None where no train step is planned
    sampling: Sequence[SamplingPlan] = ()  # the rounds of sampling that fit
    infeasibilities: Sequence[Infeasibility]  # why the workload cannot run; none where it can
    seconds: float = 0.0  # seconds of compiling, all programs together; a cached program counts what it took then
    write_bandwidth: float = 1e9  # bytes per second of a host's checkpoints, as assumed; stated with every time
    dollars_per_chip_hour: float | None = None  # the price of a chip, as given; None: the run's dollars are not told
    frozen: int = 0  # bytes per device of the parameters that no step changes, which are not in checkpoints
    checkpoint: int = 0  # bytes that the host which writes most writes of a checkpoint

    @property
    def fits(self) -> bool:
        return not self.infeasibilities

    @property
    def resident(self) -> int:
        """The bytes per device that are in use for the whole run."""
        return self.parameters + self.optimizer + self.reference


def make_plan(workload: Workload, topology: Topology, cache: CompileCache, calibration: str | None = None) -> Plan:
    """Compile the programs of a workload for a slice.

    The train step is compiled in a thread of its own, beside the programs of the engine.

    Args:
        calibration: A file of measured numbers of the chip, in place of those that the configuration names; None:
            what the configuration names for sampling, and else published numbers.

    Raises:
        ConfigError: The calibration cannot be read, or is of another chip.
    """
    chip = calibrated(chip_of(topology.devices[0]), calibration)
    if calibration is not None:
        workload = workload.calibrated(calibration)
    infeasibilities = list(workload.infeasibilities)
    per_slice = topology.hosts // topology.num_slices
    if workload.hosts is not None and workload.hosts != per_slice:
        infeasibilities.append(
            Infeasibility(
                key="trainer.distributed.require_process_count",
                value=workload.hosts,
                largest=per_slice,
                text=f"trainer.distributed.require_process_count is {workload.hosts}, and {topology.slice_name} has "
                f"{per_slice} hosts: the run would end at its start. Set it to {per_slice}.",
            )
        )
    devices = topology.on_host() if workload.one_host else topology.devices
    return _plan(workload, topology, cache, chip, devices, infeasibilities)


def _plan(
    workload: Workload,
    topology: Topology,
    cache: CompileCache,
    chip: Chip,
    devices: Sequence[jax.Device],
    infeasibilities: list[Infeasibility],
) -> Plan:
    try:
        mesh = make_mesh(workload.mesh_shape, devices)
        state, decoder = _model(workload, mesh)
    except ConfigError as error:
        infeasibilities.append(_config_infeasibility(workload, None, error))
        memory = chip.memory
        return Plan(workload=workload, topology=topology, chip=chip, memory=memory, infeasibilities=infeasibilities)
    resident = state.resident if state else _bytes(decoder)
    hosts = [device.process_index for device in mesh.devices.flat]
    training: TrainStepPlan | None = None
    sampling: list[SamplingPlan] = []
    left = chip.memory - resident
    with _threads() as submit:
        step = submit(plan_largest_step, workload, mesh, state, cache, chip.memory) if state else None
        for planned in workload.sampling:
            try:
                sampling.append(submit(_plan_sampling, workload, planned, mesh, decoder, cache, left, hosts).result())
            except InfeasibleError as refused:
                infeasibilities.append(refused.infeasibility)
        if step is not None:
            try:
                training = step.result()
            except InfeasibleError as refused:
                infeasibilities.append(_with_slice(refused.infeasibility, workload, topology, state))
            except ConfigError as error:
                infeasibilities.append(_config_infeasibility(workload, None, error))
            except CompilerError as error:
                infeasibilities.append(
                    Infeasibility(key=workload.model_key, value="the train step", largest=None, text=str(error))
                )
    step_collectives = collectives(Hlo(training.summary.text), len(hosts)) if training else []
    return Plan(
        workload=workload,
        topology=topology,
        mesh_shape=dict(mesh.shape),
        chip=chip,
        memory=chip.memory,
        parameters=state.parameters if state else resident,
        optimizer=state.optimizer if state else 0,
        reference=state.reference if state else 0,
        training=training,
        training_collectives=summed(step_collectives, hosts),
        fsdp=_fsdp(workload, state, training, mesh, step_collectives),
        sampling=sampling,
        infeasibilities=with_common_largest(infeasibilities),
        seconds=sum(summary.seconds for summary in cache.summaries.values()),
        frozen=state.parameters - state.trained if state else 0,
        checkpoint=state.checkpoint if state else 0,
    )


def _fsdp(
    workload: Workload, state: State | None, training: TrainStepPlan | None, mesh: Mesh, exchanged: Sequence[Collective]
) -> FsdpBytes | None:
    if state is None or training is None or workload.training is None:
        return None
    itemsize = workload.training.trainer.precision.compute.itemsize
    return fsdp_bytes(
        state.structs.model, mesh.shape, exchanged, microbatches=training.microbatches, itemsize=itemsize,
        bubble=training.bubble,
    )  # fmt: skip


def _model(workload: Workload, mesh: Mesh) -> tuple[State | None, Decoder]:
    """The training state, where there is one, and what is decoded with, as shapes on the mesh."""
    if workload.training is not None:
        state = make_state(workload, mesh)
        return state, read_decoder(state.structs.model)
    return None, read_decoder(model_structs(workload, mesh))


def _bytes(decoder: Decoder) -> int:
    return sum(block_bytes(leaf) for leaf in jax.tree.leaves(decoder[1]))


@contextlib.contextmanager
def _threads() -> Iterator[Callable[..., Future[Any]]]:
    """Two threads for what compiles, while this one waits and hears Ctrl-C and SIGTERM, which the compiler does not."""
    pool, futures = ThreadPoolExecutor(2), list[Future[Any]]()

    def submit(function: Callable[..., Any], *args: object) -> Future[Any]:
        future = pool.submit(function, *args)
        futures.append(future)
        return future

    try:
        yield submit
    except BaseException:
        give_work_up(lambda: all(future.done() for future in futures))
        raise
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _plan_sampling(
    workload: Workload,
    sampling: SamplingWorkload,
    mesh: Mesh,
    decoder: Decoder,
    cache: CompileCache,
    left: int,
    hosts: Sequence[int],
) -> SamplingPlan:
    """The sizes that `Engine.prepare` chooses for a round of sampling, by the function that sizes the engine.

    Args:
        left: The bytes of a device beside what is on it for the whole run.
    """
    free = sampling.engine.free_bytes(lambda: left)

    def make() -> Engine:
        return Engine(sampling.engine, mesh, vocab_size=sampling.vocab_size, compile_with=cache)

    try:
        engine = make()
        engine.prepare(decoder, sampling.requests, free=free)
    except CapacityError as error:
        raise InfeasibleError(_shorter(sampling, make, decoder, free, error)) from error
    except ConfigError as error:
        raise InfeasibleError(_config_infeasibility(workload, sampling, error)) from error
    except CompilerError as error:
        key, value = sampling.key("max_prefill_size"), sampling.engine.max_prefill_size
        raise InfeasibleError(Infeasibility(key=key, value=value, largest=None, text=str(error))) from error
    assert engine.sizing is not None
    if (refused := _over_limit(sampling, engine.sizing, left)) is not None:
        raise InfeasibleError(refused)
    programs = engine.programs
    unmet = never_used(request.params for request in sampling.requests)
    by_program = {name: collectives(Hlo(program.text(), unmet), len(hosts)) for name, program in programs.items()}
    steps = [collective for collective in by_program["decode"] if collective.in_step]
    by_program["decode"] = [collective for collective in by_program["decode"] if not collective.in_step]
    return SamplingPlan(
        workload=sampling,
        sizing=_over_turns(engine.sizing, sampling.turns),
        digests={name: program.digest for name, program in programs.items()},
        collectives={name: summed(of_program, hosts) for name, of_program in by_program.items()},
        step_collectives=summed(steps, hosts),
        vmem={name: vmem(program.text()) for name, program in programs.items()},
        drafts=draft_bytes(engine, unmet),
        code=sum(int(program.memory().generated_code_size_in_bytes) for program in programs.values()),
    )


def _over_limit(sampling: SamplingWorkload, sizing: Sizing, left: int) -> Infeasibility | None:
    """The infeasibility of an engine that fits the memory that it is told to count on, but not what there is."""
    needed, limit = (sizing.compiled or sizing.predicted).total, sampling.engine.memory_bytes_per_device
    if limit is None or needed <= left:
        return None
    key = sampling.key("memory_bytes_per_device")
    text = (
        f"{key} is {limit}, for which sampling is sized: it needs {needed} bytes per device, of which {left} are free. "
        f"Set it to at most {left}, or to null."
    )
    return Infeasibility(key=key, value=limit, largest=max(left, 0) or None, text=text)


def predict_sampling(workload: Workload, sampling: SamplingWorkload, topology: Topology) -> Sizing:
    """The sizes of the engine for a round of sampling beside the training state, before anything is compiled.

    Raises:
        CapacityError: It can never fit, or fits only the limit of its configuration.
    """
    mesh = make_mesh(workload.mesh_shape, topology.devices)
    state, decoder = _model(workload, mesh)
    left = chip_of(topology.devices[0]).memory - (state.resident if state else _bytes(decoder))
    free = sampling.engine.free_bytes(lambda: left)
    sizing = Engine(sampling.engine, mesh, vocab_size=sampling.vocab_size).predict(
        decoder, sampling.requests, free=free
    )
    if (refused := _over_limit(sampling, sizing, left)) is not None:
        raise CapacityError(refused.text)
    return _over_turns(sizing, sampling.turns)


def _over_turns(sizing: Sizing, turns: float) -> Sizing:
    """The sizes of a round that answers all of its requests so many times: it decodes for so much longer."""
    if turns == 1:
        return sizing

    def longer(choice: Any) -> Any:
        estimate = choice.estimate and dataclasses.replace(choice.estimate, steps=turns * choice.estimate.steps)
        return dataclasses.replace(choice, estimate=estimate)

    return dataclasses.replace(longer(sizing), considered=tuple(map(longer, sizing.considered)))


def _shorter(
    sampling: SamplingWorkload, make: Callable[[], Engine], decoder: Decoder, free: int, error: CapacityError
) -> Infeasibility:
    """The longest completions that fit: searched with the engine's prediction, then confirmed by the compiler."""
    asked = max(request.params.max_new_tokens for request in sampling.requests)

    def works(longest: int, *, compiled: bool) -> bool:
        engine = make()
        ask = engine.prepare if compiled else engine.check
        try:
            ask(decoder, _cut(sampling.requests, longest), free=free)
        except (CapacityError, CompilerError):
            return False
        return True

    low, high = 0, asked
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if works(middle, compiled=False) else (low, middle)
    while low and not works(low, compiled=True):
        low = low * 3 // 4
    return Infeasibility(key=sampling.key("max_new_tokens"), value=asked, largest=low or None, text=str(error))


def _cut(requests: Sequence[Request], most: int) -> list[Request]:
    return [
        dataclasses.replace(
            request, params=dataclasses.replace(request.params, max_new_tokens=min(most, request.params.max_new_tokens))
        )
        for request in requests
    ]


def _config_infeasibility(workload: Workload, sampling: SamplingWorkload | None, error: ConfigError) -> Infeasibility:
    """The infeasibility of the key that an error names; of the model's key where it names none."""
    keys = {f"trainer.{name}": f"trainer.{name}" for name in _TRAINER_KEYS} | {"mesh_shape": "trainer.mesh_shape"}
    keys |= {"data.max_seq_len": "data.max_seq_len"}
    if sampling is not None:
        keys |= {name: sampling.key(name) for name in _ENGINE_KEYS}
    key = key_in(str(error), keys)
    value = getattr(sampling.engine, key.rpartition(".")[2], None) if sampling is not None and key is not None else None
    return Infeasibility(key=key or workload.model_key, value=value, largest=largest_in(str(error)), text=str(error))


def _with_slice(
    infeasibility: Infeasibility, workload: Workload, topology: Topology, state: State | None
) -> Infeasibility:
    """An infeasibility that no value of the configuration cures, with the smallest slice that would cure it."""
    if infeasibility.key != workload.model_key or state is None:
        return infeasibility
    chip = chip_of(topology.devices[0])
    names = names_of(topology.slice_name.rpartition("-")[0])
    counts = {name: int(name.rpartition("-")[2]) for name in names}
    chips = counts[topology.slice_name]
    enough = [
        name for name in names if state.resident * chips / counts[name] < 0.8 * chip.memory and counts[name] > chips
    ]
    if not enough:
        return infeasibility
    smallest = min(enough, key=lambda name: counts[name])
    return dataclasses.replace(
        infeasibility, text=f"{infeasibility.text} The smallest slice that holds them with room to work is {smallest}."
    )
