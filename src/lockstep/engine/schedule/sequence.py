"""The state of one completion while it is generated, what a launch returns for it, and the counts of a whole round."""

import dataclasses
from collections.abc import Iterable

import numpy as np
from jaxtyping import Float32, Int32

from lockstep.engine.schedule.ngrams import Ngrams
from lockstep.types import Completion, FinishReason, Request, RoutedExperts

TOKEN, LOGPROB, SAMPLED_LOGPROB, FIRST_TOP = 0, 1, 2, 3
"""The parts of `DecodeResults.packed`. From the last on come the ids of the most probable tokens, then the bits of
their log-probabilities."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class DecodeResults:
    """The samples of every slot in a launch."""

    packed: Int32[np.ndarray, "replica part slot step"]
    """Part 0 has the token ids, -1 where a sequence had already ended. The others have the bits of float32 numbers: the
    log-probabilities of the tokens under the model, those under the distribution that they were drawn from; and where
    sequences ask for them the ids of the n most probable tokens, most probable first, and n log-probabilities; and the
    words of the experts of the position before each token (`RoutedShape`)."""

    @classmethod
    def of(
        cls,
        tokens: Int32[np.ndarray, "replica slot step"],
        logprobs: Float32[np.ndarray, "replica slot step"],
        sampled_logprobs: Float32[np.ndarray, "replica slot step"] | None = None,
        top_ids: Int32[np.ndarray, "replica slot step n"] | None = None,
        top_logprobs: Float32[np.ndarray, "replica slot step n"] | None = None,
    ) -> "DecodeResults":
        """Pack separate arrays.

        Args:
            tokens: The token ids, -1 where a sequence had already ended.
            sampled_logprobs: The log-probabilities under the distribution drawn from; None for zeros.
            top_ids: The ids of the most probable tokens; None where no sequence asks for them.
        """
        sampled = np.zeros_like(logprobs) if sampled_logprobs is None else sampled_logprobs
        parts = [tokens, logprobs, sampled]
        for top in (top_ids, top_logprobs):
            if top is not None:
                parts += list(np.moveaxis(top, -1, 0))
        return cls(packed=np.stack([np.ascontiguousarray(part).view(np.int32) for part in parts], axis=1))

    def split_steps(self) -> tuple["DecodeResults", Int32[np.ndarray, "replica slot step"]]:
        """Return the results of a launch that verifies drafts as those of decode, and the step of each token."""
        return DecodeResults(packed=self.packed[:, :-1]), self.packed[:, -1]

    @property
    def tokens(self) -> Int32[np.ndarray, "replica slot step"]:
        """The token ids, -1 where a sequence had already ended."""
        return self.packed[:, TOKEN]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoutedShape:
    """The experts of a token as words of 32 bits."""

    layers: int
    choices: int  # number of experts that a token is given to
    experts: int

    @property
    def dtype(self) -> np.dtype:
        """The type of a number in the words; -1 is no expert."""
        return np.dtype(np.int8 if self.experts <= 128 else np.int16)

    @property
    def words(self) -> int:
        """The number of words of a token."""
        return -(-self.layers * self.choices * self.dtype.itemsize // 4)

    def unpacked(self, words: Int32[np.ndarray, "word token"]) -> RoutedExperts:
        """Return the experts of some tokens."""
        numbers = np.ascontiguousarray(words.T).view(self.dtype)[:, : self.layers * self.choices]
        return RoutedExperts((len(numbers), self.layers, self.choices), numbers.astype("<i2").tobytes())


def as_floats(bits: Int32[np.ndarray, "*shape"]) -> Float32[np.ndarray, "*shape"]:
    """Return the float32 numbers with the given bits."""
    return np.ascontiguousarray(bits).view(np.float32)


@dataclasses.dataclass(kw_only=True, eq=False)
class PromptLogprobs:
    """The log-probabilities of a prompt so far, from its second token on; filled page by page."""

    request: Request
    """The request."""
    logprobs: list[float] = dataclasses.field(default_factory=list)
    """The natural-log probability of each token."""
    top_logprobs: list[tuple[tuple[int, float], ...]] = dataclasses.field(default_factory=list)
    """The most probable (token id, natural-log probability) pairs in place of each token, where requested."""

    @property
    def done(self) -> bool:
        """Whether every token but the first has its log-probability."""
        return len(self.logprobs) == len(self.request.prompt_tokens) - 1

    def add(self, logprobs: np.ndarray, ids: np.ndarray | None, values: np.ndarray | None) -> None:
        """Append the log-probabilities of the next tokens.

        Args:
            logprobs: The log-probabilities ``[token]``.
            ids: The ids of the most probable tokens ``[token, n]``, most probable first; None where there are none.
            values: The log-probabilities of ``ids``.
        """
        self.logprobs += logprobs.tolist()
        if count := self.request.params.top_logprobs:
            assert ids is not None and values is not None
            pairs = zip(ids[:, :count].tolist(), values[:, :count].tolist(), strict=True)
            self.top_logprobs += [tuple(zip(*pair, strict=True)) for pair in pairs]

    def result(self) -> tuple[tuple[float | None, ...], tuple[tuple[tuple[int, float], ...], ...]]:
        """Return ``prompt_logprobs`` and ``prompt_top_logprobs`` of `Completion`, both empty until all are there."""
        if not self.done:
            return (), ()
        return (None, *self.logprobs), ((), *self.top_logprobs) if self.request.params.top_logprobs else ()


@dataclasses.dataclass(kw_only=True, eq=False)
class Sequence:
    """The state of one generation of one request. Only the scheduler changes it.

    The first decode step writes the K/V of the prompt's last token, so prefill writes that of ``num_prefill`` tokens.
    """

    request: Request
    """The request."""
    generation_id: int
    """The generation, 0 to ``n_generations - 1``."""
    prefix_keys: list[bytes] = dataclasses.field(default_factory=list)
    """The keys of the full pages that prefill writes (`page_keys`)."""
    tail_key: bytes | None = None
    """The key of the partial page that prefill ends with (`tail_key`); None where there is none."""
    prompt_logprobs: PromptLogprobs | None = None
    """The log-probabilities of the prompt, shared by all generations; None where they are not requested."""
    ngrams: Ngrams | None = None
    """The texts of the request in which guesses are looked up, shared by all generations; None without such guesses."""
    routed: RoutedShape | None = None
    """The form of the experts in results; None where programs report none."""
    routed_prompt: list[Int32[np.ndarray, "word token"]] | None = None
    """The experts of the pages of the prompt, once the sequence has ended; None where not all were prefilled."""
    conversation: int | None = None
    """The conversation that it is a turn of; None where it is of none."""
    num_tokens: int = 0
    """The number of sampled tokens."""
    finish_reason: FinishReason | None = None
    """Why the sequence ended; None while it is waiting or decoding."""
    replica: int = -1
    """The replica; -1 before admission."""
    slot: int = -1
    """The slot of the replica; -1 before admission."""
    pages: list[int] = dataclasses.field(default_factory=list)
    """The pages of the replica, in order; none before admission and after release."""
    num_prefilled: int = 0
    """The number of tokens whose K/V is written, or is in a launch that writes it."""
    num_cached: int = 0
    """The number of tokens that a next turn of its conversation need not prefill if all is kept, once it has ended."""
    _sampled: list[Int32[np.ndarray, "part token"]] = dataclasses.field(default_factory=list)
    """The samples of each launch, as in `DecodeResults`."""
    _tokens: list[int] = dataclasses.field(default_factory=list)
    """The token ids of the first launches, made when they are asked for."""
    _num_listed: int = 0
    """The number of launches whose token ids are in ``_tokens``."""
    _completion: Completion | None = None
    """The finished answer, once it is made."""

    @property
    def tokens(self) -> list[int]:
        """The sampled token ids."""
        for sampled in self._sampled[self._num_listed :]:
            self._tokens += sampled[TOKEN].tolist()
        self._num_listed = len(self._sampled)
        return self._tokens

    @property
    def num_prefill(self) -> int:
        """The number of tokens whose K/V prefill writes: all of the prompt but the last."""
        return len(self.request.prompt_tokens) - 1

    @property
    def last_token(self) -> int:
        """The token id that the next decode step reads."""
        return self.tokens[-1] if self.num_tokens else self.request.prompt_tokens[-1]

    @property
    def position(self) -> int:
        """The position of ``last_token``."""
        return len(self.request.prompt_tokens) + self.num_tokens - 1

    @property
    def remaining(self) -> int:
        """The number of tokens that may still be sampled."""
        return self.request.params.max_new_tokens - self.num_tokens

    def worst_case_pages(self, page_size: int) -> int:
        """Return the number of pages for all positions that can be written; the last sampled token is not cached."""
        positions = len(self.request.prompt_tokens) + self.request.params.max_new_tokens - 1
        return -(-positions // page_size)

    def extend(self, sampled: Int32[np.ndarray, "part token"]) -> None:
        """Append the tokens of a launch: what `DecodeResults` has for the sequence, which must never change."""
        assert self.finish_reason is None
        self._sampled.append(sampled)
        self.num_tokens += sampled.shape[1]

    def stop_at(self, count: int) -> None:
        """End the answer after its first ``count`` tokens, and remove the others."""
        assert 0 < count <= self.num_tokens
        self._sampled = [np.concatenate(self._sampled, axis=1)[:, :count]]
        self._tokens, self._num_listed, self.num_tokens = [], 0, count
        self.finish_reason = FinishReason.STOP

    def completion(self) -> Completion:
        """Return the finished answer, which is made once."""
        if self._completion is None:
            self._completion = self._make_completion()
        return self._completion

    def _make_completion(self) -> Completion:
        assert self.finish_reason is not None
        record = self.prompt_logprobs
        prompt_logprobs, prompt_top_logprobs = ((), ()) if record is None else record.result()
        words = 0 if self.routed is None else self.routed.words
        empty = [np.empty((FIRST_TOP + words, 0), np.int32)]
        sampled = np.concatenate(self._sampled or empty, axis=1)
        sampled = sampled[: len(sampled) - words]
        return Completion(
            prompt_id=self.request.prompt_id,
            generation_id=self.generation_id,
            tokens=tuple(sampled[TOKEN].tolist()),
            logprobs=tuple(as_floats(sampled[LOGPROB]).tolist()),
            finish_reason=self.finish_reason,
            sampled_logprobs=tuple(as_floats(sampled[SAMPLED_LOGPROB]).tolist()),
            top_logprobs=_top_logprobs(sampled[FIRST_TOP:], self.request.params.top_logprobs),
            prompt_logprobs=prompt_logprobs,
            prompt_top_logprobs=prompt_top_logprobs,
            routed_experts=self._routed_experts(),
        )

    @property
    def routed_words(self) -> Int32[np.ndarray, "word token"]:
        """The words of the experts of every token with K/V, of an ended sequence whose programs report them."""
        assert self.routed is not None and self.routed_prompt is not None
        sampled = np.concatenate(self._sampled, axis=1)[-self.routed.words :]
        prompt = np.concatenate([sampled[:, :0], *self.routed_prompt], axis=1)[:, : self.num_prefill]
        return np.concatenate([prompt, sampled], axis=1)

    def _routed_experts(self) -> RoutedExperts | None:
        if self.routed is None or not self.request.params.routed_experts:
            return None
        if self.routed_prompt is None or not self.num_tokens:
            return None
        return self.routed.unpacked(self.routed_words)


def _top_logprobs(parts: Int32[np.ndarray, "part token"], count: int) -> tuple[tuple[tuple[int, float], ...], ...]:
    """The ``count`` most probable (token id, log-probability) of each token; nothing for 0."""
    if not count:
        return ()
    ids, values = np.split(parts, 2)
    pairs = zip(ids[:count].T.tolist(), as_floats(values[:count]).T.tolist(), strict=True)
    return tuple(tuple(zip(*pair, strict=True)) for pair in pairs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftCounts:
    """Counts of drafted tokens and of steps saved."""

    tokens: int
    steps: int  # number of steps that sampled them, counted once for each sequence
    drafted: int  # number of tokens for which there was a draft
    right: int  # number of those that were as drafted

    @classmethod
    def sum(cls, counts: "Iterable[DraftCounts]") -> "DraftCounts":
        """Return the counts of all together."""
        total = [0, 0, 0, 0]
        for addend in counts:
            total = [a + b for a, b in zip(total, dataclasses.astuple(addend), strict=True)]
        return cls(tokens=total[0], steps=total[1], drafted=total[2], right=total[3])

    def metrics(self) -> dict[str, float]:
        """Return the same under the names that a tracker gets, without the prefix."""
        return {
            "drafts/accepted_share": self.right / self.drafted if self.drafted else 0.0,
            "drafts/steps_saved": self.tokens - self.steps,
            "drafts/tokens_per_step": self.tokens / self.steps if self.steps else 0.0,
        }

    def __str__(self) -> str:
        share = self.right / self.drafted if self.drafted else 0.0
        return f"{share:.0%} right, {self.tokens - self.steps:,} of {self.tokens:,} steps saved"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counts:
    """The progress of a scheduler, answers that were taken from it included."""

    finished: int
    tokens: tuple[int, ...]  # number of tokens sampled by each replica, those of unfinished sequences included
    pages: int  # number of pages in use, over all replicas
    max_pages: int  # number of pages that can be used, over all replicas
    steps: int = 0  # steps that sampled them, once for each sequence; fewer than tokens where drafts were verified
    drafted: int = 0  # number of tokens for which there was a draft
    right: int = 0  # number of those that were as drafted
    prefilled: int = 0  # number of prompt tokens that were prefilled, each time that they were
    prefilled_again: int = 0  # number of those that an earlier turn had in the cache, where it was not kept

    @property
    def of_drafts(self) -> DraftCounts:
        """Counts of drafts so far."""
        return DraftCounts(tokens=sum(self.tokens), steps=self.steps, drafted=self.drafted, right=self.right)


def digest_parts(completions: Iterable[Completion]) -> list[bytes | str]:
    """All that completions say, for a digest; their numbers as bytes: ``repr`` of them takes ten times as long."""
    parts: list[bytes | str] = []
    for completion in completions:
        numbers = (completion.tokens, completion.logprobs, completion.sampled_logprobs)
        parts += [np.asarray(column, np.float64).tobytes() for column in numbers]
        parts.append(repr(dataclasses.replace(completion, tokens=(), logprobs=(), sampled_logprobs=())))
    return parts
