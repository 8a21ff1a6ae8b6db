"""The requests of a run, read one ahead, and the sequences that answer them."""

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from typing import Final

from lockstep.engine.schedule.batch import Capacity
from lockstep.engine.schedule.ngrams import Ngrams
from lockstep.engine.schedule.pages import page_keys, tail_key
from lockstep.engine.schedule.planning import check_capacity
from lockstep.engine.schedule.sequence import PromptLogprobs, RoutedShape, Sequence
from lockstep.errors import ConfigError
from lockstep.types import Request

type FindStop = Callable[[Seq[int], int, Seq[str], Seq[int]], int | None]
"""Takes the tokens of an answer, how many of them are known to have no stop string, the stop strings, and the tokens of
the prompt. Returns the least number of tokens whose text has one, or None. It must be a pure function, the same on
every host."""

_END: Final = object()


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
                ngrams=ngrams, routed=self._routed, conversation=request.conversation if self._share_prefixes else None,
            )
            for generation in range(count)
        ]  # fmt: skip
