"""What sampling parameters make of one step's logits: NumPy and a sort, written from the definitions alone."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from lockstep.types import SamplingParams

SLACK = 1e-6
"""A set of tokens has the probability ``top_p`` when it misses it by less than this share: rounding is not a reason."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """One step's distribution."""

    scores: np.ndarray
    """float32 ``[vocab]``: after penalties, bias and temperature; -inf where a token cannot be drawn."""
    logprobs: np.ndarray
    """float64 ``[vocab]``: natural-log probability of each token; -inf where it cannot be drawn."""
    unfiltered: np.ndarray
    """float32 ``[vocab]``: the scores that the filters see."""


def step_of(logits: np.ndarray, params: SamplingParams, prompt: Sequence[int], answer: Sequence[int]) -> Step:
    """The distribution that the next token is drawn from; for temperature 0 all on the largest score.

    Args:
        logits: float32 ``[vocab]``, of the model.
        params: The parameters of the request.
        prompt: token ids.
        answer: token ids so far.
    """
    shaped = shape_logits(logits, params, prompt, answer)
    if params.temperature == 0:
        logprobs = np.full(len(shaped), -np.inf)
        logprobs[np.argmax(shaped)] = 0.0
        return Step(scores=shaped, logprobs=logprobs, unfiltered=shaped)
    unfiltered = shaped / np.float32(params.temperature)
    scores = np.where(kept(unfiltered, params), unfiltered, np.float32(-np.inf))
    return Step(scores=scores, logprobs=log_softmax(scores), unfiltered=unfiltered)


def shape_logits(
    logits: np.ndarray, params: SamplingParams, prompt: Sequence[int], answer: Sequence[int]
) -> np.ndarray:
    """Penalties, bias, allowed tokens and ``min_tokens``, token by token."""
    shaped = logits.astype(np.float32)
    for token in {*prompt, *answer}:
        factor = np.float32(params.repetition_penalty)
        shaped[token] = shaped[token] / factor if shaped[token] > 0 else shaped[token] * factor
    for token in set(answer):
        shaped[token] -= np.float32(params.frequency_penalty) * np.float32(list(answer).count(token))
        shaped[token] -= np.float32(params.presence_penalty)
    for token, bias in params.logit_bias:
        shaped[token] += np.float32(bias)
    for token in range(len(shaped)):
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            shaped[token] = -np.inf
        if len(answer) < params.min_tokens and token in params.stops:
            shaped[token] = -np.inf
    return shaped


def kept(scores: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Which tokens the filters keep: top-k, then top-p of what it left, then min-p.

    Args:
        scores: float32 ``[vocab]``, after temperature.
        params: The parameters of the request.
    """
    order = np.argsort(-scores, kind="stable")  # equal scores: the lowest token id first
    if params.top_k is not None:
        order = order[: params.top_k]
    if params.top_p < 1:
        order = order[: nucleus_size(scores[order], params.top_p)]
    mask = np.zeros(len(scores), bool)
    mask[order] = True
    if params.min_p > 0:
        mask &= scores - scores.max() >= np.float32(math.log(params.min_p))
    return mask


def kept_within(scores: np.ndarray, params: SamplingParams, slack: float) -> np.ndarray:
    """Which tokens the filters may keep, or surely keep, where rounding has changed the scores.

    Args:
        scores: float32 ``[vocab]``, after temperature.
        params: The parameters of the request.
        slack: How far the difference of two scores may be off; above 0 for what may be kept, below 0 for what surely
            is.
    """
    ahead = scores[None, :] > scores[:, None] + np.float32(slack)
    np.fill_diagonal(ahead, val=False)
    mask = np.isfinite(scores)
    if params.top_k is not None:
        mask &= ahead.sum(axis=1) < params.top_k
    if params.top_p < 1:
        # Scores that are off by half of the slack move the odds of a set of tokens by at most a factor of exp(slack).
        masses = np.exp(scores.astype(np.float64) - float(scores.max()))
        front, rest = ahead @ masses, (~ahead & mask) @ masses
        edge = nucleus_edge(params.top_p)
        mask &= front * (1 - edge) < rest * edge * math.exp(slack)
    if params.min_p > 0:
        mask &= scores - scores.max() >= np.float32(math.log(params.min_p) - slack)
    return mask


def nucleus_size(scores: np.ndarray, p: float) -> int:
    """How many of the first of ``scores``, descending, have at least ``p`` of the probability."""
    return int(np.argmax(shares(scores) >= nucleus_edge(p))) + 1


def nucleus_edge(p: float) -> float:
    """The probability that is enough for a nucleus of ``p``."""
    return float(np.float32(p)) * (1 - SLACK)


def shares(scores: np.ndarray) -> np.ndarray:
    """The probability of the first 1, 2, ... of ``scores``, descending."""
    mass = np.cumsum(np.exp(scores.astype(np.float64) - float(scores.max())))
    return mass / mass[-1]


def log_softmax(scores: np.ndarray) -> np.ndarray:
    """Natural-log probabilities, float64."""
    wide = scores.astype(np.float64)
    with np.errstate(divide="ignore"):
        return wide - wide.max() - np.log(np.exp(wide - wide.max()).sum())
