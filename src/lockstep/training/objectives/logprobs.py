"""The log-probability of each token of a batch, which every objective is made of; the result of an objective."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import NamedArray
from haliax.partitioning import physical_axis_name
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, PyTree

from lockstep.engine import ExactForward, exact_logprobs
from lockstep.errors import ConfigError
from lockstep.models import EngineRouting, LlamaConfig, RouterSums, read_decoder, value_with_gradient_of
from lockstep.models.attention import SplitPositions
from lockstep.training.objectives.softmax import softmax_inputs, weighted
from lockstep.training.objectives.targets import NO_TARGET, target_mask
from lockstep.training.objectives.vocab_blocks import VocabBlocks, logits_fit


class LossParts(NamedTuple):
    """Sums over a (micro)batch. The loss and each metric are the sum over the whole batch divided by its weight."""

    total: Float[Array, ""]  # the sum of losses, float32
    weight: Float[Array, ""]
    """The divisor of the sums, e.g. the number of tokens; it must not depend on the parameters."""
    metrics: Mapping[str, Float[Array, ""]]  # sums of further metrics by name, with the same weight but for those in
    weights: Mapping[str, Float[Array, ""]] = {}  # the divisors of metrics that are means over fewer; nan over none

    def means(self) -> dict[str, Float[Array, ""]]:
        """Return the metrics, of the sums over a whole batch."""
        return {name: total / self.weights.get(name, self.weight) for name, total in self.metrics.items()}


class LossFn(Protocol):
    """An objective: a pure function of a model in the compute type and a batch of arrays with the row as axis 0."""

    def __call__(self, model: PyTree, batch: Mapping[str, Array], /) -> LossParts:
        """Compute the sums of one (micro)batch inside the train step."""
        ...


def lm_loss(model: Any, batch: Mapping[str, Array], *, targets_only: bool = False) -> LossParts:
    """Return the cross entropy, as a mean over the target tokens.

    Args:
        model: The model in the compute type, called as in `token_logprobs`.
        batch: The columns ``tokens`` ``[row, position]`` and ``loss_mask`` ``[row, position]``, true for each token
            that is a target (the first of a row, or of a document, never is, whatever the mask says); for packed rows
            also ``segment_ids`` ``[row, position]``, the document of each token from 1 on, 0 for padding.
        targets_only: See `token_logprobs`; the loss is the same.

    Returns:
        Sums with the number of target tokens as the weight.

    Example:
        >>> import jax.numpy as jnp
        >>> batch = {"tokens": jnp.ones((2, 8), jnp.int32), "loss_mask": jnp.ones((2, 8), bool)}
        >>> parts = jax.eval_shape(lockstep.training.lm_loss, model, batch)
        >>> parts.total.shape
        ()
    """
    mask, logprobs = target_mask(batch), token_logprobs(model, batch, targets_only=targets_only)
    return LossParts(
        total=-jnp.sum(jnp.where(mask, logprobs, 0.0)), weight=jnp.sum(mask, dtype=jnp.float32), metrics={}
    )


LOGITS_BYTES: Final = 256 * 2**20
"""The bytes of float32 logits and of their gradients that a device may have at once. Fewer logits are kept for the
backward pass, where they would else be computed again."""


def needs_vocab_blocks(tokens: int, vocab: int) -> bool:
    """Whether logits are made for blocks of the vocabulary."""
    return not logits_fit(tokens, vocab, most=LOGITS_BYTES)


@runtime_checkable
class OutputLayer(Protocol):
    """A model whose output layer can be applied to a part of the vocabulary."""

    @property
    def logit_soft_cap(self) -> float | None:
        """The soft cap of the logits; None for none."""
        ...

    def activations(self, input_ids: NamedArray, segment_ids: NamedArray | None = None) -> NamedArray:
        """Return the hidden states ``[batch, position, embed]`` that the output layer reads."""
        ...

    def lm_head_array(self) -> NamedArray:
        """Return the output layer ``[embed, vocab]`` or ``[vocab, embed]``."""
        ...

    def logits(self, activations: NamedArray) -> NamedArray:
        """Return the logits of hidden states in float32."""
        ...


def token_logprobs(
    model: Any,
    batch: Mapping[str, Array],
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    targets_only: bool = False,
) -> Float[Array, "... target"]:
    """Return the log-probability that a model gives to each token but the first, from the tokens before it.

    The logits of an `OutputLayer` are made for blocks of the vocabulary where those of a device and their
    gradients are more than `LOGITS_BYTES`. Any other model returns all of them.

    Args:
        model: An `OutputLayer`, such as `lockstep.models.LlamaLMHeadModel`; or a function of a haliax array with axes
            ``batch, position``, and of the segment ids where the batch has them, that returns logits with one more
            axis, ``vocab``.
        batch: The columns ``tokens`` ``[..., position]``, token ids; for rows packed with several documents also
            ``segment_ids`` of the same shape, the number of the document of each token, 0 for padding.
        temperature: What the logits are divided by.
        vocab_size: The number of ids that have a probability, from 0; None for all rows of the output layer, as other
            trainers do it.
        targets_only: Whether those of tokens that are no targets (`target_mask`) may be 0. Where logits are made for
            blocks, the output layer then computes as many quarters of a device's tokens as hold its targets.

    Returns:
        Natural-log probabilities of ``tokens[..., 1:]`` in float32. That of a document's first token, given the end of
        the document before it, is there too: see `target_mask`.

    Raises:
        ConfigError: The batch has segment ids, and the model takes none.
    """
    return _logprobs(model, batch, temperature, vocab_size, targets_only, entropy=False)[0]


def token_logprobs_and_entropies(
    model: Any,
    batch: Mapping[str, Array],
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    targets_only: bool = False,
) -> tuple[Float[Array, "... target"], Float[Array, "... target"]]:
    r"""Return what `token_logprobs` returns, and the entropy of the distribution of each of these tokens.

    :math:`H = -\sum_v p_v \log p_v` in nats, over the whole vocabulary, not an estimate from the token that was drawn.
    It is summed by the same blocks of the vocabulary, and its gradient too.

    Raises:
        ConfigError: The batch has segment ids, and the model takes none.
    """
    logprobs, entropies = _logprobs(model, batch, temperature, vocab_size, targets_only, entropy=True)
    assert entropies is not None
    return logprobs, entropies


def _logprobs(
    model: Any,
    batch: Mapping[str, Array],
    temperature: float,
    vocab_size: int | None,
    targets_only: bool,
    *,
    entropy: bool,
) -> tuple[Array, Array | None]:
    """The log-probability of each token but the first, and the entropy where it is asked for."""
    shape = batch["tokens"].shape
    # Axes between row and position are the inner ones, so that this reshape moves nothing between devices.
    tokens: Int[Array, "row position"] = batch["tokens"].reshape(-1, shape[-1])
    inputs = [hax.named(tokens, ("batch", "position"))]
    if "segment_ids" in batch:
        inputs.append(hax.named(batch["segment_ids"].reshape(tokens.shape), ("batch", "position")))
    # All positions, so that their number stays that of whole tiles and no logits are copied: the last one is dropped.
    targets = _whole_rows(jnp.roll(tokens, -1, axis=-1))
    exact = _exact_logprobs(model, batch, tokens, temperature, vocab_size)
    if isinstance(model, OutputLayer):
        if exact is None:
            states = model.activations(*inputs)
        else:
            known = hax.named(exact.stream, ("layer", "batch", "position", "embed"))
            routing = None if exact.experts is None else EngineRouting(hax.named(exact.experts, _ROUTED), replayed=True)
            states = model.activations_and_router(*inputs, engine=routing, known=known)[0]  # type: ignore[attr-defined]
        blocks = VocabBlocks.of(
            states,
            model.lm_head_array(),
            model.logit_soft_cap,
            most=LOGITS_BYTES,
            temperature=temperature,
            vocab_size=vocab_size,
            targets_only=targets_only,
        )
        if blocks is None:
            logprobs, entropies = _picked(model.logits(states), targets, temperature, vocab_size, entropy)
        else:
            rows, head = states.rearrange(("batch", "position", "embed")).array, model.lm_head_array().array
            if targets_only:
                mask = jnp.pad(target_mask(batch), [(0, 0)] * (len(shape) - 1) + [(0, 1)]).reshape(tokens.shape)
                targets = jnp.where(_whole_rows(mask), targets, NO_TARGET)
            logprobs, entropies = (
                blocks.with_entropy(rows, head, targets) if entropy else (blocks(rows, head, targets), None)
            )
    else:
        _check_arguments(model, len(inputs))
        logprobs, entropies = _picked(model(*inputs), targets, temperature, vocab_size, entropy)
    logprobs = _whole_rows(logprobs)[:, :-1]
    logprobs = logprobs if exact is None else value_with_gradient_of(exact.logprobs, logprobs)
    if entropies is not None:
        entropies = _whole_rows(entropies)[:, :-1].reshape(*shape[:-1], -1)
    return logprobs.reshape(*shape[:-1], -1), entropies


def _whole_rows(x: Array) -> Array:
    """Return numbers ``[row, position]`` with all positions on each device that has a row.

    XLA would else shift positions that are split over devices from one to the next.
    """
    if SplitPositions.of(hax.Axis("position", x.shape[1])) is None:
        return x
    return jax.lax.with_sharding_constraint(x, P(physical_axis_name("batch")))


def _exact_logprobs(
    model: Any, batch: Mapping[str, Array], tokens: Array, temperature: float, vocab_size: int | None
) -> ExactForward | None:
    """The result of `exact_logprobs` for a model whose ``numerics`` are exact; None for any other."""
    config = getattr(model, "config", None)
    if not getattr(config, "exact", False):
        return None
    if split := SplitPositions.of(hax.Axis("position", tokens.shape[-1])):
        raise ConfigError(split.refusal("numerics exact"))
    recording = model if isinstance(model, _RouterRecording) else None
    config, weights = read_decoder(model if recording is None else recording.model)
    segment_ids = batch["segment_ids"].reshape(tokens.shape) if "segment_ids" in batch else None
    return exact_logprobs(
        config, weights, tokens, segment_ids=segment_ids, temperature=temperature, vocab_size=vocab_size,
        replayed=None if recording is None else recording.replayed,
    )  # fmt: skip


def _picked(
    logits: NamedArray,
    targets: Int[Array, "row position"],
    temperature: float,
    vocab_size: int | None,
    entropy: bool,
) -> tuple[Float[Array, "row position"], Float[Array, "row position"] | None]:
    every = logits.rearrange(("batch", "position", "vocab")).array.astype(jnp.float32)
    ids = jnp.arange(every.shape[-1])
    every = softmax_inputs(every, ids, temperature, vocab_size)
    # The gradient of a sum is fused with that of the log-sum-exp; that of an index is another array of all logits.
    hit = targets[..., None] == ids
    sum_exp = jax.nn.logsumexp(every, axis=-1)
    picked = jnp.sum(jnp.where(hit, every, 0.0), axis=-1) - sum_exp
    if not entropy:
        return picked, None
    logprobs = every - sum_exp[..., None]
    return picked, -jnp.sum(weighted(jnp.exp(logprobs), logprobs), axis=-1)


def _check_arguments(model: Any, count: int) -> None:
    try:
        inspect.signature(model).bind(*range(count))
    except TypeError as error:
        raise ConfigError(
            f"the batch has the column segment_ids, and the model cannot be called with token ids and segment ids "
            f"({error}): its documents would attend to each other. Give the model a second argument, or do not "
            "pack rows."
        ) from error


def loss_with_routers(objective: LossFn, model: Any, batch: Mapping[str, Array]) -> LossParts:
    """Return the sums of an objective, and to it the losses of the routers of a model with experts (`Experts`).

    They are added up over layers, and over the forward passes of the objective; with microbatches they are the mean of
    those of each. Neither padding nor a sequence without targets is in them. Metrics: ``router/loss``, those of
    `RouterSums.metrics`, and where the batch has the experts that an engine chose (`routing_column`) ``routing_gap``,
    the share of those in layers and tokens that differ.
    """
    recording = with_routing(model, batch)
    if recording is model:
        return objective(model, batch)
    experts, parts = model.config.experts, objective(recording, batch)
    if not recording.sums:
        return parts
    loss = sum(jnp.sum(sums.loss(experts)) for sums in recording.sums)
    router_metrics = [sums.metrics() for sums in recording.sums]
    means = {
        name: sum(metric[name] for metric in router_metrics) / len(router_metrics) for name in router_metrics[0]
    } | {"router/loss": loss}
    if any(name in batch for name in ROUTING):
        compared, differing = (sum(jnp.sum(getattr(sums, name)) for sums in recording.sums) for name in _COMPARED)
        means["routing_gap"] = differing / jnp.maximum(compared, 1.0)
    metrics = {name: parts.weight * value for name, value in means.items()}
    return parts._replace(total=parts.total + parts.weight * loss, metrics={**parts.metrics, **metrics})


ROUTING: Final[Mapping[str, bool]] = {"rollout_experts": False, "replayed_experts": True}
"""Columns ``[row, position, layer, choice]`` of the experts that an engine chose, -1 where it chose none: those that
the model's own are compared with, and those that it takes."""
_COMPARED = ("compared", "differing")
_ROUTED: Final = ("batch", "position", "layer", "choice")


