"""The audit: the engine's log-probabilities against those of the training forward, all tokens at once."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, PyTree

from lockstep.engine.decode_model import signature_of
from lockstep.engine.decoder.forward import exact_logprobs, exact_merges
from lockstep.engine.schedule import digest_parts
from lockstep.engine.small_moves import KnownModel
from lockstep.errors import CapacityError, ConfigError
from lockstep.hosts import Hosts, Ledger, current, digest, ready_on_all
from lockstep.models import DecoderWeights, LlamaConfig, as_trainable, read_decoder
from lockstep.placement import mesh_of, place, sources, weight_specs
from lockstep.placement.device import AroundLaunch, Program, compile_lowered, compile_program, fetch
from lockstep.printable import bytes_text
from lockstep.types import Completion, Request

_LENGTH_STEP = 64
"""Positions of a forward pass come in multiples of this, so that a longer answer seldom needs another program."""
_CHUNK = 128
"""The number of positions whose logits exist at a time: a whole vocabulary for each."""
_FULL_PRECISION = ("highest", "float32", "F32_F32_F32")
"""The values of ``jax_default_matmul_precision`` with which an accelerator multiplies float32 numbers as such."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AuditResult:
    """Distance of log-probabilities from those of the training forward, the same on every host.

    Args:
        logprob_gap: The largest absolute difference between a completion's log-probability and that of the training
            forward in the engine's dtype, in nats; infinite where either is not a number, 0 where nothing was sampled.
        logprob_noise: The largest absolute difference that rounding alone makes: between the training forward in the
            engine's dtype and the same in float32, on the same weights and tokens. None where the engine computes in
            float32, products included: those of a TPU or GPU are narrower unless ``jax_default_matmul_precision`` is
            ``highest``.
        logprob_gap_mean: The mean absolute difference instead of the largest.
        logprob_noise_mean: The mean of the differences that rounding alone makes. The largest one depends on a single
            unlikely token; a mean gap of more than twice the mean noise is an error in the engine, not rounding, once
            in the engine and once in the forward.
    """

    logprob_gap: float
    logprob_noise: float | None = None
    logprob_gap_mean: float = 0.0
    logprob_noise_mean: float | None = None

    def scalars(self) -> dict[str, float]:
        """Return the numbers that there are, by name."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}


class Auditor:
    """Recomputes the log-probabilities of completions with the model's own full forward pass, without a cache.

    Every host makes the same calls. The forward pass is that of `lockstep.models.LlamaLMHeadModel`, on the model's own
    arrays; each device takes one sequence at a time. Where the engine computes or multiplies in fewer than 32 bits, a
    second forward pass in float32 measures what that costs. Only the compiled programs are kept.

    Args:
        vocab_size: The number of token ids that may be sampled, as given to the engine; None for all rows of the
            embedding.
        dtype: The floating dtype to compute in, the engine's; None for the dtype of the parameters.
        ledger: The ledger that launches are recorded in; None for one of its own.
        hbm_utilization: The share of the free memory that it may use, between 0 and 1.
    """

    def __init__(
        self,
        mesh: Mesh,
        *,
        vocab_size: int | None = None,
        dtype: str | None = None,
        ledger: Ledger | None = None,
        hbm_utilization: float = 0.9,
    ) -> None:
        self.hbm_utilization = hbm_utilization
        self.mesh = mesh
        self.vocab_size = vocab_size
        self.dtype = dtype
        self.ledger = Ledger() if ledger is None else ledger
        self._built: tuple[int, dict[str, Program]] | None = None
        self._known: KnownModel | None = None
        self._rows = NamedSharding(mesh, PartitionSpec(mesh.axis_names))

    @property
    def programs(self) -> Mapping[str, Program]:
        """The compiled programs by name; none before the first `prepare`."""
        return self._known.programs | self._built[1] if self._built and self._known else {}

    def prepare(self, model: Any, requests: Sequence[Request]) -> dict[str, str]:
        """Compile the forward pass for the longest that the requests can become; launches nothing.

        Returns:
            The programs' digests by name. Hosts must agree on them before `run`.
        """
        config, weights = read_decoder(model)
        length = max(len(r.prompt_tokens) + r.params.max_new_tokens for r in requests)
        length = min(config.max_seq_len, -(-length // _LENGTH_STEP) * _LENGTH_STEP)
        known = self._known
        if self._built is None or known is None or self._built[0] < length or not known.follow((config, weights)):
            ids = jax.ShapeDtypeStruct((self.mesh.size, length + 1), np.int32, sharding=self._rows)
            compute = jnp.dtype(self.dtype or weights.embed.dtype)
            exact = compute == jnp.float32 and _multiplies_float32(self.mesh)
            names = {"audit": False} if exact else {"audit": False, "audit_float32": True}
            programs = {
                name: compile_program(
                    name,
                    self._forward(
                        config, length, weight_specs(exact_merges(config, weights, compute)), compute, in_float32
                    ),
                    [jax.tree.map(_struct, sources(weights)), ids],
                    mesh=self.mesh,
                    ledger=self.ledger,
                    out_shardings=NamedSharding(self.mesh, PartitionSpec()),
                )
                for name, in_float32 in names.items()
            }
            self._built = length, programs
            self._known = KnownModel(signature_of(config, weights), self.mesh, self.ledger, compile_lowered)
        return {key: value for program in self.programs.values() for key, value in program.digests.items()}

    def check_memory(self, free: int) -> None:
        """Refuse an audit that needs more memory than there is when cache and decode weights are gone again.

        Args:
            free: The least free memory of any device of any host, in bytes; the same on every host.

        Raises:
            CapacityError: The audit does not fit; names what it needs, what there is, and the fix.
        """
        assert self._built is not None, "prepare() comes before check_memory()"
        need = max(
            int(memory.temp_size_in_bytes + memory.output_size_in_bytes + memory.generated_code_size_in_bytes)
            for memory in (program.memory() for program in self.programs.values())
        )
        most = int(free * self.hbm_utilization)
        if need > most:
            raise CapacityError(
                f"the audit needs {bytes_text(need)} per device for sequences of {self._built[0]} tokens; there are "
                f"{bytes_text(most)}: hbm_utilization {self.hbm_utilization:g} of the {bytes_text(free)} "
                "that the device with the least free memory of all hosts has. Set audit to false, or shorten prompts "
                "and answers."
            )

    def run(
        self,
        model: Any,
        requests: Sequence[Request],
        completions: Sequence[Completion],
        *,
        around_launch: AroundLaunch = contextlib.nullcontext,
        hosts: Hosts | None = None,
    ) -> AuditResult:
        """Compare the log-probabilities of completions with recomputed ones.

        Args:
            model: The model given to `prepare`, or a later state of it.
            completions: Completions of these requests; the same on every host.
            around_launch: A function of the program's name whose context surrounds a launch and the wait for its
                result.
            hosts: The processes of the job, inside a scope: what fails on one of them between two launches is then
                raised on all. None where an error stays on its host, and its peers wait for it in the next launch.

        Raises:
            ConfigError: The model is not the one that was prepared for, or a completion is of none of the requests.
            PeerError: With ``hosts``, that or anything else failed on one of them; raised on every host.
        """
        assert self._built is not None and self._known is not None, "prepare() comes before run()"
        length, programs = self._built
        with _ready(hosts):
            config, weights = read_decoder(model)
            if (config, weights) not in self._known:
                raise ConfigError(
                    "the model's configuration, shapes, dtypes or placement are not those that the auditor prepared "
                    "for. Call prepare with this model first."
                )
            prompts = {request.prompt_id: request.prompt_tokens for request in requests}
            sampled = [completion for completion in completions if completion.tokens]
            for completion in sampled:
                if completion.prompt_id not in prompts:
                    raise ConfigError(
                        f"a completion is of prompt {completion.prompt_id}, which none of the {len(prompts)} requests "
                        "has. Pass the requests that were answered."
                    )
        for name in self._known.programs:
            with around_launch(name):
                weights = self._known.move_back(weights)
        recomputed: list[dict[str, np.ndarray]] = []
        for batch in _batches(sampled, self.mesh.size):
            with _ready(hosts):
                ids = np.zeros((self.mesh.size, length + 1), np.int32)
                for row, completion in enumerate(batch):
                    known = (*prompts[completion.prompt_id], *completion.tokens)
                    ids[row, : len(known)] = known
                arguments = sources(weights), place(ids, self._rows)
            results = {}
            for name, program in programs.items():
                with around_launch(name):
                    results[name] = fetch(program(*arguments))
            recomputed.append(results)
        # All is launched: from here on an error on one host leaves no other in a launch.
        gap, noise = _Differences(), _Differences()
        for batch, results in zip(_batches(sampled, self.mesh.size), recomputed, strict=True):
            for row, completion in enumerate(batch):
                first = len(prompts[completion.prompt_id]) - 1
                tokens = slice(first, first + len(completion.tokens))
                forward = results["audit"][row, tokens]
                gap.add(forward, np.asarray(completion.logprobs, np.float32))
                if "audit_float32" in results:
                    noise.add(forward, results["audit_float32"][row, tokens])
        measured = "audit_float32" in programs
        return AuditResult(
            logprob_gap=gap.largest,
            logprob_noise=noise.largest if measured else None,
            logprob_gap_mean=gap.mean,
            logprob_noise_mean=noise.mean if measured else None,
        )

    def _forward(
        self, config: LlamaConfig, length: int, plans: PyTree, compute: jnp.dtype, in_float32: bool
    ) -> Callable[..., Array]:
        def forward(parts: PyTree, ids: Int[Array, "sequence tokens"]) -> Float[Array, "sequence position"]:
            """Log-probability of each token but the first, given those before it."""
            weights: DecoderWeights = jax.tree.map(lambda plan, part: plan.make(part), plans, parts)
            weights = jax.tree.map(
                lambda leaf: _widened(leaf, compute) if in_float32 else leaf.astype(compute), weights
            )
            if config.exact and not in_float32:
                return exact_logprobs(config, weights, ids, vocab_size=self.vocab_size).logprobs
            precision = jax.default_matmul_precision("highest") if in_float32 else contextlib.nullcontext()
            with hax.axis_mapping({"batch": self.mesh.axis_names}), precision:
                model = as_trainable(config, weights)
                x = model.activations(hax.named(ids[:, :-1], ("batch", "position"))).array

                def chunk(part: tuple[Array, Array]) -> Array:
                    states, targets = part
                    named = hax.named(states, ("batch", "position", "embed"))
                    logits = model.logits(named).rearrange(("batch", "position", "vocab")).array
                    allowed = jnp.arange(logits.shape[-1]) < (self.vocab_size or logits.shape[-1])
                    logprobs = jax.nn.log_softmax(jnp.where(allowed, logits, -jnp.inf), axis=-1)
                    return jnp.take_along_axis(logprobs, targets[..., None], axis=-1)[..., 0]

                logprobs = jax.lax.map(chunk, (_split(x), _split(ids[:, 1:])))
                return jnp.moveaxis(logprobs, 0, 1).reshape(len(ids), -1)[:, :length]

        return forward


def audit(
    model: Any,
    requests: Sequence[Request],
    completions: Sequence[Completion],
    *,
    vocab_size: int | None = None,
    dtype: str | None = None,
    hosts: Hosts | None = None,
) -> AuditResult:
    """Compare log-probabilities of completions with those of the training forward; every host calls it.

    Args:
        model: A model that `lockstep.models.read_decoder` reads, sharded as it was when the completions were made.
        requests: The requests that the completions are of.
        completions: The completions, the same on every host.
        vocab_size: The number of token ids that may be sampled, as given to the engine; None for all rows of the
            embedding.
        dtype: The floating dtype to compute in; None for the dtype of the parameters.
        hosts: The processes of the job; None for the current ones.

    Returns:
        The largest and the mean differences over all tokens, the same on every host.

    Raises:
        PeerError: The audit failed on at least one host; raised on every host.
        DisagreementError: The hosts were given different completions.

    Example:
        >>> params = lockstep.SamplingParams(max_new_tokens=4)
        >>> requests = [lockstep.Request(prompt_id=0, prompt_tokens=(1, 2, 3), params=params)]
        >>> completions = lockstep.Engine(lockstep.EngineConfig(), mesh).generate(model, requests)
        >>> lockstep.audit(model, requests, completions).logprob_gap < 1e-3
        True
    """
    with (current() if hosts is None else hosts).scope("audit") as scope:
        with scope.run_on_all("prepare") as prepared:
            facts = digest(repr(list(requests)), *digest_parts(completions))
            prepared.agree({"requests and completions": facts})
            read = read_decoder(model)
            auditor = Auditor(mesh_of(read[1].embed), vocab_size=vocab_size, dtype=dtype)
            if requests:
                prepared.agree(auditor.prepare(read, requests))
        if not completions:
            return AuditResult(logprob_gap=0.0)
        with scope.launch_on_all("audit", auditor.ledger) as audited:
            result = auditor.run(read, requests, completions, hosts=scope)
            audited.agree({"audit": repr(result)})
    return result


@dataclasses.dataclass
class _Differences:
    """Absolute differences of log-probabilities; infinite where one is not a number."""

    largest: float = 0.0
    total: float = 0.0
    count: int = 0

    @property
    def mean(self) -> float:
        return self.total / max(self.count, 1)

    def add(self, forward: Float[np.ndarray, " token"], engine: Float[np.ndarray, " token"]) -> None:
        differences = np.abs(forward.astype(np.float64) - engine)
        if not np.isfinite(differences).all():
            differences = np.full_like(differences, math.inf)
        self.largest = max(self.largest, float(differences.max()))
        self.total += float(differences.sum())
        self.count += differences.size


def _multiplies_float32(mesh: Mesh) -> bool:
    """Whether products of float32 numbers are of all their digits.

    Unless it is asked for more, a TPU rounds the factors to bfloat16 (tests/tpu_compile/test_audit.py), a GPU to
    TF32. A CPU never does.
    """
    return mesh.devices.flat[0].platform == "cpu" or jax.config.jax_default_matmul_precision in _FULL_PRECISION


def _widened(leaf: Array, dtype: jnp.dtype) -> Array:
    """The values of ``dtype`` in float32; of a cast there and back XLA would leave nothing."""
    info = jnp.finfo(dtype)
    return jax.lax.reduce_precision(leaf.astype(jnp.float32), info.nexp, info.nmant)


def _ready(hosts: Hosts | None) -> contextlib.AbstractContextManager[None]:
    """Surround what comes before a launch and can fail on one host alone."""
    return contextlib.nullcontext() if hosts is None else ready_on_all(hosts, "before an audit's launch")


def _batches[T](items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for first in range(0, len(items), size):
        yield items[first : first + size]


def _split(array: Array) -> Array:
    """``[sequence, position, ...]`` to ``[chunk, sequence, position in chunk, ...]``, padded with zeros."""
    rows, length, *rest = array.shape
    size = min(_CHUNK, length)
    count = -(-length // size)
    padded = jnp.pad(array, [(0, 0), (0, count * size - length), *((0, 0) for _ in rest)])
    return jnp.moveaxis(padded.reshape(rows, count, size, *rest), 1, 0)


def _struct(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
