"""One completion in the making: its tokens, its pages, its slot."""

import dataclasses

from lockstep.schedule.prompt_logprobs import PromptLogprobs
from lockstep.types import Completion, FinishReason, Request


@dataclasses.dataclass(kw_only=True, eq=False)
class Sequence:
    """State of one generation of one request. Only the scheduler changes it.

    The K/V of the prompt's last token is written by the first decode step, so prefill covers ``num_prefill`` tokens.
    """

    request: Request
    generation_id: int
    prefix_keys: list[bytes] = dataclasses.field(default_factory=list)
    """Names of the full pages that prefill writes (`page_keys`)."""
    tail_key: bytes | None = None
    """Name of the partial page that prefill ends with (`tail_key`); None where there is none."""
    scores: PromptLogprobs | None = None
    """Of the prompt, the same for all its generations; None where nobody asks for them."""
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    sampled_logprobs: list[float] = dataclasses.field(default_factory=list)
    top_logprobs: list[tuple[tuple[int, float], ...]] = dataclasses.field(default_factory=list)
    finish_reason: FinishReason | None = None
    replica: int = -1
    slot: int = -1
    pages: list[int] = dataclasses.field(default_factory=list)
    num_prefilled: int = 0

    @property
    def num_prefill(self) -> int:
        """Tokens whose K/V prefill writes: all of the prompt but the last."""
        return len(self.request.prompt_tokens) - 1

    @property
    def last_token(self) -> int:
        """The token that the next decode step reads."""
        return self.tokens[-1] if self.tokens else self.request.prompt_tokens[-1]

    @property
    def position(self) -> int:
        """Position of ``last_token``."""
        return len(self.request.prompt_tokens) + len(self.tokens) - 1

    @property
    def remaining(self) -> int:
        """Tokens that may still be sampled."""
        return self.request.params.max_new_tokens - len(self.tokens)

    def worst_case_pages(self, page_size: int) -> int:
        """Pages that hold every position that can ever be written; the last sampled token is never cached."""
        positions = len(self.request.prompt_tokens) + self.request.params.max_new_tokens - 1
        return -(-positions // page_size)

    def append(
        self,
        token: int,
        logprob: float,
        sampled_logprob: float = 0.0,
        top_logprobs: tuple[tuple[int, float], ...] = (),
    ) -> None:
        """Takes a sampled token; sets ``finish_reason`` when it is the last one."""
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
        """Ends the answer with its first ``count`` tokens; those after them never were."""
        assert 0 < count <= len(self.tokens)
        for values in (self.tokens, self.logprobs, self.sampled_logprobs, self.top_logprobs):
            del values[count:]
        self.finish_reason = FinishReason.STOP

    def completion(self) -> Completion:
        """The finished answer."""
        assert self.finish_reason is not None
        prompt_logprobs, prompt_top_logprobs = ((), ()) if self.scores is None else self.scores.result()
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