def routing_column(config: LlamaConfig | None, row_length: int, *, replayed: bool) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the column of the experts that an engine chose, by its name; none for a model without experts."""
    if config is None or config.experts is None:
        return {}
    name = next(name for name, takes in ROUTING.items() if takes == replayed)
    shape = (row_length, config.num_layers, config.experts.num_experts_per_tok)
    return {name: jax.ShapeDtypeStruct(shape, np.int16)}


def with_routing(model: Any, batch: Mapping[str, Array]) -> Any:
    """Return a model with experts as one that keeps the sums of its routers, and takes the experts of a batch."""
    if getattr(getattr(model, "config", None), "experts", None) is None or not hasattr(model, "activations_and_router"):
        return model
    engine_routing = [
        EngineRouting(hax.named(batch[name], _ROUTED), replayed) for name, replayed in ROUTING.items() if name in batch
    ]
    return _RouterRecording(model, engine_routing, _up_to_last_target(batch))


def _up_to_last_target(batch: Mapping[str, Array]) -> Bool[Array, "row position"] | None:
    """Which tokens have a target at or behind them, by the sequence: what comes after the last one is padding, or has
    no part in the loss. None where segment ids tell what is padding, or nothing does.
    """
    if "segment_ids" in batch or "loss_mask" not in batch:
        return None
    mask = batch["loss_mask"].reshape(-1, batch["loss_mask"].shape[-1]).astype(bool)
    positions = jnp.arange(mask.shape[1])
    return positions <= jnp.max(jnp.where(mask, positions, -1), axis=1, keepdims=True)


class _RouterRecording:
    """A model that keeps the sums of its routers, while an objective is traced."""

    def __init__(self, model: Any, engine: Sequence[EngineRouting], counted: Array | None) -> None:
        self.model, self._engine, self._counted = model, engine, counted
        self.sums: list[RouterSums] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def activations(self, input_ids: NamedArray, segment_ids: NamedArray | None = None) -> NamedArray:
        counted = self._counted_of(input_ids)
        states, sums = self.model.activations_and_router(input_ids, segment_ids, *self._engine, counted=counted)
        self.sums.append(sums)
        return states

    def _counted_of(self, input_ids: NamedArray) -> NamedArray | None:
        """The tokens in the sums; None where an objective of one's own has made other rows of the batch."""
        if self._counted is None or self._counted.shape != input_ids.array.shape:
            return None
        return hax.named(self._counted, input_ids.axes)

    @property
    def replayed(self) -> Array | None:
        """The experts to take; None where there are none."""
        return next((routing.experts.array for routing in self._engine if routing.replayed), None)

    def activations_and_router(
        self, input_ids: NamedArray, segment_ids: NamedArray | None = None, *, engine: EngineRouting, known: NamedArray
    ) -> tuple[NamedArray, RouterSums]:
        """With `exact_logprobs`, whose experts are those that are compared."""
        counted = self._counted_of(input_ids)
        states, sums = self.model.activations_and_router(input_ids, segment_ids, engine, known, counted)
        if self._engine:
            own, engine_experts = (jnp.sort(routing.experts.array) for routing in (engine, self._engine[0]))
            compared = engine_experts[..., 0] >= 0
            flags = compared, compared & jnp.any(own != engine_experts, axis=-1)
        else:
            flags = (jnp.zeros(()), jnp.zeros(()))
        self.sums.append(
            sums._replace(
                **{name: jnp.sum(flag, dtype=jnp.float32) for name, flag in zip(_COMPARED, flags, strict=True)}
            )
        )
        return states, sums

    def __call__(self, input_ids: NamedArray, segment_ids: NamedArray | None = None) -> NamedArray:
        return self.logits(self.activations(input_ids, segment_ids))

    # An `OutputLayer` is told by the attributes of its class.
    def lm_head_array(self) -> NamedArray:
        return self.model.lm_head_array()

    def logits(self, activations: NamedArray) -> NamedArray:
        return self.model.logits(activations)

    @property
    def logit_soft_cap(self) -> float | None:
        return self.model.logit_soft_cap
