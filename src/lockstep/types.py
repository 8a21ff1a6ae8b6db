"""The engine's input and output: requests with sampling parameters, and completions. Plain Python, without jax."""

import dataclasses
import enum
import hashlib
import math
from typing import ClassVar

import numpy as np
from jaxtyping import Int16

from lockstep.config_fields import check_fields
from lockstep.errors import ConfigError, PromptError, check_at_least


class FinishReason(enum.StrEnum):
    """Why a completion ended.

    Example:
        >>> lockstep.FinishReason.LENGTH == "length"
        True
    """

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
class SamplingRules:
    """The scalar settings of sampling, which `SamplingParams` and every configuration that samples have in common.

    A setting that is added here is a key of each of these configurations too. ``FILTERS`` names the settings that rule
    out improbable tokens, and do nothing at temperature 0; ``PENALTIES`` those with which logits depend on the tokens
    so far. Each does nothing at its default.
    """

    FILTERS: ClassVar[tuple[str, ...]] = ("top_k", "top_p", "min_p", "filters")
    PENALTIES: ClassVar[tuple[str, ...]] = ("repetition_penalty", "presence_penalty", "frequency_penalty")

    max_new_tokens: int
    """The number of tokens to sample per completion at most, at least 1."""
    temperature: float = 0.0
    """The logits are divided by this before a token is drawn; 0 is greedy decoding."""
    top_k: int | None = None
    """Draw from the k most probable tokens (Fan et al. 2018, https://arxiv.org/abs/1805.04833); null: from all."""
    top_p: float = 1.0
    """Draw from the smallest set of most probable tokens whose probability is at least this (nucleus sampling, Holtzman
    et al. 2019, https://arxiv.org/abs/1904.09751); 1: from all."""
    min_p: float = 0.0
    """Draw from the tokens that are at least this times as probable as the most probable one (Nguyen et al. 2024,
    https://arxiv.org/abs/2407.01082); 0: from all."""
    filters: tuple[str, ...] = ()
    """Further filters, applied after the others in the order of their names: ``top_n_sigma=1.5`` draws from scores
    within so many standard deviations of the largest (Tang et al. 2024, https://arxiv.org/abs/2411.07641);
    ``module:function=value`` is one of your own, which returns the least score to draw from (docs/extending.md)."""
    repetition_penalty: float = 1.0
    """Positive logits of tokens in the prompt or in the completion so far are divided by this, negative ones multiplied
    (CTRL, Keskar et al. 2019, https://arxiv.org/abs/1909.05858); 1: no penalty."""
    presence_penalty: float = 0.0
    """This is subtracted from the logit of every token that is in the completion so far."""
    frequency_penalty: float = 0.0
    """This is subtracted from the logit of a token once for each time that it is in the completion so far."""
    min_tokens: int = 0
    """The number of tokens to sample before a stop token may end the completion."""
    ignore_eos: bool = False
    """Whether stop tokens neither end a completion nor are ruled out by ``min_tokens``."""
    n_generations: int = 1
    """The number of completions per prompt, at least 1."""
    seed: int = 0
    """The seed of the random draws. A draw depends on the seed, the prompt, the generation and the position alone."""

    def is_set(self, *names: str) -> bool:
        """Whether any of these settings has another value than its default."""
        return any(getattr(self, name) != getattr(type(self), name) for name in names)

    def check_rules(self) -> None:
        """Check the range of every setting.

        Raises:
            ConfigError: A value is out of its range; the message names the setting, the value, the range and the fix.
        """
        tokens = ". Set max_new_tokens to the number of tokens you want to see."
        check_at_least(self, 1, "max_new_tokens", fix=tokens)
        if not 0.0 <= self.temperature < float("inf"):
            raise ConfigError(
                f"temperature is {self.temperature}; it must be finite and at least 0. Use 0 for greedy decoding."
            )
        completions = ". Set n_generations to the number of completions you want per prompt."
        check_at_least(self, 1, "n_generations", fix=completions)
        if not 0 <= self.seed < 2**32:
            raise ConfigError(f"seed is {self.seed}; it must be at least 0 and less than 2**32. Choose another seed.")
        if 0 < self.temperature < _LEAST_TEMPERATURE:
            raise ConfigError(
                f"temperature is {self.temperature}; it must be 0 or at least {_LEAST_TEMPERATURE}, for smaller ones "
                "are beyond the range of float32. Use 0 for greedy decoding."
            )
        check_at_least(self, 1, "top_k", fix=", or null. Use null to draw from all tokens.")
        check_at_least(self, 0, "top_p", fix=". Use 1 to draw from all tokens.", above=True, most=1)
        check_at_least(self, 0, "min_p", fix=". Use 0 to draw from all tokens.", most=1)
        if len(self.filter_values()) < len(self.filters):
            raise ConfigError(f"filters is {list(self.filters)}, which has a filter twice. Give each one value.")
        little = ". Use 1 for none, and a little more, such as 1.1, to discourage repetition."
        check_at_least(self, 0.01, "repetition_penalty", fix=little, most=100)
        check_at_least(self, -2, "presence_penalty", "frequency_penalty", fix=". Use 0 for none.", most=2)
        if not 0 <= self.min_tokens <= self.max_new_tokens:
            raise ConfigError(
                f"min_tokens is {self.min_tokens}; it must be at least 0 and at most max_new_tokens, which is "
                f"{self.max_new_tokens}. Lower min_tokens or raise max_new_tokens."
            )

    def filter_values(self) -> dict[str, float]:
        """Return the value of each of ``filters`` by its name, in the order of the names.

        Raises:
            ConfigError: One is not written as ``name=value`` or ``module:function=value`` with a finite value.
        """
        values: dict[str, float] = {}
        for text in self.filters:
            name, _, value = text.rpartition("=")
            try:
                values[name] = float(value)
            except ValueError:
                values[name] = math.nan
            if not ((name.isidentifier() or all(name.partition(":"))) and math.isfinite(values[name])):
                raise ConfigError(
                    f"filters has {text!r}; one is name=value, such as top_n_sigma=1.5, or module:function=value."
                )
        return dict(sorted(values.items()))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams(SamplingRules):
    """Sampling settings of one request: those of `SamplingRules`, and these.

    What happens to the logits of a step, in this order (every line is the identity at its default, bit for bit):

    1. penalties: repetition, then frequency, then presence;
    2. ``logit_bias`` is added; what is not in ``allowed_token_ids`` is ruled out, and so are stop tokens
       before ``min_tokens``;
    3. temperature (0: the largest logit is taken, and what follows does nothing);
    4. filters on the distribution after temperature: ``top_k``, then ``top_p`` of what top-k left, then ``min_p``, then
       ``filters``.

    Wherever logits are equal, the lowest token id comes first.

    Raises:
        ConfigError: A value is out of its range, or the values together leave no token to sample.

    Example:
        >>> params = lockstep.SamplingParams(max_new_tokens=64, temperature=0.7, top_p=0.95, n_generations=4)
        >>> params.seed
        0
    """

    stop_token_ids: tuple[int, ...] = ()
    """A completion ends with the first of these tokens that is sampled, which is kept as its last token."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of a token id and what is added to its logit, -100 to 100."""
    allowed_token_ids: tuple[int, ...] | None = None
    """The only tokens that may be sampled; None: all."""
    top_logprobs: int = 0
    """The number of most probable tokens to report at each step, see `Completion`."""
    prompt_logprobs: bool = False
    """Whether to report the log-probabilities of the prompt's own tokens too, see `Completion`; the prompt is read
    twice for that."""
    routed_experts: bool = False
    """Whether to report the experts that each token was given to, see `Completion`; the model must have experts."""
    stop: tuple[str, ...] = ()
    """A completion ends with the token at which its text first contains one of these strings, whatever ``min_tokens``
    and ``ignore_eos``. That token is kept, the text shown ends before the string. The engine needs ``find_stop`` for
    them."""

    def __post_init__(self) -> None:
        check_fields(self)
        self.check_rules()
        self._check_token_lists()
        for at, text in enumerate(self.stop):
            if not text:
                raise ConfigError(f"stop has an empty string at place {at}; every text holds it. Remove it.")

    def _check_token_lists(self) -> None:
        check_at_least(self, 0, "top_logprobs", fix=". Use 0 for none.")
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
        return self.is_set(*self.PENALTIES)

    def own_filters(self) -> dict[str, float]:
        """Return `filter_values` of an answer that is drawn; a greedy one needs none."""
        return self.filter_values() if self.temperature > 0 else {}

    @property
    def has_filters(self) -> bool:
        """Whether some tokens may not be drawn because they are improbable; a greedy answer draws none."""
        return self.temperature > 0 and self.is_set(*self.FILTERS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drafts:
    """Guesses at the completions of a request: verified, never trusted, so that they change speed and no token.

    Args:
        answers: A guess at each completion, in the order of the generations, such as what the model answered in an
            earlier round; fewer or empty ones where there is none.
        ngrams: Whether to guess, too, that what followed the last few tokens in the prompt, in other answers to it or
            earlier in this one follows again (prompt lookup decoding, Saxena 2023, https://github.com/apoorvumang/prompt-lookup-decoding).
        compared: The number of tokens of earlier drafts of this request whose outcome is known; 0 where nothing is.
        right: The number of those that were right: how much is verified at once, before this request's own tokens tell.

    Raises:
        ConfigError: A token is no token id of any model, or more tokens were right than there were.
    """

    answers: tuple[tuple[int, ...], ...] = ()
    ngrams: bool = False
    compared: int = 0
    right: int = 0

    def __post_init__(self) -> None:
        check_fields(self, "drafts.")
        if not 0 <= self.right <= self.compared:
            raise ConfigError(
                f"of {self.compared} tokens of earlier drafts {self.right} are said to be right; it must be from 0 to "
                f"{max(self.compared, 0)}. Set right and compared to what was counted, or leave both at 0."
            )
        for generation, answer in enumerate(self.answers):
            if answer and not 0 <= min(answer) <= max(answer) < 2**31:
                raise ConfigError(
                    f"the draft of generation {generation} has tokens from {min(answer)} to {max(answer)}; token ids "
                    "are at least 0 and less than 2**31. Give the token ids of an earlier answer, or no draft."
                )

    def answer(self, generation_id: int) -> tuple[int, ...]:
        """Return the guess at a completion; empty where there is none."""
        return self.answers[generation_id] if generation_id < len(self.answers) else ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt to complete.

    Args:
        prompt_id: The prompt's number, unique in a call; draws depend on it.
        prompt_tokens: The token ids of the prompt, at least one.
        drafts: Guesses at the completions; None for plain decoding.
        conversation: The number of the conversation that it is a turn of: the K/V of its full pages stays, for requests
            that go on from it, until `Scheduler.forget` or until memory is wanted; None: it goes with the answer.

    Raises:
        PromptError: The prompt has no tokens.

    Example:
        >>> prompt = tuple(tokenizer.encode("What is 12 plus 7?"))
        >>> params = lockstep.SamplingParams(max_new_tokens=16)
        >>> request = lockstep.Request(prompt_id=0, prompt_tokens=prompt, params=params)
    """

    prompt_id: int
    prompt_tokens: tuple[int, ...]
    params: SamplingParams
    drafts: Drafts | None = None
    conversation: int | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.prompt_tokens:
            raise PromptError(
                f"prompt {self.prompt_id} has 0 tokens; the model needs at least 1 to start from. Remove the prompt or "
                "give it text (a tokenizer with a beginning-of-sequence token makes even an empty text one token)."
            )


@dataclasses.dataclass(frozen=True)
class RoutedExperts:
    """The experts of the tokens of a prompt and its completion, as the engine chose them: int16, little-endian."""

    shape: tuple[int, int, int]
    """The numbers of tokens, of layers, and of experts that a token is given to."""
    packed: bytes

    def __repr__(self) -> str:
        return f"RoutedExperts({self.shape}, sha256 {hashlib.sha256(self.packed).hexdigest()})"

    def numbers(self) -> Int16[np.ndarray, "token layer choice"]:
        """Return the experts' numbers; -1 in layers whose experts are not computed for a token."""
        return np.frombuffer(self.packed, "<i2").reshape(self.shape)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
    """One completion of one prompt.

    Args:
        prompt_id: The prompt's number, as in the request.
        generation_id: The completion's number among those of its prompt: 0 to ``n_generations - 1``.
        tokens: The sampled token ids, a stop token (or the token that completed a stop string) included; none where the
            time was over, or the completion was cancelled, before the first.
        logprobs: The natural-log probability of each token under the model (temperature 1), as many as ``tokens``.
        sampled_logprobs: The natural-log probability of each token under the distribution that it was drawn from, after
            penalties, bias, temperature and filters; 0 where decoding is greedy.
        top_logprobs: For each token the ``top_logprobs`` most probable (id, natural-log probability) under the model
            (temperature 1) at its place, most probable first; empty unless asked for.
        prompt_logprobs: The natural-log probability of each prompt token under the model (temperature 1), given those
            before it; None for the first. Empty unless asked for, and where a completion ended before its prompt was
            read.
        prompt_top_logprobs: For each prompt token what ``top_logprobs`` has for each sampled one; nothing for the
            first. Empty unless both were asked for.
        routed_experts: The experts of each token of prompt and completion but the last, which the engine does not read;
            of a prompt's tokens but its last the last layer computes none. None unless asked for, and without tokens.

    Example:
        >>> completion = lockstep.Completion(
        ...     prompt_id=0,
        ...     generation_id=0,
        ...     tokens=(17, 2),
        ...     logprobs=(-0.5, -0.25),
        ...     finish_reason=lockstep.FinishReason.STOP,
        ... )
        >>> sum(completion.logprobs)
        -0.75
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
    routed_experts: RoutedExperts | None = None
