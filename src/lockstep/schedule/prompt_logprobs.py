"""Log-probabilities of a prompt's own tokens in the making: one record per request, whoever of its generations asks."""

import dataclasses

import numpy as np

from lockstep.types import Request


@dataclasses.dataclass(kw_only=True, eq=False)
class PromptLogprobs:
    """What is known of a prompt so far; filled page by page, from its second token on."""

    request: Request
    logprobs: list[float] = dataclasses.field(default_factory=list)
    top_logprobs: list[tuple[tuple[int, float], ...]] = dataclasses.field(default_factory=list)

    @property
    def done(self) -> bool:
        """Whether every token but the first has its log-probability."""
        return len(self.logprobs) == len(self.request.prompt_tokens) - 1

    def add(self, logprobs: np.ndarray, ids: np.ndarray | None, values: np.ndarray | None) -> None:
        """Takes the next tokens' log-probabilities.

        Args:
            logprobs: ``[token]``.
            ids: ``[token, n]``, most probable first; None where nobody asks for them.
            values: of ``ids``.
        """
        self.logprobs += logprobs.tolist()
        if count := self.request.params.top_logprobs:
            assert ids is not None and values is not None
            pairs = zip(ids[:, :count].tolist(), values[:, :count].tolist(), strict=True)
            self.top_logprobs += [tuple(zip(*pair, strict=True)) for pair in pairs]

    def result(self) -> tuple[tuple[float | None, ...], tuple[tuple[tuple[int, float], ...], ...]]:
        """As in `Completion`; both empty where the answer ended before its prompt was read."""
        if not self.done:
            return (), ()
        return (None, *self.logprobs), ((), *self.top_logprobs) if self.request.params.top_logprobs else ()
