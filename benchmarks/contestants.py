"""Ours, the floor, and the peers: each generates a load and says how long it took."""

import contextlib
import ctypes
import dataclasses
import functools
import importlib.util
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from benchmarks.shapes import MODEL, VOCAB, Load, random_weights
from benchmarks.sizes import IS_SMALLEST
from lockstep.engine import Engine, EngineConfig
from lockstep.models import DecoderWeights, LayerWeights, LlamaConfig, config_to_hf


def keep_freed_memory() -> None:
    """Lets the C library keep what is freed, for every contestant; without effect where it is not glibc.

    What it gives back to the system comes again as page faults, in a call of whichever contestant needs memory next:
    up to 7 % of a prefill, at random.
    """
    trim_threshold, mmap_threshold = -1, -3
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        for parameter in (trim_threshold, mmap_threshold):
            library.mallopt(parameter, 2**31 - 1)


class Contestant(Protocol):
    """Something that generates. ``new_tokens`` 1 measures prefill; more, less that time, measures decode."""

    def generate(self, load: Load, new_tokens: int) -> float:
        """Seconds of one call, the device waited for."""
        ...


class Floor:
    """The matrix products of the weights alone, layers stacked and scanned: no norms, cache or sampling.

    Where there are experts, as many as even routing hits, one after the other in place, each with its even share of the
    tokens rounded down: never more bytes or products than are needed.

    Args:
        model: The model.
        context: Whether each decode step also reads the keys and values of every sequence, at half of its new tokens
            on average, and multiplies with them: the products of attention without its softmax. They lie as these
            products want them, contiguous, which no engine that adds a position at each step can have.
    """

    def __init__(self, model: LlamaConfig = MODEL, *, context: bool = False) -> None:
        self._model = model
        self._weights = random_weights(Mesh(np.array(jax.local_devices()[:1]), ("fsdp",)), model)
        self._context = context
        self._keys_and_values: dict[tuple[int, int], jax.Array] = {}
        self._run = jax.jit(functools.partial(_products, model), static_argnames="logits")

    def generate(self, load: Load, new_tokens: int) -> float:
        """Products of the prompt's tokens, then of ``new_tokens - 1`` steps."""
        prompt = self._ones(load.prompts * load.prompt_tokens)
        step = self._ones(load.prompts)
        context = self._of(load.prompts, load.prompt_tokens + load.new_tokens // 2) if self._context else None
        start = time.perf_counter()
        jax.block_until_ready(self._run(prompt, self._weights, None, 1))
        jax.block_until_ready(self._run(step, self._weights, context, new_tokens - 1))
        return time.perf_counter() - start

    def step_s(self, rows: int, repeats: int) -> float:
        """Seconds of the products of so many positions, logits of all of them included: the least of some runs.

        Args:
            rows: positions of all sequences together.
            repeats: how often it is measured.
        """
        x, seconds = self._ones(rows), []
        steps = max(1, 32 // rows)
        for _ in range(repeats + 1):
            start = time.perf_counter()
            jax.block_until_ready(self._run(x, self._weights, None, steps, logits=rows))
            seconds.append((time.perf_counter() - start) / steps)
        return min(seconds[1:])  # the first one compiles

    def _ones(self, rows: int) -> jax.Array:
        return jax.device_put(np.ones((rows, self._model.hidden_dim), np.float32), jax.local_devices()[0])

    def _of(self, prompts: int, length: int) -> jax.Array:
        """Keys and values ``[layer, key or value, sequence, kv head, position, head]``, made once."""
        model = self._model
        shape = (model.num_layers, 2, prompts, model.num_kv_heads, length, model.head_size)
        if (prompts, length) not in self._keys_and_values:
            self._keys_and_values = {(prompts, length): jax.block_until_ready(jnp.ones(shape))}
        return self._keys_and_values[prompts, length]


def _products(
    model: LlamaConfig,
    x: jax.Array,
    weights: DecoderWeights,
    context: jax.Array | None,
    steps: int,
    logits: int = 64,
) -> jax.Array:
    width, layers = x.shape[1], weights.layers
    # A scan would copy all experts of a layer, hit or not.
    experts = [w for w in (layers.expert_gate, layers.expert_up, layers.expert_down) if w is not None]
    scanned = dataclasses.replace(layers, expert_gate=None, expert_up=None, expert_down=None)

    def layer(x: jax.Array, scanned: Any) -> tuple[jax.Array, None]:
        index, w, keys_and_values = scanned
        q, k, v = (x @ each.reshape(width, -1) for each in (w.q, w.k, w.v))
        if keys_and_values is not None:
            heads = q.reshape(len(x), model.num_kv_heads, model.q_heads_per_group, model.head_size)
            scores = jnp.einsum("skgh,skph->skgp", heads, keys_and_values[0])
            q = jnp.einsum("skgp,skph->skgh", scores, keys_and_values[1]).reshape(q.shape)
        x = (q + jnp.concatenate([k, v], axis=1)) @ w.o.reshape(-1, width)
        return (_experts(model, index, x, w, experts) if experts else (x @ w.gate * (x @ w.up)) @ w.down), None

    def step(_: int, x: jax.Array) -> jax.Array:
        x, _ = jax.lax.scan(layer, x, (jnp.arange(model.num_layers), scanned, context))
        most = jnp.max(x[: min(len(x), logits)] @ weights.lm_head)
        return x + most * 1e-30  # so that nothing can be left out

    return jax.lax.fori_loop(0, steps, step, x)


def _experts(
    model: LlamaConfig, index: jax.Array, x: jax.Array, w: LayerWeights, experts: list[jax.Array]
) -> jax.Array:
    assert model.experts is not None
    hits = round(model.experts.expected_hits(len(x)))
    rows = max(1, len(x) * model.experts.num_experts_per_tok // hits)
    most = jnp.max(x @ w.router)
    # As many rows as a token has experts times fewer: an expert's share of the tokens.
    share = jnp.tile(x, (-(-rows // len(x)), 1))[:rows]
    gate, up, down = (weight.reshape(-1, *weight.shape[2:]) for weight in experts)

    def expert(at: jax.Array, total: jax.Array) -> jax.Array:
        own = index * model.experts.num_experts + at
        return total + (share @ gate[own] * (share @ up[own])) @ down[own]

    total = jax.lax.fori_loop(0, hits, expert, jnp.zeros_like(share))
    return x + jnp.sum(total, axis=0) + most * 1e-30


class Ours:
    """lockstep's engine on a mesh."""

    def __init__(self, mesh: Mesh, model: LlamaConfig = MODEL, **options: Any) -> None:
        self.engine = Engine(EngineConfig(**options), mesh)
        self.model = (model, random_weights(mesh, model))

    def generate(self, load: Load, new_tokens: int) -> float:
        """A call of the engine, compiling where it has to."""
        requests = load.requests(new_tokens)
        start = time.perf_counter()
        self.engine.generate(self.model, requests)
        return time.perf_counter() - start


@dataclasses.dataclass(frozen=True)
class Drawn:
    """lockstep's engine, drawing at random.

    Args:
        ours: the engine.
        sampling: the sampling parameters.
    """

    ours: Ours
    sampling: Mapping[str, Any]

    def generate(self, load: Load, new_tokens: int) -> float:
        """A call of the engine."""
        return self.ours.generate(dataclasses.replace(load, sampling=self.sampling), new_tokens)


class Levanter:
    """Levanter's inference engine on a mesh (marin-levanter)."""

    def __init__(self, load: Load, mesh: Mesh) -> None:
        import haliax as hax
        from levanter.inference.engine import InferenceEngine, InferenceEngineConfig
        from levanter.layers.attention import AttentionBackend
        from levanter.models.llama import LlamaConfig as LevanterLlama
        from levanter.models.llama import LlamaLMHeadModel

        self._mesh = mesh
        config = LevanterLlama(
            max_seq_len=MODEL.max_seq_len,
            hidden_dim=MODEL.hidden_dim,
            intermediate_dim=MODEL.intermediate_dim,
            num_layers=MODEL.num_layers,
            num_heads=MODEL.num_heads,
            num_kv_heads=MODEL.num_kv_heads,
            attn_backend=AttentionBackend.VANILLA,
        )
        self._mapping = {"embed": "fsdp"} if mesh.size > 1 else {}
        self._compute = {"batch": "fsdp"} if mesh.size > 1 else {}
        vocab = hax.Axis("vocab", VOCAB)
        with jax.set_mesh(mesh), hax.axis_mapping(self._mapping):
            model = hax.named_jit(
                lambda key: LlamaLMHeadModel.init(vocab, config, key=key), out_axis_resources=self._mapping
            )(jax.random.PRNGKey(0))
        pages = -(-(load.prompt_tokens + load.new_tokens) // 16)
        options = InferenceEngineConfig(
            max_seq_len=load.prompt_tokens + load.new_tokens,
            max_pages=load.prompts * pages,
            page_size=16,
            max_seqs=load.prompts,
            max_seqs_in_prefill=load.prompts,
            max_prefill_size=load.prompts * load.prompt_tokens,
            max_queued_tokens=max(512, load.prompts),
            max_rounds=64,
            compute_dtype=jnp.float32,
        )
        with jax.set_mesh(mesh), hax.axis_mapping(self._compute):
            self._engine = InferenceEngine.from_model_with_config(
                model, tokenizer=None, config=options, axis_resources=self._compute
            )

    def generate(self, load: Load, new_tokens: int) -> float:
        """A call of its engine."""
        import haliax as hax
        from levanter.inference.engine import Request
        from levanter.inference.jit_scheduler import SeqDecodingParams

        start = time.perf_counter()
        with jax.set_mesh(self._mesh), hax.axis_mapping(self._compute):
            params = dataclasses.replace(
                SeqDecodingParams.default(),
                max_num_tokens=jnp.array(load.prompt_tokens + new_tokens, jnp.int32),
            )
            requests = [
                Request(
                    prompt_tokens=list(r.prompt_tokens), request_id=r.prompt_id, decode_params=params, n_generations=1
                )
                for r in load.requests(new_tokens)
            ]
            result = self._engine.generate(requests)
        seconds = time.perf_counter() - start
        lengths = {len(tokens) for tokens in result.tokens}
        assert lengths == {new_tokens} or lengths == {load.prompt_tokens + new_tokens}, lengths
        return seconds


class Transformers:
    """transformers + torch on the CPU with its dynamic cache."""

    def __init__(self, model: LlamaConfig = MODEL) -> None:
        import torch
        from transformers import CONFIG_MAPPING, AutoModelForCausalLM

        self._torch = torch
        config = config_to_hf(model, VOCAB)
        made = CONFIG_MAPPING[config.pop("model_type")](**config)
        self._model = AutoModelForCausalLM.from_config(made).eval()

    def generate(self, load: Load, new_tokens: int) -> float:
        """A call of its ``generate``."""
        ids = self._torch.tensor([r.prompt_tokens for r in load.requests()])
        start = time.perf_counter()
        with self._torch.inference_mode():
            self._model.generate(
                ids, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False, pad_token_id=0
            )
        return time.perf_counter() - start


def installed(*modules: str) -> bool:
    """Whether a peer can be measured here."""
    return not IS_SMALLEST and all(importlib.util.find_spec(module) is not None for module in modules)


@dataclasses.dataclass
class Times:
    """Seconds of repeated calls; figures are medians."""

    prefill: list[float] = dataclasses.field(default_factory=list)
    whole: list[float] = dataclasses.field(default_factory=list)

    def prefill_rate(self, load: Load) -> float:
        """Prompt tokens per second up to and including the first new token."""
        return load.prompts * load.prompt_tokens / float(np.median(self.prefill))

    def decode_rate(self, load: Load) -> float:
        """New tokens per second after the first one."""
        seconds = float(np.median(np.array(self.whole) - np.array(self.prefill)))
        return load.prompts * (load.new_tokens - 1) / seconds


PEERS = ("levanter", "transformers")


def side_by_side(
    contestants: dict[str, Contestant], load: Load, repeats: int, *, peers_every: int = 1, warm: Collection[str] = ()
) -> dict[str, Times]:
    """Measures in turn, again and again, so that a machine that slows down slows all of them.

    Args:
        contestants: by name.
        load: to generate.
        repeats: turns.
        peers_every: peers, which take several times as long, are measured in every so many turns.
        warm: names of those that have generated this load before.
    """
    times = {name: Times() for name in contestants}
    for name, contestant in contestants.items():
        if name not in warm:
            contestant.generate(load, load.new_tokens)  # first, for the layout is chosen by what is asked for first
        contestant.generate(load, 1)
    for turn in range(repeats):
        for name, contestant in contestants.items():
            if name in PEERS and turn % peers_every:
                continue
            # Short, and so the first to be disturbed: the median of three.
            times[name].prefill.append(float(np.median([contestant.generate(load, 1) for _ in range(3)])))
            times[name].whole.append(contestant.generate(load, load.new_tokens))
    return times


def ratio(times: dict[str, Times], rate: str, other: str, load: Load) -> float | None:
    """How many times the rate of ``other`` ours is; None where ``other`` was not measured."""
    if other not in times:
        return None
    ours, theirs = (getattr(times[name], rate)(load) for name in ("ours", other))
    return float(ours / theirs)


one_device: Callable[[], Mesh] = functools.cache(lambda: Mesh(np.array(jax.devices()[:1]), ("fsdp",)))
