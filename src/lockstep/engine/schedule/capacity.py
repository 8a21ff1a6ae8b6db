"""Checks that requests fit: nothing is clamped and nothing is dropped."""

from collections.abc import Sequence as Seq

from lockstep.engine.schedule.batch import Capacity
from lockstep.engine.schedule.sampling import sampling_sizes
from lockstep.engine.schedule.sequence import Sequence
from lockstep.errors import CapacityError
from lockstep.types import Request


def check_length(request: Request, limit: int, largest: int | None = None) -> None:
    """Refuses a request that is longer than a sequence may be.

    Args:
        limit: The ``max_seq_len`` in use, in tokens of prompt and answer together.
        largest: The largest value that ``max_seq_len`` could be raised to; None if there is no bound.

    Raises:
        CapacityError: The request is too long; the message has the lengths, the limit and the changes that would help.
    """
    prompt, new = len(request.prompt_tokens), request.params.max_new_tokens
    if prompt + new <= limit:
        return
    ways = []
    if limit > new:
        ways.append(f"shorten the prompt to at most {limit - new} tokens")
    if limit > prompt:
        ways.append(f"lower max_new_tokens to at most {limit - prompt}")
    if largest is None or prompt + new <= largest:
        ways.append(f"raise max_seq_len to at least {prompt + new}")
    if not ways:
        ways.append("shorten the prompt and lower max_new_tokens")
    bound = "" if largest is None else f" (the model allows {largest})"
    fix = ", or ".join(ways)
    raise CapacityError(
        f"prompt {request.prompt_id} has {prompt} tokens and max_new_tokens is {new}, {prompt + new} together; "
        f"max_seq_len is {limit}{bound}. {fix[0].upper()}{fix[1:]}."
    )


def check_capacity(capacity: Capacity, requests: Seq[Request]) -> None:
    """Refuses requests that can never fit, whatever finishes before them.

    Raises:
        CapacityError: A request does not fit; the message has the prompt, its need, the limit and the fix.
    """
    for request in requests:
        check_length(request, capacity.pages_per_sequence * capacity.page_size)
        prompt, new = len(request.prompt_tokens), request.params.max_new_tokens
        pages = Sequence(request=request, generation_id=0).worst_case_pages(capacity.page_size)
        if pages > capacity.pages - 1:
            room = (capacity.pages - 1) * capacity.page_size + 1 - prompt
            other = f"lower max_new_tokens to at most {room}" if room >= 1 else "shorten the prompt"
            raise CapacityError(
                f"prompt {request.prompt_id} needs {pages} pages of {capacity.page_size} tokens for its {prompt} "
                f"prompt and {new} new tokens; a replica has {capacity.pages - 1} (max_pages less the null page). "
                f"Raise max_pages to at least {pages + 1}, or {other}."
            )
        if len(request.params.stop_token_ids) > capacity.stop_ids:
            raise CapacityError(
                f"prompt {request.prompt_id} has {len(request.params.stop_token_ids)} stop token ids; the programs "
                f"were built for {capacity.stop_ids}. Give fewer stop_token_ids."
            )
        for name in request.params.own_filters():
            if name not in capacity.more_filters:
                raise CapacityError(
                    f"prompt {request.prompt_id} needs the filter {name!r} of the sampler; the programs were built "
                    f"with {', '.join(capacity.more_filters) or 'none'}. Prepare the engine with this request too."
                )
        for feature, size in sampling_sizes([request.params]).items():
            if size > getattr(capacity, feature):
                raise CapacityError(
                    f"prompt {request.prompt_id} needs {feature} {size} of the sampler; the programs were built with "
                    f"{feature} {getattr(capacity, feature)}. Prepare the engine with this request too."
                )
