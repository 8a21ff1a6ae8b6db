"""The way in: requests are read one ahead, refused or made sequences, and each of these is given a replica."""

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from typing import Final

import numpy as np
from jaxtyping import Int

from lockstep.engine.schedule.batch import Capacity
from lockstep.engine.schedule.ngrams import Ngrams
from lockstep.engine.schedule.pages import page_keys, tail_key
from lockstep.engine.schedule.replica import Replica
from lockstep.engine.schedule.sequence import PromptLogprobs, RoutedShape, Sequence
from lockstep.errors import CapacityError, ConfigError
from lockstep.types import Request, SamplingParams

type FindStop = Callable[[Seq[int], int, Seq[str], Seq[int]], int | None]
"""Takes the tokens of an answer, how many of them are known to have no stop string, the stop strings, and the tokens of
the prompt. Returns the least number of tokens whose text has one, or None. It must be a pure function, the same on
every host."""

_END: Final = object()
_LEAST_WIDTH = 8
"""The least number of entries of a padded list."""


def sampling_sizes(params: Iterable[SamplingParams]) -> dict[str, int]:
    """Return the fields of `Capacity` that say which sampling features the programs need; 0 leaves a feature out."""
    sizes = {"filters": 0, "penalties": 0, "min_tokens": 0, "bias_ids": 0, "allowed_ids": 0}
    sizes |= {"top_logprobs": 0, "prompt_logprobs": 0, "routed_experts": 0}
    for rules in params:
        needed = {
            "filters": int(rules.has_filters),
            "penalties": int(rules.has_penalties),
            "min_tokens": int(rules.rules_out_stops),
            "bias_ids": _round_up(len(rules.logit_bias)),
            "allowed_ids": _round_up(len(rules.allowed_token_ids or ())),
            "top_logprobs": rules.top_logprobs,
            "prompt_logprobs": int(rules.prompt_logprobs),
            "routed_experts": int(rules.routed_experts),
        }
        sizes = {name: max(size, needed[name]) for name, size in sizes.items()}
    return sizes


def _round_up(width: int) -> int:
    """Round up to a power of two, so that lists of other lengths seldom need other programs."""
    return max(_LEAST_WIDTH, 1 << (width - 1).bit_length()) if width else 0


