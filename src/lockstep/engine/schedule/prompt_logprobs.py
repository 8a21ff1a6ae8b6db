"""Collects the log-probabilities of a prompt's own tokens: one record per request, shared by its generations."""

import dataclasses

import numpy as np

from lockstep.types import Request


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
        """Appends the log-probabilities of the next tokens.

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
        """Returns ``prompt_logprobs`` and ``prompt_top_logprobs`` of `Completion`, both empty until all are there."""
        if not self.done:
            return (), ()
        return (None, *self.logprobs), ((), *self.top_logprobs) if self.request.params.top_logprobs else ()
