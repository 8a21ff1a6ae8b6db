"""The requests of a generation: which are refused, and the demand of the others: their capacity in unlimited memory."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence

from lockstep.engine.config import EngineConfig
from lockstep.engine.decode_model import DecodeModel, DecodeModels
from lockstep.engine.sampling.filters import check_named_filters, find_filter
from lockstep.engine.schedule import Capacity, check_length, sampling_sizes
from lockstep.errors import ConfigError, PromptError
from lockstep.models.attention.kv import revocable, shareable
from lockstep.placement.device import chip_named
from lockstep.types import Request

_LEAST_SLOTS = 64
"""Sequences that a replica decodes at a time unless the device is worth more."""
_MOST_SLOTS = 512
_LARGEST_PAGE_SIZE = 128
"""Tokens in the largest page that is taken unasked: more waste too much of the last page of each sequence."""
_PREFILL_TOKENS = 512
_STEPS = 64
_STOP_IDS = 4
_VERIFIED = 4
"""Tokens of a sequence that a launch verifies at most, by those that one decodes: most take a step for several."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Demand:
    """The demand of checked requests."""

    page_size: int
    longest: int  # pages of the longest request
    mean: float  # pages of a sequence, on average
    sequences: int  # sequences of all requests together
    context: float  # positions that a sequence has behind it at half of its answer, on average
    new_tokens: int  # tokens of the longest answer
    tokens: int  # tokens of the longest request, prompt and answer together
    prefill: int  # tokens of the longest prompt but for the last one, which decode reads
    generations: tuple[int, ...]  # sequences of each request, in falling order
    stop_ids: int  # the most stop tokens that a request has
    copies_pages: bool  # whether several sequences have the same prompt, and prefill ends on a partial page
    sampling: Mapping[str, int]  # what the requests ask of the sampler, by the name in `Capacity`
    more_filters: tuple[str, ...] = ()  # the names of the users' own filters, sorted
    drafts: bool = False

    @classmethod
    def of(cls, requests: Sequence[Request], page_size: int) -> "Demand":
        """The demand of some requests at worst: every answer is as long as it may be."""
        counts = [request.params.n_generations for request in requests]
        lengths = [len(request.prompt_tokens) + request.params.max_new_tokens for request in requests]
        pages = [-(-(length - 1) // page_size) for length in lengths]
        middles = [len(request.prompt_tokens) + request.params.max_new_tokens / 2 for request in requests]
        total = sum(counts)
        return cls(
            page_size=page_size,
            longest=max(pages),
            mean=sum(n * p for n, p in zip(counts, pages, strict=True)) / total,
            sequences=total,
            context=sum(n * m for n, m in zip(counts, middles, strict=True)) / total,
            new_tokens=max(request.params.max_new_tokens for request in requests),
            tokens=max(lengths),
            prefill=max(len(request.prompt_tokens) for request in requests) - 1,
            generations=tuple(sorted(counts, reverse=True)),
            stop_ids=max(len(request.params.stop_token_ids) for request in requests),
            copies_pages=_copies_pages(requests, page_size),
            sampling=sampling_sizes(request.params for request in requests),
            more_filters=tuple(sorted({name for request in requests for name in request.params.own_filters()})),
            drafts=any(request.drafts is not None for request in requests),
        )


def check_requests(requests: Sequence[Request], rows: int, vocab_size: int | None = None) -> None:
    """Refuse requests that a model cannot answer.

    Args:
        vocab_size: The number of token ids that may be sampled, from 0; None for all rows.

    Raises:
        ConfigError: A prompt_id is used twice or out of range, a token that neither model nor tokenizer has is asked
            for, or nothing is left to sample.
        PromptError: A prompt has a token that the model does not have.
    """
    for _ in checked(requests, rows, vocab_size):
        pass


def checked(requests: Iterable[Request | None], rows: int, vocab_size: int | None = None) -> Iterator[Request | None]:
    """Yield requests one by one, each when it has been checked as `check_requests` checks all.

    Args:
        requests: Any number of requests, which may be read as they are needed; None is yielded as it is.
        vocab_size: The number of token ids that may be sampled, from 0; None for all rows.

    Raises:
        ConfigError, PromptError: See `check_requests`.
    """
    seen: set[int] = set()
    for request in requests:
        if request is None:
            yield None
            continue
        number = request.prompt_id
        if number in seen:
            raise ConfigError(
                f"prompt_id {number} is used by several requests; random draws depend on it. Number the prompts "
                "differently."
            )
        seen.add(number)
        if not 0 <= number < 2**32:
            raise ConfigError(
                f"prompt_id is {number}; it must be at least 0 and less than 2**32. Number the prompts differently."
            )
        for at, token in enumerate(request.prompt_tokens):
            if not 0 <= token < rows:
                raise PromptError(
                    f"token {at} of prompt {number} is {token}; the model's vocabulary has ids 0 to {rows - 1}. Use "
                    "the tokenizer that the model was trained with."
                )
        for token in request.params.stop_token_ids:
            # A token of the tokenizer that the embedding does not have is never sampled, and ends nothing.
            if not 0 <= token < max(rows, vocab_size or 0):
                raise ConfigError(
                    f"stop_token_ids of prompt {number} has {token}; the model's vocabulary has ids 0 to {rows - 1}, "
                    "so that it would never stop. Remove it, or use the tokenizer that the model was trained with."
                )
        _check_sampling(request, rows if vocab_size is None else min(vocab_size, rows))
        yield request


def _check_sampling(request: Request, vocab: int) -> None:
    number, params = request.prompt_id, request.params
    check_named_filters(params.filter_values())
    for name in params.filter_values():
        find_filter(name)
    tokens_of = {"logit_bias": [token for token, _ in params.logit_bias], "allowed_token_ids": params.allowed_token_ids}
    for name, tokens in tokens_of.items():
        for token in tokens or ():
            if not 0 <= token < vocab:
                raise ConfigError(
                    f"{name} of prompt {number} has {token}; the ids that can be sampled are 0 to {vocab - 1}. Remove "
                    "it, or use the tokenizer that the model was trained with."
                )
    if params.top_logprobs > vocab:
        raise ConfigError(
            f"top_logprobs of prompt {number} is {params.top_logprobs}; there are {vocab} tokens. Set it to at most "
            f"{vocab}."
        )
    if params.rules_out_stops and set(range(vocab)) <= set(params.stops):
        raise ConfigError(
            f"all {vocab} tokens are stop tokens of prompt {number} and min_tokens is {params.min_tokens}, so that "
            "none could be sampled. Remove a stop token, or set min_tokens to 0."
        )


def measure_demand(config: EngineConfig, models: DecodeModels, requests: Sequence[Request]) -> Demand:
    """The demand of requests that are not longer than the model and the caps allow.

    Args:
        requests: At least one request.

    Raises:
        ConfigError: The cap ``max_seq_len`` is beyond what the model can do.
        CapacityError: A request is longer than the cap.
    """
    most = models.config.max_seq_len
    limit = config.max_seq_len or most
    if limit > most:
        raise ConfigError(
            f"max_seq_len of the engine is {limit}; the model was built for {most} tokens. Set it to at most {most}."
        )
    for request in requests:
        check_length(request, limit, most)
        if request.params.routed_experts and models.config.experts is None:
            raise ConfigError(
                f"routed_experts of prompt {request.prompt_id} is true; the model has no experts. Set it to false."
            )
        if request.params.prompt_logprobs and models.config.linear_attention is not None:
            raise ConfigError(
                f"prompt_logprobs of prompt {request.prompt_id} is true; the model has linear attention, and the state "
                "at each page of a prompt is gone after prefill. Set it to false."
            )
    return Demand.of(requests, config.first_page_size(models.mesh.devices.flat[0].platform))


def desired_capacity(
    config: EngineConfig, model: DecodeModel, demand: Demand, before: Capacity | None = None
) -> Capacity:
    """The capacity for a demand: explicit values are caps, the rest follows from the demand.

    Args:
        before: The capacity of an earlier call; none of it shrinks, so that programs are compiled again only to grow.
    """
    page_size, active = demand.page_size, model.active_replicas
    total = sum(demand.generations[: config.max_prompts_per_batch])
    most_slots = slots_per_replica(model.device.device_kind, model.device.platform, model.dtype.itemsize)
    sequences = min(total, config.max_seqs or most_slots * active)
    slots = -(-sequences // active)
    rows = min(slots * -(-demand.prefill // page_size), (config.max_prefill_size or _PREFILL_TOKENS) // page_size)
    steps = min(config.max_steps_per_launch or _STEPS, demand.new_tokens)
    desired = Capacity(
        replicas=model.decode_mesh.replicas,
        sequences=sequences,
        slots=slots,
        page_size=page_size,
        pages=0,
        pages_per_sequence=-(-(config.max_seq_len or demand.tokens) // page_size),
        prefill_rows=max(1, rows),
        steps=steps,
        stop_ids=max(-(-demand.stop_ids // _STOP_IDS), 1) * _STOP_IDS,
        page_copies=int(config.share_prefixes and shareable(model.kept) and demand.copies_pages),
        prefill_sequences=config.max_seqs_in_prefill or 0,
        idle_replicas=model.decode_mesh.replicas - active,
        draft_tokens=min(_VERIFIED * steps, demand.new_tokens) if demand.drafts and revocable(model.kept) else 0,
        more_filters=demand.more_filters,
        **demand.sampling,
    )
    if before is not None:
        desired = desired.at_least(before)
    pages = desired.slots * desired.pages_per_sequence + 1
    return dataclasses.replace(desired, pages=min(pages, config.max_pages or pages))


def slots_per_replica(kind: str, platform: str, itemsize: int) -> int:
    """Sequences per replica up to which a step takes hardly longer: reading the weights takes longer than using them.

    That is where ``2 * slots * weights / flops`` reaches ``itemsize * weights / bandwidth``. In whole 64s, at least 64
    and at most 512; of CPUs, whose numbers are guesses, 64.
    """
    if platform == "cpu":
        return _LEAST_SLOTS
    chip = chip_named(kind, platform)
    knee = chip.flops * itemsize / (2 * chip.bandwidth)
    return min(_MOST_SLOTS, max(_LEAST_SLOTS, int(knee) // 64 * 64))


def max_prompts(config: EngineConfig, sizes: Capacity, demand: Demand) -> int:
    """The number of prompts that the scheduler has at a time: as configured, else enough to fill every slot twice."""
    return config.max_prompts_per_batch or -(-2 * sizes.sequences // demand.generations[-1])


def larger_page_size(config: EngineConfig, page_size: int) -> int | None:
    """The next larger page that the configuration allows, in tokens; None where there is none."""
    twice = 2 * page_size
    largest = min(_LARGEST_PAGE_SIZE, config.max_prefill_size or _LARGEST_PAGE_SIZE)
    return None if config.page_size is not None or twice > largest else twice


def _copies_pages(requests: Sequence[Request], page_size: int) -> bool:
    """Whether several sequences have the same prompt, and prefill ends on a partial page."""
    seen: set[tuple[int, ...]] = set()
    for request in requests:
        if (len(request.prompt_tokens) - 1) % page_size:
            prompt = request.prompt_tokens[:-1]
            if request.params.n_generations > 1 or prompt in seen:
                return True
            seen.add(prompt)
    return False