def check_length(request: Request, limit: int, largest: int | None = None) -> None:
    """Refuse a request that is longer than a sequence may be.

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
    bound = f"max_seq_len is {limit}" + ("" if largest is None else f" (the model allows {largest})")
    if limit == largest:  # which may be nothing that a user has set
        bound = f"the model allows {largest}"
    fix = ", or ".join(ways)
    raise CapacityError(
        f"prompt {request.prompt_id} has {prompt} tokens and max_new_tokens is {new}, {prompt + new} together; "
        f"{bound}. {fix[0].upper()}{fix[1:]}."
    )


def check_capacity(capacity: Capacity, requests: Seq[Request]) -> None:
    """Refuse requests that can never fit, whatever finishes before them.

    Raises:
        CapacityError: A request does not fit; the message has the prompt, its need, the limit and the fix.
    """
    for request in requests:
        check_length(request, capacity.pages_per_sequence * capacity.page_size)
        prompt, new = len(request.prompt_tokens), request.params.max_new_tokens
        pages = Sequence(request=request, generation_id=0).worst_case_pages(capacity.page_size)
        if pages > capacity.pages - 1:
            room = (capacity.pages - 1) * capacity.page_size + 1 - prompt
            alternative = f"lower max_new_tokens to at most {room}" if room >= 1 else "shorten the prompt"
            raise CapacityError(
                f"prompt {request.prompt_id} needs {pages} pages of {capacity.page_size} tokens for its {prompt} "
                f"prompt and {new} new tokens; a replica has {capacity.pages - 1} (max_pages less the null page). "
                f"Raise max_pages to at least {pages + 1}, or {alternative}."
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


class Intake:
    """Reads requests and makes sequences of them.

    Args:
        requests: The requests; an iterator may give None where it has none for now, and is asked again later.
        find_stop: The function that finds stop strings; needed if a request has any.
        share_prefixes: Whether sequences with a common prefix share its pages.
        routed: The form of the experts in results, where the programs report them.

    Raises:
        CapacityError: A request can never fit; where they are a list, before the first is read.
        ConfigError: A request has stop strings and there is no ``find_stop``.
    """

    def __init__(
        self,
        capacity: Capacity,
        requests: Iterable[Request | None],
        find_stop: FindStop | None,
        *,
        share_prefixes: bool,
        routed: RoutedShape | None,
    ) -> None:
        self._capacity, self._find_stop = capacity, find_stop
        self._share_prefixes, self._routed = share_prefixes, routed
        self._checked = isinstance(requests, Seq)
        if isinstance(requests, Seq):
            self._check([request for request in requests if request is not None])
        self._source: Iterator[Request | None] = iter(requests)
        self._next: Request | None = None
        self.ended = False
        """Whether no request is left, nor will come."""
        self._advance()

    def next_sequences(self) -> list[Sequence] | None:
        """Return the sequences of the next request; None where there is none, for now or for good."""
        if self._next is None:
            self._advance()
        request = self._next
        if request is None:
            return None
        if not self._checked:
            self._check([request])
        self._advance()
        return self._sequences_of(request)

    def close(self) -> None:
        """Read no more."""
        self._next, self.ended = None, True

    def _advance(self) -> None:
        self._next = None
        if not self.ended:
            following = next(self._source, _END)
            self.ended = following is _END
            self._next = following if isinstance(following, Request) else None

    def _check(self, requests: Seq[Request]) -> None:
        check_capacity(self._capacity, requests)
        for request in requests:
            if request.params.stop and self._find_stop is None:
                raise ConfigError(
                    f"prompt {request.prompt_id} has the stop strings {list(request.params.stop)}; the engine knows no "
                    "tokenizer. Pass find_stop=lockstep.StopFinder(tokenizer)."
                )

    def _sequences_of(self, request: Request) -> list[Sequence]:
        size = self._capacity.page_size
        # Only what prefill writes can be shared: decode writes the K/V of the prompt's last token.
        shared = request.prompt_tokens[:-1] if self._share_prefixes else ()
        keys = page_keys(shared, size)
        tail = tail_key(shared, size, keys)
        record = PromptLogprobs(request=request) if request.params.prompt_logprobs else None
        count, ngrams = request.params.n_generations, None
        if request.drafts is not None and request.drafts.ngrams:
            ngrams = Ngrams(request.prompt_tokens, count)
        return [
            Sequence(
                request=request, generation_id=generation, prefix_keys=keys, tail_key=tail, prompt_logprobs=record,
                ngrams=ngrams, routed=self._routed, conversation=request.conversation,
            )
            for generation in range(count)
        ]  # fmt: skip


class Admission:
    """Free slots and pages of all replicas as arrays, which one sequence is compared with at once."""

    def __init__(self, capacity: Capacity, replicas: Iterable[Replica]) -> None:
        self._page_size = capacity.page_size
        self._replicas = {replica.index: replica for replica in replicas}
        self._free_slots = np.zeros(capacity.replicas, np.int64)
        self._free_pages = np.zeros(capacity.replicas, np.int64)
        self._idle_pages = np.zeros(capacity.replicas, np.int64)
        self._holders: dict[bytes, set[int]] = {}
        for replica in self._replicas.values():
            replica.holders = self._holders
            self.update(replica)

    def update(self, replica: Replica) -> None:
        """Note the free slots and pages of a replica that changed."""
        self._free_slots[replica.index] = replica.num_free_slots
        self._free_pages[replica.index] = replica.allocator.num_free
        self._idle_pages[replica.index] = replica.allocator.num_idle

    def choose(self, sequence: Sequence, *, crowded: bool) -> Replica | None:
        """Return the replica with most free slots among those with room for the worst case, the first of equal ones.

        Args:
            crowded: Whether all slots will be taken anyway, or the K/V of a conversation was kept: the replica that has
                most of the prompt comes first then, so that a prompt is prefilled once and not once per replica.

        Returns:
            The replica; None where none has room.
        """
        need = sequence.worst_case_pages(self._page_size)
        room = np.where(self._free_pages >= need, self._free_slots, 0)
        for num_pages, holders in self._holders_of(sequence):
            missing = need - num_pages + self._num_idle(holders, sequence.prefix_keys[:num_pages])
            fitting = np.where(self._free_pages[holders] >= missing, self._free_slots[holders], 0)
            best = int(fitting.argmax())
            if crowded and fitting[best]:
                return self._replicas[int(holders[best])]
            room[holders] = np.maximum(room[holders], fitting)
        best = int(room.argmax())
        return self._replicas[best] if room[best] else None

    def _num_idle(self, holders: Int[np.ndarray, " replica"], keys: list[bytes]) -> Int[np.ndarray, " replica"]:
        """The number of pages with these keys that conversations alone keep: they count as free on their replica."""
        if not self._idle_pages.any():
            return np.zeros(len(holders), np.int64)
        return np.array([self._replicas[int(holder)].num_idle(keys) for holder in holders])

    def _holders_of(self, sequence: Sequence) -> Iterator[tuple[int, Int[np.ndarray, " replica"]]]:
        """The replicas that have part of a prompt, with its full pages there; those with the longest part first."""
        keys = sequence.prefix_keys
        parts = [(len(keys), sequence.tail_key), *((count, keys[count - 1]) for count in range(len(keys), 0, -1))]
        for num_pages, key in parts:
            if key is not None and (holders := self._holders.get(key)):
                yield num_pages, np.array(sorted(holders))
