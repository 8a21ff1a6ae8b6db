"""The engine's input and output: requests with sampling parameters, and completions. Plain Python, without jax."""

import dataclasses
import enum

from lockstep.errors import ConfigError, PromptError


class FinishReason(enum.StrEnum):
    """Why a completion ended."""

    STOP = "stop"
    """A stop token was sampled, or the text has a stop string."""
    LENGTH = "length"
    """``max_new_tokens`` tokens were sampled."""
    BUDGET = "budget"
    """The time budget ran out; the completion has the tokens sampled until then, possibly none."""
    CANCELLED = "cancelled"
    """It was cancelled; the completion has the tokens sampled until then, possibly none."""


_LEAST_TEMPERATURE = 1e-4


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the completions of one request are drawn.

    What happens to the logits of a step, in this order (every line is the identity at its default, bit for bit):

    1. penalties: repetition, then frequency, then presence;
    2. ``logit_bias`` is added; what is not in ``allowed_token_ids`` is ruled out, and so are stop tokens
       before ``min_tokens``;
    3. temperature (0: the largest logit is taken, and what follows does nothing);
    4. filters on the distribution after temperature: ``top_k``, then ``top_p`` of what top-k left, then ``min_p``.

    Wherever logits are equal, the lowest token id comes first.

    Args:
        max_new_tokens: tokens to sample at most, at least 1.
        temperature: 0 is greedy; otherwise logits are divided by it before the draw.
        stop_token_ids: a completion ends with the first of these that is sampled (it is kept as the last token).
        seed: with the prompt, generation and position, all that a draw depends on.
        n_generations: completions of the prompt, at least 1.
        top_k: draw from the k most probable tokens (Fan et al. 2018, https://arxiv.org/abs/1805.04833); None: from all.
        top_p: draw from the smallest set of most probable tokens whose probability is at least this (nucleus sampling,
            Holtzman et al. 2019, https://arxiv.org/abs/1904.09751); 1: from all.
        min_p: draw from the tokens that are at least this times as probable as the most probable one (Nguyen et al.
            2024, https://arxiv.org/abs/2407.01082); 0: from all.
        repetition_penalty: positive logits of tokens in the prompt or the answer so far are divided by it, negative
            ones multiplied (CTRL, Keskar et al. 2019, https://arxiv.org/abs/1909.05858); 1: none.
        presence_penalty: subtracted from the logit of every token in the answer so far.
        frequency_penalty: subtracted from the logit of a token once for each time it is in the answer so far.
        min_tokens: tokens to sample before a stop token may be.
        ignore_eos: ``stop_token_ids`` neither end the answer nor are ruled out.
        logit_bias: pairs of token id and what is added to its logit, -100 to 100.
        allowed_token_ids: the only tokens that may be sampled; None: all.
        top_logprobs: most probable tokens to report at each step, see `Completion`.
        prompt_logprobs: report the log-probabilities of the prompt's own tokens too, see `Completion`; the prompt is
            read twice for that.
        stop: a completion ends with the token at which the text first holds one of these strings, whatever
            ``min_tokens`` and ``ignore_eos``; that token is kept, the text shown ends before the string. The engine
            needs ``find_stop`` for them.

    Raises:
        ConfigError: a value out of its range, or values that together leave no token to sample.
    """

    max_new_tokens: int
    temperature: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0
    n_generations: int = 1
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    ignore_eos: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    top_logprobs: int = 0
    prompt_logprobs: bool = False
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ConfigError(
                f"max_new_tokens is {self.max_new_tokens}; it must be at least 1. Set max_new_tokens to the number of "
                "tokens you want to see."
            )
        if not 0.0 <= self.temperature < float("inf"):
            raise ConfigError(
                f"temperature is {self.temperature}; it must be finite and at least 0. Use 0 for greedy decoding."
            )
        if self.n_generations < 1:
            raise ConfigError(
                f"n_generations is {self.n_generations}; it must be at least 1. Set n_generations to the number of "
                "completions you want per prompt."
            )
        if not 0 <= self.seed < 2**32:
            raise ConfigError(f"seed is {self.seed}; it must be at least 0 and less than 2**32. Choose another seed.")
        if 0 < self.temperature < _LEAST_TEMPERATURE:
            raise ConfigError(
                f"temperature is {self.temperature}; it must be 0 or at least {_LEAST_TEMPERATURE}, for smaller ones "
                "are beyond the range of float32. Use 0 for greedy decoding."
            )
        self._check_filters()
        self._check_penalties()
        self._check_token_lists()
        self._check_stop()

    def _check_stop(self) -> None:
        given: object = self.stop
        if isinstance(given, str):
            raise ConfigError(f"stop is {given!r}; it must be a list of strings. Use [{given!r}].")
        for at, text in enumerate(self.stop):
            if not text:
                raise ConfigError(f"stop has an empty string at place {at}; every text holds it. Remove it.")

    def _check_filters(self) -> None:
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(
                f"top_k is {self.top_k}; it must be at least 1, or null. Use null to draw from all tokens."
            )
        if not 0 < self.top_p <= 1:
            raise ConfigError(
                f"top_p is {self.top_p}; it must be more than 0 and at most 1. Use 1 to draw from all tokens."
            )
        if not 0 <= self.min_p <= 1:
            raise ConfigError(f"min_p is {self.min_p}; it must be 0 to 1. Use 0 to draw from all tokens.")

    def _check_penalties(self) -> None:
        if not 0.01 <= self.repetition_penalty <= 100:
            raise ConfigError(
                f"repetition_penalty is {self.repetition_penalty}; it must be 0.01 to 100. Use 1 for none, and "
                "a little more, such as 1.1, to discourage repetition."
            )
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2 <= getattr(self, name) <= 2:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be -2 to 2. Use 0 for none.")

    def _check_token_lists(self) -> None:
        if not 0 <= self.min_tokens <= self.max_new_tokens:
            raise ConfigError(
                f"min_tokens is {self.min_tokens}; it must be at least 0 and at most max_new_tokens, which is "
                f"{self.max_new_tokens}. Lower min_tokens or raise max_new_tokens."
            )
        if self.top_logprobs < 0:
            raise ConfigError(f"top_logprobs is {self.top_logprobs}; it must be at least 0. Use 0 for none.")
        biased: set[int] = set()
        for token, bias in self.logit_bias:
            if token in biased:
                raise ConfigError(f"logit_bias gives token {token} twice. Give each token once.")
            biased.add(token)
            if not -100 <= bias <= 100:
                raise ConfigError(
                    f"logit_bias of token {token} is {bias}; it must be -100 to 100. Use allowed_token_ids to rule "
                    "tokens out altogether."
                )
        if self.allowed_token_ids is not None:
            allowed = set(self.allowed_token_ids)
            if not allowed:
                raise ConfigError("allowed_token_ids is empty; a token must be left to sample. Use null to allow all.")
            if self.rules_out_stops and allowed <= set(self.stop_token_ids):
                raise ConfigError(
                    f"allowed_token_ids are all stop tokens and min_tokens is {self.min_tokens}, so that no token "
                    "could be sampled. Allow a token that is no stop token, or set min_tokens to 0."
                )

    @property
    def stops(self) -> tuple[int, ...]:
        """The token ids that end an answer."""
        return () if self.ignore_eos else self.stop_token_ids

    @property
    def rules_out_stops(self) -> bool:
        """Whether stop tokens are ruled out at first."""
        return self.min_tokens > 0 and bool(self.stops)

    @property
    def has_penalties(self) -> bool:
        """Whether logits depend on the tokens so far."""
        return (
            self.repetition_penalty,
            self.presence_penalty,
            self.frequency_penalty,
        ) != (1.0, 0.0, 0.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt to complete.

    Args:
        prompt_id: The prompt's number, unique in a call; draws depend on it.
        prompt_tokens: The token ids of the prompt, at least one.
        params: The sampling parameters.

    Raises:
        PromptError: The prompt has no tokens.
    """

    prompt_id: int
    prompt_tokens: tuple[int, ...]
    params: SamplingParams

    def __post_init__(self) -> None:
        if not self.prompt_tokens:
            raise PromptError(
                f"prompt {self.prompt_id} has 0 tokens; the model needs at least 1 to start from. Remove the prompt or "
                "give it text (a tokenizer with a beginning-of-sequence token makes even an empty text one token)."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
    """One answer to one prompt.

    Args:
        prompt_id: The prompt's number, that of the request.
        generation_id: The generation's number, 0 to ``n_generations - 1``.
        tokens: The sampled token ids, a stop token (or the token that completed a stop string) included; none where the
            time ran out, or the completion was cancelled, before the first.
        logprobs: The natural-log probability of each token under the model (temperature 1), as many as ``tokens``.
        finish_reason: The reason why it ended.
        sampled_logprobs: The natural-log probability of each token under the distribution that it was drawn from, after
            penalties, bias, temperature and filters; 0 where decoding is greedy.
        top_logprobs: For each token the ``top_logprobs`` most probable (id, natural-log probability) pairs under the
            model (temperature 1) at its position, most probable first; empty unless requested.
        prompt_logprobs: The natural-log probability of each prompt token under the model (temperature 1), given those
            before it; None for the first. Empty unless requested, and where the answer ended before its prompt was
            computed.
        prompt_top_logprobs: For each prompt token what ``top_logprobs`` has for each sampled one; empty for the first.
            Empty unless both were requested.
    """

    prompt_id: int
    generation_id: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    sampled_logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    prompt_logprobs: tuple[float | None, ...] = ()
    prompt_top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
