"""What a model must answer: full forward passes without a cache, on one device, in one process.

``oracle_completions(model, requests)`` generates the expected answers; ``assert_same_tokens(expected, got)`` compares
an engine's answers with them and returns the number of ties. The forward pass is the trainable model's own, which
golden values tie to Hugging Face; random draws are written from their description alone, with their own Threefry, and
so is what sampling parameters do (`tests.sampling_oracle`).
"""

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.models import LlamaLMHeadModel, llama_attention, read_decoder
from lockstep.models.attention import HeadArrays
from lockstep.models.train_ops import Train
from lockstep.models.trainable import skeleton
from lockstep.types import Completion, FinishReason, Request, SamplingParams
from tests.sampling_oracle import kept_within, log_softmax, step_of

TIE = 1e-5
"""Two tokens are a tie when the oracle's own scores of them are closer than this."""

BFLOAT16_TIE = 4 * 2.0**-7
"""In bfloat16 two tokens are a near-tie when the oracle's own scores of them, or one's and the edge of a filter, are
closer than this share of the largest logit of the step, over the temperature: four steps between neighbouring numbers
of bfloat16 at that size, for models of two layers, which round the residual stream five times before the logits."""

NEAR_TIES_PER_THOUSAND = 25
"""Near-ties in bfloat16, of tokens, at most, with random weights. The two best scores with Gumbel noise are less than a
small number apart about as often as that number says, so that rounding of 0.02 makes about 20; 17 were seen."""

