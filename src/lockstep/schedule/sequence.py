"""The state of one completion while it is generated: its tokens, its pages, its slot."""

import dataclasses

from lockstep.schedule.prompt_logprobs import PromptLogprobs
from lockstep.types import Completion, FinishReason, Request


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
    tokens: list[int] = dataclasses.field(default_factory=list)
    """The sampled token ids."""
    logprobs: list[float] = dataclasses.field(default_factory=list)
    """The log-probability of each sampled token under the model."""
    sampled_logprobs: list[float] = dataclasses.field(default_factory=list)
    """The log-probability of each sampled token under the distribution that it was drawn from."""
    top_logprobs: list[tuple[tuple[int, float], ...]] = dataclasses.field(default_factory=list)
    """The most probable (token id, log-probability) pairs at each step, where requested."""
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

    @property
    def num_prefill(self) -> int:
        """The number of tokens whose K/V prefill writes: all of the prompt but the last."""
        return len(self.request.prompt_tokens) - 1

    @property
    def last_token(self) -> int:
        """The token id that the next decode step reads."""
        return self.tokens[-1] if self.tokens else self.request.prompt_tokens[-1]

    @property
    def position(self) -> int:
        """The position of ``last_token``."""
        return len(self.request.prompt_tokens) + len(self.tokens) - 1

    @property
    def remaining(self) -> int:
        """The number of tokens that may still be sampled."""
        return self.request.params.max_new_tokens - len(self.tokens)

    def worst_case_pages(self, page_size: int) -> int:
        """Returns the number of pages for all positions that can be written; the last sampled token is not cached."""
        positions = len(self.request.prompt_tokens) + self.request.params.max_new_tokens - 1
        return -(-positions // page_size)

    def append(
        self,
        token: int,
        logprob: float,
        sampled_logprob: float = 0.0,
        top_logprobs: tuple[tuple[int, float], ...] = (),
    ) -> None:
        """Appends a sampled token; sets ``finish_reason`` when it is the last one."""
        assert self.finish_reason is None
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.sampled_logprobs.append(sampled_logprob)
        if top_logprobs:
            self.top_logprobs.append(top_logprobs)
        if token in self.request.params.stops:
            self.finish_reason = FinishReason.STOP
        elif self.remaining == 0:
            self.finish_reason = FinishReason.LENGTH

    def stop_at(self, count: int) -> None:
        """Ends the answer after its first ``count`` tokens, and removes the others."""
        assert 0 < count <= len(self.tokens)
        for values in (self.tokens, self.logprobs, self.sampled_logprobs, self.top_logprobs):
            del values[count:]
        self.finish_reason = FinishReason.STOP

    def completion(self) -> Completion:
        """Returns the finished answer."""
        assert self.finish_reason is not None
        record = self.prompt_logprobs
        prompt_logprobs, prompt_top_logprobs = ((), ()) if record is None else record.result()
        return Completion(
            prompt_id=self.request.prompt_id,
            generation_id=self.generation_id,
            tokens=tuple(self.tokens),
            logprobs=tuple(self.logprobs),
            finish_reason=self.finish_reason,
            sampled_logprobs=tuple(self.sampled_logprobs),
            top_logprobs=tuple(self.top_logprobs),
            prompt_logprobs=prompt_logprobs,
            prompt_top_logprobs=prompt_top_logprobs,
        )
