"""How large everything would be if memory were no matter: capacities for the requests, within the caps."""

import dataclasses
from collections.abc import Sequence

from lockstep.device import chip_named
from lockstep.engine.config import DEFAULT_PAGE_SIZE, EngineConfig
from lockstep.engine.decoder.kv_replication import replicates_kv_heads
from lockstep.errors import ConfigError
from lockstep.models.config import LlamaConfig
from lockstep.placement.decode_mesh import DecodeMesh, tensor_sizes
from lockstep.schedule import Capacity, check_length, sampling_sizes
from lockstep.types import Request

SLOTS_PER_REPLICA = 64
"""Sequences that a replica decodes at a time unless the device is worth more (`slots_per_replica`)."""
_MOST_SLOTS = 512
_TPU_PAGE_SIZE = 64
_PREFILL_TOKENS = 512
_STEPS = 64
_STOP_IDS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Demand:
    """What requests ask of the KV cache, in pages of one replica.

    Args:
        longest: of the longest request.
        mean: of a sequence, on average.
        sequences: of all requests together.
        context: positions that a sequence has behind it at half of its answer, on average.
        new_tokens: of the longest answer.
    """

    longest: int
    mean: float
    sequences: int
    context: float
    new_tokens: int

    @classmethod
    def of(cls, requests: Sequence[Request], page_size: int) -> "Demand":
        """Worst cases: every answer as long as it may be."""
        counts = [request.params.n_generations for request in requests]
        lengths = [len(request.prompt_tokens) + request.params.max_new_tokens - 1 for request in requests]
        pages = [-(-length // page_size) for length in lengths]
        middles = [len(request.prompt_tokens) + request.params.max_new_tokens / 2 for request in requests]
        total = sum(counts)
        return cls(
            longest=max(pages),
            mean=sum(n * p for n, p in zip(counts, pages, strict=True)) / total,
            sequences=total,
            context=sum(n * m for n, m in zip(counts, middles, strict=True)) / total,
            new_tokens=max(request.params.max_new_tokens for request in requests),
        )


def work_out_sizes(
    config: EngineConfig,
    model: LlamaConfig,
    decode_mesh: DecodeMesh,
    requests: Sequence[Request],
    before: Capacity | None = None,
    slots_per_replica: int = SLOTS_PER_REPLICA,
    resting: int = 0,
) -> Capacity:
    """Capacities for ``requests``: explicit values are caps, the rest follows from the requests.

    Args:
        config: of the engine.
        model: of the model.
        decode_mesh: the decode mesh.
        requests: at least one.
        before: sizes of an earlier call; sizes never shrink, so that programs are compiled again only to grow.
        slots_per_replica: sequences per replica where ``max_seqs`` is null.
        resting: replicas that are given no sequences.

    Raises:
        ConfigError: a capacity beyond what the model or the layout can do.
        CapacityError: a request that is longer than the cap.
    """
    check_layout(model, decode_mesh)
    limit = config.max_seq_len or model.max_seq_len
    if limit > model.max_seq_len:
        raise ConfigError(
            f"max_seq_len of the engine is {limit}; the model was built for {model.max_seq_len} tokens. Set it to at "
            f"most {model.max_seq_len}."
        )
    for request in requests:
        check_length(request, limit, model.max_seq_len)
    page_size = config.page_size or _page_size(config, decode_mesh)
    longest = config.max_seq_len or max(len(r.prompt_tokens) + r.params.max_new_tokens for r in requests)
    counts = sorted((r.params.n_generations for r in requests), reverse=True)
    total = sum(counts[: config.max_prompts_per_batch])
    working = decode_mesh.replicas - resting
    sequences = min(total, config.max_seqs or slots_per_replica * working)
    prefill = max(len(r.prompt_tokens) for r in requests) - 1
    slots = -(-sequences // working)
    rows = min(slots * -(-prefill // page_size), (config.max_prefill_size or _PREFILL_TOKENS) // page_size)
    wanted = Capacity(
        replicas=decode_mesh.replicas,
        sequences=sequences,
        slots=slots,
        page_size=page_size,
        pages=0,
        pages_per_sequence=-(-longest // page_size),
        prefill_rows=max(1, rows),
        steps=min(config.max_steps_per_launch or _STEPS, max(r.params.max_new_tokens for r in requests)),
        stop_ids=_round_up(max(len(r.params.stop_token_ids) for r in requests), _STOP_IDS),
        page_copies=int(config.share_prefixes and _fork(requests, page_size)),
        prefill_sequences=config.max_seqs_in_prefill or 0,
        idle_replicas=resting,
        **sampling_sizes(r.params for r in requests),
    )
    if before is not None:
        pairs = ((f.name, getattr(wanted, f.name), getattr(before, f.name)) for f in dataclasses.fields(wanted))
        wanted = Capacity(**{name: max(new, old) for name, new, old in pairs})
    pages = wanted.slots * wanted.pages_per_sequence + 1
    return dataclasses.replace(wanted, pages=min(pages, config.max_pages or pages))


def slots_per_replica(kind: str, platform: str, itemsize: int) -> int:
    """Sequences per replica up to which a step takes hardly longer: reading the weights takes longer than using them.

    That is where ``2 * slots * weights / flops`` reaches ``itemsize * weights / bandwidth``. In whole 64s, at least 64
    and at most 512; of CPUs, whose numbers are guesses, 64.

    Args:
        kind: ``device_kind`` of a device.
        platform: cpu, gpu or tpu.
        itemsize: bytes of a weight.
    """
    if platform == "cpu":
        return SLOTS_PER_REPLICA
    chip = chip_named(kind, platform)
    knee = chip.flops * itemsize / (2 * chip.bandwidth)
    return min(_MOST_SLOTS, max(SLOTS_PER_REPLICA, int(knee) // 64 * 64))


def prompts_at_a_time(config: EngineConfig, sizes: Capacity, requests: Sequence[Request]) -> int:
    """How many prompts the scheduler holds: as configured, else enough to fill every slot twice.

    Args:
        config: of the engine.
        sizes: in use.
        requests: at least one.
    """
    fewest = min(r.params.n_generations for r in requests)
    return config.max_prompts_per_batch or -(-2 * sizes.sequences // fewest)


def check_layout(model: LlamaConfig, decode_mesh: DecodeMesh) -> None:
    """Raises ConfigError when the model cannot be split over the tensor axes of ``decode_mesh``."""
    for name, size in _split(model, decode_mesh.tensor).items():
        if size % decode_mesh.tensor:
            works = [tensor for tensor in tensor_sizes(decode_mesh.training_shape) if fits_model(model, tensor)]
            raise ConfigError(
                f"layout {{tensor: {decode_mesh.tensor}}} splits {name} = {size}, which it does not divide. Set tensor to one "
                f"of {works}."
            )


def fits_model(model: LlamaConfig, tensor: int) -> bool:
    """Whether so many devices can split the model."""
    return not any(size % tensor for size in _split(model, tensor).values())


def _split(model: LlamaConfig, tensor: int) -> dict[str, int]:
    heads = {} if replicates_kv_heads(model, tensor) else {"num_kv_heads": model.num_kv_heads}
    return heads | {"intermediate_dim": model.intermediate_dim}


def _page_size(config: EngineConfig, decode_mesh: DecodeMesh) -> int:
    """On TPU larger pages: attention copies page by page, and a small copy takes as long as a large one."""
    size = _TPU_PAGE_SIZE if decode_mesh.mesh.devices.flat[0].platform == "tpu" else DEFAULT_PAGE_SIZE
    while config.max_prefill_size is not None and size > config.max_prefill_size:
        size //= 2
    return size


def _fork(requests: Sequence[Request], page_size: int) -> bool:
    """Whether several sequences have the same prompt, and prefill ends on a partial page."""
    seen: set[tuple[int, ...]] = set()
    for request in requests:
        if (len(request.prompt_tokens) - 1) % page_size:
            prompt = request.prompt_tokens[:-1]
            if request.params.n_generations > 1 or prompt in seen:
                return True
            seen.add(prompt)
    return False


def _round_up(value: int, multiple: int) -> int:
    return max(-(-value // multiple), 1) * multiple