ROWS = 8
"""Sequences in a forward pass: one shape, so that it compiles once."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Expected:
    """One expected answer, with the scores that decided it."""

    prompt_id: int
    generation_id: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    scores: np.ndarray
    """float32 ``[step, vocab]``: logits after penalties, bias and filters, divided by the temperature and with Gumbel
    noise where it is not 0; the largest one is sampled."""
    largest: tuple[float, ...]
    """The largest absolute logit of each step, divided by the temperature where it is not 0."""
    sampled_logprobs: tuple[float, ...]
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...]
    filters: SamplingParams | None = None
    """The parameters, where tokens were drawn through top-k, top-p or min-p."""
    unfiltered: np.ndarray | None = None
    """float32 ``[step, vocab]``: the scores that the filters saw."""
    noise: np.ndarray | None = None
    """float32 ``[step, vocab]``: the Gumbel noise; 0 for temperature 0."""

    def is_near_tie(self, at: int, token: int, bound: float) -> bool:
        """Whether another token may be drawn where the difference of two scores may be off by ``bound``.

        Without filters: its score with noise is closer to the largest one than that. With filters it is one that they
        may keep, and no token that they surely keep is further above it.
        """
        scores, surely = self.scores[at], np.ones(len(self.scores[at]), bool)
        if self.filters is not None and self.unfiltered is not None and self.noise is not None:
            surely = kept_within(self.unfiltered[at], self.filters, -bound)
            if not kept_within(self.unfiltered[at], self.filters, bound)[token]:
                return False
            scores = self.unfiltered[at] + self.noise[at]
        return float(scores[surely].max(initial=-np.inf)) - float(scores[token]) < bound


def oracle_completions(
    model: Any,
    requests: Sequence[Request],
    *,
    vocab_size: int | None = None,
    length: int | None = None,
    fp8_cache: bool = False,
) -> list[Expected]:
    """Answers requests by one full forward pass per token.

    Args:
        model: what `lockstep.models.read_decoder` reads, with arrays (or NumPy arrays) that this process can read in
            full; computed in the dtype of its parameters, with logits in float32.
        requests: with any sampling parameters.
        vocab_size: tokens from here on are never sampled; None for all rows of the embedding.
        length: positions of a forward pass; None: enough, a multiple of 64.
        fp8_cache: K and V are rounded before attention sees them, as a KV cache in 8 bits rounds them.

    Returns:
        Expected answers in the order of the requests, then of their generations.
    """
    local = _on_one_device(model)
    longest = max(len(r.prompt_tokens) + r.params.max_new_tokens for r in requests)
    length = length or min(local.config.max_seq_len, -(-longest // 64) * 64)
    writers = [_Writer(r, g) for r in requests for g in range(r.params.n_generations)]
    for first in range(0, len(writers), ROWS):
        batch = writers[first : first + ROWS]
        while open_ := [row for row, writer in enumerate(batch) if writer.finish_reason is None]:
            ids, last = np.zeros((ROWS, length), np.int32), np.zeros(ROWS, np.int32)
            for row, writer in enumerate(batch):
                known = [*writer.request.prompt_tokens, *writer.tokens][:length]
                ids[row, : len(known)], last[row] = known, len(known) - 1
            logits = np.array(_last_logits(local, ids, last, fp8_cache))
            if vocab_size is not None:
                logits[:, vocab_size:] = -np.inf
            for row in open_:
                batch[row].append(logits[row])
    return [writer.expected() for writer in writers]


def assert_same_tokens(
    expected: Sequence[Expected], got: Sequence[Completion], *, tie: float = TIE, relative_tie: float = 0.0
) -> int:
    """Compares answers token by token; prints and counts ties.

    The only difference accepted is a tie: at the first differing place the oracle's own scores of the two tokens are
    closer than ``tie``, or than ``relative_tie`` times the step's largest logit; or a filter's edge is as close to one
    of the two. What comes after it is not compared.

    Returns:
        The number of ties.
    """
    names = [(e.prompt_id, e.generation_id) for e in expected]
    assert [(c.prompt_id, c.generation_id) for c in got] == names, "answers are missing, doubled or in another order"
    ties = 0
    for want, have in zip(expected, got, strict=True):
        name = f"prompt {want.prompt_id} generation {want.generation_id}"
        assert len(have.logprobs) == len(have.tokens), name
        differ = [i for i, (a, b) in enumerate(zip(want.tokens, have.tokens, strict=False)) if a != b]
        if not differ:
            assert have.tokens == want.tokens, f"{name}: {len(have.tokens)} tokens, {len(want.tokens)} expected"
            assert have.finish_reason == want.finish_reason, f"{name}: {have.finish_reason}, not {want.finish_reason}"
            continue
        at = differ[0]
        a, b = want.tokens[at], have.tokens[at]
        gap = abs(float(want.scores[at, a]) - float(want.scores[at, b]))
        bound = max(tie, relative_tie * want.largest[at])
        assert want.is_near_tie(at, b, bound), (
            f"{name}: token {at} is {b}, expected {a}; the oracle's scores of the two are {gap:.3g} apart, which is no "
            f"tie: those are closer than {bound:.3g}.\n"
            f"got      {have.tokens}\nexpected {want.tokens}"
        )
        ties += 1
        print(f"tie: {name}, token {at}: {b} for {a}, scores {gap:.3g} apart, largest {want.largest[at]:.3g}")
    return ties


def assert_same_but_for_near_ties(expected: Sequence[Expected], got: Sequence[Completion]) -> int:
    """Compares answers of a model in bfloat16: up to the first near-tie of each they are the same, and those are few.

    Returns:
        The number of near-ties.
    """
    ties, tokens = assert_same_tokens(expected, got, relative_tie=BFLOAT16_TIE), sum(len(e.tokens) for e in expected)
    print(f"{ties} near-ties in {tokens} tokens")
    assert 1000 * ties <= NEAR_TIES_PER_THOUSAND * tokens, f"{ties} near-ties in {tokens} tokens"
    return ties


def assert_same_logprobs(expected: Sequence[Expected], got: Sequence[Completion], *, atol: float = 1e-5) -> float:
    """Compares log-probabilities up to the first differing token of each answer; returns the largest difference."""
    worst = 0.0
    for want, have in zip(expected, got, strict=True):
        assert len(have.logprobs) == len(have.sampled_logprobs) == len(have.tokens)
        assert len(have.top_logprobs) == (len(have.tokens) if want.top_logprobs else 0)
        for at, (a, b) in enumerate(zip(want.tokens, have.tokens, strict=False)):
            if a != b:
                break
            pairs = [(want.logprobs[at], have.logprobs[at]), (want.sampled_logprobs[at], have.sampled_logprobs[at])]
            if want.top_logprobs:
                # By rank: two tokens that are as probable may change places.
                tops = zip(want.top_logprobs[at], have.top_logprobs[at], strict=True)
                pairs += [(p, q) for (_, p), (_, q) in tops]
            for p, q in pairs:
                worst = max(worst, abs(p - q)) if math.isfinite(q) else math.inf
    assert worst <= atol, f"log-probabilities differ by {worst:.3g}, more than {atol:.3g}"
    return worst


def gumbel_noise(seed: int, prompt: int, generation: int, position: int, vocab: int) -> np.ndarray:
    """The noise of one draw, float32 ``[vocab]``.

    ``-log(-log(u))`` with ``u = (word >> 9 + 0.5) / 2**23``; ``word`` is the first of the two words that Threefry-2x32
    (Salmon et al. 2011) makes of the key (0, seed) after absorbing, one after the other, prompt, generation, position
    and token, each as the counter (0, value) whose output is the next key.
    """
    key = (np.uint32(0), np.uint32(seed))
    for part in (prompt, generation, position):
        key = threefry(key, np.uint32(0), np.uint32(part))
    word, _ = threefry(key, np.zeros(vocab, np.uint32), np.arange(vocab, dtype=np.uint32))
    uniform = ((word >> np.uint32(9)).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-23)
    return -np.log(-np.log(uniform))


def threefry(key: tuple[Any, Any], x0: Any, x1: Any) -> tuple[Any, Any]:
    """Threefry-2x32 with 20 rounds (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3")."""
    rotations = ((13, 15, 26, 6), (17, 29, 16, 24))
    keys = (key[0], key[1], key[0] ^ key[1] ^ np.uint32(0x1BD11BDA))
    with np.errstate(over="ignore"):
        x0, x1 = x0 + keys[0], x1 + keys[1]
        for block in range(5):
            for r in rotations[block % 2]:
                x0 = x0 + x1
                x1 = (x1 << np.uint32(r) | x1 >> np.uint32(32 - r)) ^ x0
            x0, x1 = x0 + keys[(block + 1) % 3], x1 + keys[(block + 2) % 3] + np.uint32(block + 1)
    return x0, x1


@dataclasses.dataclass(eq=False)
class _Writer:
    """One answer in the making."""

    request: Request
    generation_id: int
    finish_reason: FinishReason | None = None
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    scores: list[np.ndarray] = dataclasses.field(default_factory=list)
    unfiltered: list[np.ndarray] = dataclasses.field(default_factory=list)
    noise: list[np.ndarray] = dataclasses.field(default_factory=list)
    largest: list[float] = dataclasses.field(default_factory=list)
    sampled_logprobs: list[float] = dataclasses.field(default_factory=list)
    top_logprobs: list[tuple[tuple[int, float], ...]] = dataclasses.field(default_factory=list)

    def append(self, logits: np.ndarray) -> None:
        params, prompt = self.request.params, self.request.prompt_tokens
        step = step_of(logits, params, prompt, self.tokens)
        noise = np.zeros(len(logits), np.float32)
        if params.temperature > 0:
            at = len(prompt) + len(self.tokens)
            noise = gumbel_noise(params.seed, self.request.prompt_id, self.generation_id, at, len(logits))
        scores = step.scores + noise
        token, raw = int(np.argmax(scores)), log_softmax(logits)
        self.logprobs.append(float(raw[token]))
        self.sampled_logprobs.append(float(step.logprobs[token]))
        if params.top_logprobs:
            order = np.argsort(-logits, kind="stable")[: params.top_logprobs]
            self.top_logprobs.append(tuple((int(i), float(raw[i])) for i in order))
        self.tokens.append(token)
        self.scores.append(scores)
        self.unfiltered.append(step.unfiltered)
        self.noise.append(noise)
        self.largest.append(float(np.abs(logits[np.isfinite(logits)]).max()) / (params.temperature or 1.0))
        if token in params.stops:
            self.finish_reason = FinishReason.STOP
        elif len(self.tokens) == params.max_new_tokens:
            self.finish_reason = FinishReason.LENGTH

    def expected(self) -> Expected:
        assert self.finish_reason is not None
        params = self.request.params
        filtered = params.temperature > 0 and (params.top_k is not None or params.top_p < 1 or params.min_p > 0)
        return Expected(
            prompt_id=self.request.prompt_id,
            generation_id=self.generation_id,
            tokens=tuple(self.tokens),
            logprobs=tuple(self.logprobs),
            finish_reason=self.finish_reason,
            scores=np.stack(self.scores),
            largest=tuple(self.largest),
            sampled_logprobs=tuple(self.sampled_logprobs),
            top_logprobs=tuple(self.top_logprobs),
            filters=params if filtered else None,
            unfiltered=np.stack(self.unfiltered),
            noise=np.stack(self.noise),
        )


def _on_one_device(model: Any) -> LlamaLMHeadModel:
    """The trainable model with the weights that the decoder reads, on this process's first device."""
    config, weights = read_decoder(model)
    by_name = vars(weights.layers) | vars(weights)
    del by_name["layers"]

    def fill(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        # Parameters have the decoder's names; the array inside a NamedArray adds an entry of its own.
        name = next(key.name for key in reversed(path) if getattr(key, "name", None) in by_name)
        array = np.asarray(by_name[name])
        assert array.shape == leaf.shape, (name, array.shape, leaf.shape)
        return jax.device_put(array, jax.local_devices()[0])

    return jax.tree_util.tree_map_with_path(fill, skeleton(weights.embed.shape[0], config))


@contextlib.contextmanager
def rounded_kv() -> Iterator[None]:
    """Attention traced inside sees the numbers of K and V, or of a latent, as 8 bits hold them (E4M3)."""
    exact, exact_latent = llama_attention.self_attention, Train.attend_latent

    def in_8_bits(x: jax.Array) -> jax.Array:
        return x.astype(jnp.float8_e4m3fn).astype(x.dtype)

    def rounded(arrays: HeadArrays, *others: Any, **options: Any) -> jax.Array:
        return exact(arrays._replace(k=in_8_bits(arrays.k), v=in_8_bits(arrays.v)), *others, **options)

    def rounded_latent(ops: Train, q: Any, latent: jax.Array, *others: Any) -> jax.Array:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(llama_attention, "self_attention", exact)
            return exact_latent(ops, q, in_8_bits(latent), *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llama_attention, "self_attention", rounded)
        patch.setattr(Train, "attend_latent", rounded_latent)
        yield


INPUTS = {"q": (1,), "k": (1,), "v": (1,), "o": (1, 2, 3), "gate": (1,), "up": (1,), "down": (1,)} | dict.fromkeys(
    ("expert_gate", "expert_up", "expert_down"), (2,)
)
"""The axes of each stacked weight that its matrix product sums over."""


def rounded(weights: Any, dtype: Any) -> Any:
    """Decoder weights of NumPy arrays as 8 bits hold them: numbers of ``dtype`` times a scale per output channel."""

    def one(name: str, dims: tuple[int, ...]) -> Any:
        exact = getattr(weights.layers, name)
        if exact is None:
            return None
        largest = np.float32(127 if dtype == jnp.int8 else 448)
        scale = np.maximum(np.abs(exact).max(axis=dims, keepdims=True) / largest, np.finfo(np.float32).tiny)
        numbers = exact / scale
        return (np.round(numbers) if dtype == jnp.int8 else numbers).astype(dtype).astype(np.float32) * scale

    layers = dataclasses.replace(weights.layers, **{name: one(name, dims) for name, dims in INPUTS.items()})
    return dataclasses.replace(weights, layers=layers)


@eqx.filter_jit
def _last_logits(model: Any, ids: np.ndarray, last: np.ndarray, fp8_cache: bool) -> jax.Array:
    with rounded_kv() if fp8_cache else contextlib.nullcontext():
        logits = model(hax.named(ids, ("batch", "position"))).array
    return jnp.take_along_axis(logits, last[:, None, None], axis=1)[:, 0].astype(jnp.float32)
