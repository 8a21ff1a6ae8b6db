"""The check of a reader: its configuration and weights must compute what the model computes; names what is wrong."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, PyTree

from lockstep.errors import ConfigError, LockstepError
from lockstep.hosts import Hosts, current, digest
from lockstep.models.adjustable import Settings, adjustable_logits, settings_of
from lockstep.models.reader import read_decoder
from lockstep.models.reader_search import suspects
from lockstep.models.trainable import as_trainable
from lockstep.placement import mesh_of, place, sources, weight_specs
from lockstep.placement.device import Program, compile_program, fetch

LEAST_TOLERANCE = 5e-4
"""Nats by which log-probabilities in float32 may differ: rounding of some 30 layers stays below."""
NAMED_AT_MOST = 3
CLEARLY_BETTER = 10
"""A difference that rounding could make is a mistake where another setting leaves less than a tenth of it."""


class ReaderMismatchError(LockstepError, ValueError):
    """A reader's configuration and weights do not compute what the model computes.

    Args:
        text: What differs, by how much, and what is likely wrong.
        likely: What is likely wrong, the likeliest first; empty where no guess explains the difference.

    Example:
        >>> error = lockstep.models.ReaderMismatchError("...", ("rope.theta is 10000: it should be 1e+06",))
        >>> error.likely[0]
        'rope.theta is 10000: it should be 1e+06'
    """

    def __init__(self, text: str, likely: tuple[str, ...] = (), tried: tuple[str, ...] = ()) -> None:
        super().__init__(text)
        self.likely = likely
        self.tried = tried


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReaderCheck:
    """The distance of a reader's model from the model itself, the same on every host.

    Args:
        gap: The largest absolute difference of two log-probabilities, over all tokens of the vocabulary, in nats.
        tolerance: The difference that rounding may make. It is large in bfloat16, where a small mistake stays unseen.
        unseen: The weights whose numbers are all equal, as those of norms in a new model are: whether the reader took
            the right one, no check can say.
        tried: Every usual error of a reader that was looked for; empty where the search cannot compute the model.
        cannot_tell: Those of them that would be within the tolerance too, such as another epsilon, or a base of rotary
            embeddings that shows after more positions.

    Example:
        >>> lockstep.models.ReaderCheck(gap=0.25, tolerance=0.5, unseen=("final_norm",)).unseen
        ('final_norm',)
    """

    gap: float
    tolerance: float
    unseen: tuple[str, ...]
    tried: tuple[str, ...] = ()
    cannot_tell: tuple[str, ...] = ()

    def __str__(self) -> str:
        """The result in some lines, for a terminal."""
        lines = [f"log-probabilities differ by {self.gap:.2g}, of {self.tolerance:.2g} that rounding may make"]
        lines.append(f"{len(self.tried)} usual errors of a reader were looked for (.tried)")
        lines += [f"cannot tell whether {text}" for text in self.cannot_tell]
        lines += [f"cannot tell whether {name} is the right weight: all its numbers are equal" for name in self.unseen]
        return "\n".join(lines)


def check_reader(
    model: Any,
    forward: Callable[[Int[Array, "batch position"]], Float[Array, "batch position vocab"]],
    *,
    length: int = 64,
    seed: int = 0,
    hosts: Hosts | None = None,
) -> ReaderCheck:
    """Compare what the decoder reads with the model's own forward pass, on random tokens; every host calls it.

    All log-probabilities are compared, not the best tokens: with a wrong rope base the best tokens are often the same.
    Use float32, and weights away from their initial values; a small model of the same class is enough. Cache, sampling
    and layouts are not looked at: ``audit`` compares those with what the reader says.

    Args:
        forward: The model's own forward pass, jitted: int32 ids ``[batch, position]`` to logits, ``batch`` being the
            number of devices of the model's mesh, and at least 2, split over all of them.
        hosts: The processes of the job; None for the current ones.

    Returns:
        The difference, what was looked for, and what could not be seen.

    Raises:
        ReaderMismatchError: The difference is more than rounding, or hardly any of it is left with another setting;
            names what is likely wrong.
        PeerError: Something failed on at least one host: the model cannot be read, the forward pass fails, or what it
            returns has another shape. Raised on every host.

    Example:
        >>> logits = jax.jit(lambda model, ids: model(hax.named(ids, ("batch", "position"))).array)
        >>> lockstep.models.check_reader(model, lambda ids: logits(model, ids)).gap < 1e-4
        True
    """
    with (current() if hosts is None else hosts).scope("check reader") as scope:
        with scope.run_on_all("read") as phase:
            check = _Check(scope, model, length, seed)
            phase.agree({"configuration": digest(repr(check.config))})
        with scope.launch_on_all("the model's own forward pass"):
            expected = jax.block_until_ready(forward(check.ids))
        with scope.run_on_all("compile") as phase:
            compare = check.compare(expected)
            phase.agree(compare.digests)
        with scope.launch_on_all("compare"):
            compared = {name: fetch(array) for name, array in compare(check.parts, check.ids, expected).items()}
        gap = float(compared["gaps"].max())
        tolerance = max(LEAST_TOLERANCE, 4 * float(compared["noise"].max()), 4 * float(compared["rounding"]))
        unseen = tuple(name for name, same in zip(check.names, compared["constant"], strict=True) if same)
        with scope.run_on_all("compile the search") as phase:
            program = check.adjustable(expected)
            phase.agree(program.digests)
        with scope.launch_on_all("search"):
            base, rests = _rests(check, program, expected)
    # The search cannot compute every model, such as one with an activation of its own.
    rests = rests if math.isclose(base, gap, rel_tol=0.05, abs_tol=tolerance) else []
    tried, likely = tuple(text for _, text in rests), _likely(rests, gap, base, tolerance)
    if gap <= tolerance and not likely:
        near = ((text.replace(": it should be ", " or "), rest) for rest, text in rests if rest <= tolerance)
        cannot_tell = tuple(_with_rest(text, rest) for text, rest in near)
        return ReaderCheck(gap=gap, tolerance=tolerance, unseen=unseen, tried=tried, cannot_tell=cannot_tell)
    text = (
        f"what the reader returned differs from the model's own forward pass by up to {gap:.3g} in a log-probability; "
        f"rounding makes at most {tolerance:.2g}. "
    )
    text += f"Likely wrong: {'; or '.join(likely)}." if likely else _where(compared["gaps"], tolerance, len(tried))
    if unseen:
        text += f" Whether {', '.join(unseen)} are right cannot be seen: all their numbers are equal."
    raise ReaderMismatchError(text, likely, tried)


class _Check:
    """A model as it was read, and the programs that compare it."""

    def __init__(self, hosts: Hosts, model: Any, length: int, seed: int) -> None:
        self.config, weights = read_decoder(model)
        if len(self.config.heads_by_kind) > 1:
            raise ConfigError(
                f"the model is a {type(self.config).__name__}, whose layers have heads of two sizes; check_reader "
                "computes heads of one size only. Compare its log-probabilities with those of a saved checkpoint in "
                "transformers."
            )
        if not 2 <= length <= self.config.max_seq_len:
            raise ConfigError(f"length is {length}; it must be from 2 to max_seq_len, {self.config.max_seq_len}.")
        self.mesh: Mesh = mesh_of(weights.embed)
        self.ledger = hosts.ledger
        self.parts = sources(weights)
        self.specs = weight_specs(weights)
        self.weights = weights
        self.names = [path[-1].name for path, _ in jax.tree_util.tree_leaves_with_path(weights)]
        rng = np.random.default_rng(seed)
        rows = max(2, self.mesh.size)
        ids = rng.integers(0, weights.embed.shape[0], (rows, length)).astype(np.int32)
        self.axes = self.mesh.axis_names if self.mesh.size > 1 else None
        self.ids = place(ids, NamedSharding(self.mesh, PartitionSpec(self.axes)))

    def compare(self, expected: Any) -> Program:
        """The program that compares the trainable model's log-probabilities with the model's own."""
        rows, length = self.ids.shape
        shape = getattr(expected, "shape", None)
        if shape is None or len(shape) != 3 or tuple(shape[:2]) != (rows, length):
            raise ConfigError(
                f"the forward pass returned {type(expected).__name__} of shape {shape} for ids of shape "
                f"({rows}, {length}). Return the logits alone, [{rows}, {length}, vocabulary]."
            )
        dtype = self.weights.embed.dtype

        def compare(parts: PyTree, ids: Array, expected: Array) -> dict[str, Array]:
            made = self._made(parts)
            logits = self._logits(jax.tree.map(lambda leaf: leaf.astype(dtype), made), ids)
            with jax.default_matmul_precision("highest"):
                exact = self._logits(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), made), ids)
            every = jax.tree.leaves(made)
            return {
                "gaps": _gaps(logits, expected),
                "noise": _gaps(logits, exact),
                "rounding": jnp.finfo(expected.dtype).eps * jnp.max(jnp.abs(expected)).astype(jnp.float32),
                "constant": jnp.stack([jnp.min(leaf) == jnp.max(leaf) for leaf in every]),
            }

        return self._compile("check_reader", compare, [self.parts, self.ids, expected])

    def adjustable(self, expected: Any) -> Program:
        """The program that compares with other settings; they are its last argument."""

        def compare(parts: PyTree, ids: Array, expected: Array, settings: Settings) -> Array:
            with jax.default_matmul_precision("highest"):
                return jnp.max(_gaps(adjustable_logits(self.config, self._made(parts), ids, settings), expected))

        settings = self.placed(settings_of(self.config))
        return self._compile("search_reader", compare, [self.parts, self.ids, expected, settings])

    def placed(self, settings: Settings) -> Settings:
        """Settings as an argument of the program."""
        everywhere = NamedSharding(self.mesh, PartitionSpec())
        placed: Settings = jax.tree.map(lambda leaf: place(np.asarray(leaf), everywhere), settings)
        return placed

    def _made(self, parts: PyTree) -> Any:
        return jax.tree.map(lambda spec, part: spec.make(part), self.specs, parts)

    def _logits(self, weights: Any, ids: Array) -> Array:
        with hax.axis_mapping({"batch": self.axes} if self.axes else {}):
            logits = as_trainable(self.config, weights)(hax.named(ids, ("batch", "position")))
            array: Array = logits.rearrange(("batch", "position", "vocab")).array
        return array

    def _compile(self, name: str, function: Callable[..., Any], arguments: list[Any]) -> Program:
        return compile_program(
            name,
            function,
            arguments,
            mesh=self.mesh,
            ledger=self.ledger,
            out_shardings=NamedSharding(self.mesh, PartitionSpec()),
        )


def _gaps(logits: Array, expected: Array) -> Array:
    """The largest difference of two log-probabilities at each position, over the tokens that both have."""
    count = min(logits.shape[-1], expected.shape[-1])
    logprobs, expected_logprobs = (
        jax.nn.log_softmax(side[..., :count].astype(jnp.float32)) for side in (logits, expected)
    )
    return jnp.max(jnp.nan_to_num(jnp.abs(logprobs - expected_logprobs), nan=jnp.inf), axis=(0, 2))


def _rests(check: _Check, program: Program, expected: Any) -> tuple[float, list[tuple[float, str]]]:
    """The difference as the search computes it, and what is left of it with each guess, the least first."""

    def left(settings: Settings) -> float:
        return float(fetch(program(check.parts, check.ids, expected, check.placed(settings))))

    rests = sorted((left(settings), text) for text, settings in suspects(check.config, check.weights))
    return left(settings_of(check.config)), rests


def _likely(rests: list[tuple[float, str]], gap: float, base: float, tolerance: float) -> tuple[str, ...]:
    """The guesses that explain the difference: hardly any of it is left with them."""
    if gap > tolerance:
        explained = [rest_and_text for rest_and_text in rests if rest_and_text[0] <= max(tolerance, gap / 50)]
    else:
        explained = [rest_and_text for rest_and_text in rests if CLEARLY_BETTER * rest_and_text[0] < base]
    least = explained[0][0] if explained else 0.0
    most = min(max(tolerance, 2 * least), CLEARLY_BETTER * least)
    return tuple(_with_rest(text, rest) for rest, text in explained[:NAMED_AT_MOST] if rest <= most)


def _with_rest(text: str, rest: float) -> str:
    return f"{text} (the difference is then {rest:.2g})"


def _where(gaps: Float[np.ndarray, " position"], tolerance: float, tried: int) -> str:
    """The place to look, by whether the first position differs: its attention has one position to attend to."""
    none = f"None of {tried} single changes (.tried of this error) explains the difference; there may be two."
    if gaps[0] <= tolerance:
        return (
            f"The first position agrees ({gaps[0]:.2g}): look at what works between positions, which is rotary "
            "embeddings, the scale and soft cap of attention, the window, norms of q and k, the order of heads, "
            f"convolutions and decays of linear attention. {none}"
        )
    return (
        f"The first position differs already ({gaps[0]:.2g}): look at embedding and its scale, norms, v, o, MLP, "
        f"activation, output layer. {none}"
    )
