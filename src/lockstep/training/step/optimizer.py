"""An optax optimizer with clipping, weight decay and a learning-rate schedule, from a configuration."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, Final, Literal

import haliax as hax
import jax
import optax
from jaxtyping import Array, Int, PyTree

from lockstep.config_fields import check_fields
from lockstep.errors import ConfigError, check_at_least
from lockstep.models import RANK
from lockstep.training.step.renewal import ReferenceRenewal
from lockstep.training.step.schedules import SHARES, build_schedule, check_shape
from lockstep.training.step.train_state import average_parameters

DEFAULTS: Final[Mapping[str, Mapping[str, float]]] = {
    "adam": {"beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8, "weight_decay": 0.1},
    "adamw": {"beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8, "weight_decay": 0.1},
    "lion": {"beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1},
    "muon": {
        "beta1": 0.9,
        "beta2": 0.95,
        "epsilon": 1e-8,
        "momentum": 0.95,
        "weight_decay": 0.0,
        "adam_lr": 6e-4,
        "adam_weight_decay": 0.0,
    },
    "adafactor": {"beta2": 0.8, "epsilon": 1e-30, "weight_decay": 0.1},
}
"""The settings of each optimizer with their defaults, which are Levanter's; it has no use for the others."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW (Loshchilov & Hutter 2019, arXiv 1711.05101) or another optimizer, with gradient clipping and a schedule.

    Raises:
        ConfigError: A value is out of its range, or the optimizer has no use for it.

    Example:
        >>> config = lockstep.training.OptimizerConfig(learning_rate=1e-3, warmup=10)
        >>> optimizer, schedule = config.build(1000), config.schedule(1000)
        >>> round(float(schedule(10)), 6)
        0.001
    """

    type: Literal["adam", "adamw", "lion", "muon", "adafactor"] = "adamw"
    """``adamw``, for which ``adam`` is Levanter's word; ``lion`` (Chen et al. 2023, arXiv 2302.06675); ``muon`` for the
    matrices of the layers, AdamW for embedding, output layer, norms and biases (Jordan et al. 2024,
    https://kellerjordan.github.io/posts/muon/); ``adafactor`` (Shazeer & Stern 2018, arXiv 1804.04235)."""
    learning_rate: float = 6e-4
    """Peak learning rate. Each optimizer needs its own: lion about a tenth of AdamW's, the matrices of muon about 0.02.
    """
    adam_lr: float | None = None
    """Peak learning rate of what muon leaves to AdamW; null: 6e-4. The others have none."""
    weight_decay: float | None = None
    """Decoupled weight decay; null: 0.1, muon 0. The embedding, norms and biases are not decayed."""
    adam_weight_decay: float | None = None
    """Weight decay of what muon leaves to AdamW; null: as ``weight_decay``. The others have none."""
    beta1: float | None = None
    """Decay of the first moment; null: 0.9. Adafactor has none."""
    beta2: float | None = None
    """Decay of the second moment; null: 0.95, adafactor 0.8, the power with which its decay approaches 1."""
    epsilon: float | None = None
    """Added to the root of the second moment; null: 1e-8. Adafactor adds it to the square, null: 1e-30; lion has none.
    """
    momentum: float | None = None
    """Decay of muon's momentum; null: 0.95. The others have none."""
    max_grad_norm: float | None = 1.0
    """Gradients are scaled down to this global norm, with muon those that it leaves to AdamW; null for no clipping."""
    warmup: float = 0.01
    """Linear warm-up from 0: a fraction of the run up to 1, rounded down to steps; a number of steps above."""
    decay: float | None = None
    """Length of the final decay: a fraction up to 1, rounded down to steps, none where that is 0; steps above; null for
    everything after the warm-up, with ``wsd`` for 0.2. ``constant`` has none."""
    lr_schedule: str = "cosine"
    """Shape of the decay: ``cosine``, ``linear``, ``constant``; ``wsd`` is stable, then falls with 1 - sqrt;
    ``inv_sqrt`` falls with the root of the steps of warm-up and decay, from 10,000 on; or ``module:function`` of your
    own."""
    min_lr_ratio: float = 0.1
    """Learning rate at the end, as a fraction of the peak, below which ``inv_sqrt`` does not fall; ``constant`` has no
    use for it."""
    ema_decay: float | None = None
    """Keep an average of the parameters that moves by ``1 - ema_decay`` of the way at each step: samples, validation
    and Hugging Face checkpoints are then of the average. Null: none."""

    def __post_init__(self) -> None:
        check_fields(self, "optimizer.")
        check_shape(self.lr_schedule)
        uses = DEFAULTS[self.type]
        for name in ("beta1", "beta2", "epsilon", "momentum", "adam_lr", "adam_weight_decay"):
            if getattr(self, name) is not None and name not in uses:
                raise ConfigError(
                    f"optimizer.{name} is {getattr(self, name)}, for which {self.type} has no use; it has "
                    f"{', '.join(uses)}. Remove it, or choose another optimizer.type."
                )
        check = functools.partial(check_at_least, self, 0, block="optimizer.", fix=". Change it.")
        check("learning_rate", "adam_lr", "weight_decay", "adam_weight_decay", "warmup", below=math.inf)
        check("beta1", "beta2", "epsilon", "momentum", "ema_decay", below=1)
        check("min_lr_ratio", most=1)
        check("max_grad_norm", above=True, fix=". Use null for no clipping.")
        check("decay", above=True, fix=". Use null and lr_schedule: constant for none.")
        if self.decay is not None and self.lr_schedule == "constant":
            raise ConfigError(
                f"optimizer.decay is {self.decay}, for which lr_schedule: constant has no use: the rate stays. Remove "
                "it, or use lr_schedule: linear or wsd."
            )
        for name in ("warmup", "decay"):
            value = getattr(self, name)
            if value is not None and value > 1 and value % 1:
                raise ConfigError(
                    f"optimizer.{name} is {value}; it must be a fraction of the run, up to 1, or a whole number of "
                    f"steps. Use {round(value)}."
                )

    def setting(self, name: str) -> float:
        """Return a setting of the optimizer, its default where it is null."""
        value: float | None = getattr(self, name)
        return DEFAULTS[self.type][name] if value is None else value

    def schedule(self, num_train_steps: int, peak: float | None = None) -> optax.Schedule:
        """Build the learning-rate schedule.

        Args:
            peak: The peak learning rate; None: ``learning_rate``.

        Returns:
            A function from the number of completed steps to the learning rate of the next.

        Raises:
            ConfigError: Warm-up and decay together are longer than the run.
        """
        warmup = _steps(self.warmup, num_train_steps)
        rest = num_train_steps - warmup
        share = SHARES.get(self.lr_schedule) if self.decay is None else self.decay
        decay = rest if share is None else _steps(share, num_train_steps)
        if rest < 0 or decay > rest:
            raise ConfigError(
                f"optimizer.warmup ({warmup} steps) and optimizer.decay ({decay} steps) are longer than "
                f"trainer.num_train_steps = {num_train_steps}. Shorten them or train longer."
            )
        return build_schedule(
            self.lr_schedule,
            peak=self.learning_rate if peak is None else peak,
            min_ratio=self.min_lr_ratio,
            warmup=warmup,
            decay=decay,
            total=num_train_steps,
        )

    def build(self, num_train_steps: int, renewal: ReferenceRenewal | None = None) -> optax.GradientTransformation:
        """Build the optimizer: an optax transformation over a tree of parameters.

        Args:
            renewal: How its state keeps a reference model; None: it has none.
        """
        optimizer = self._muon(num_train_steps) if self.type == "muon" else self._of_all(num_train_steps)
        after = [] if self.ema_decay is None else [average_parameters(self.ema_decay)]
        after += [] if renewal is None else [renewal.transformation()]
        return optax.chain(optimizer, *after) if after else optimizer

    def _muon(self, num_train_steps: int) -> optax.GradientTransformation:
        """Muon for matrices; for the rest AdamW with clipping, weight decay and learning rate of its own."""
        muon = optax.contrib.scale_by_muon(beta=self.setting("momentum"), weight_dimension_numbers=_matrix_axes)
        decay = self.setting("weight_decay")
        adam_decay = decay if self.adam_weight_decay is None else self.adam_weight_decay
        return optax.partition(
            {
                "matrix": optax.chain(muon, *_step(decay, self.schedule(num_train_steps))),
                "other": optax.chain(
                    *self._clipping(),
                    optax.scale_by_adam(**self._adam()),
                    *_step(adam_decay, self.schedule(num_train_steps, self.setting("adam_lr"))),
                ),
            },
            lambda parameters: jax.tree.map(
                lambda parameter: "other" if _matrix(parameter) is None else "matrix", parameters, is_leaf=_named
            ),
        )

    def _of_all(self, num_train_steps: int) -> optax.GradientTransformation:
        """The same optimizer for all parameters."""
        if self.type in ("adam", "adamw"):
            direction = optax.scale_by_adam(**self._adam())
        elif self.type == "lion":
            direction = optax.scale_by_lion(b1=self.setting("beta1"), b2=self.setting("beta2"))
        else:
            # Without optax.adafactor's own decay, which is not scaled by the learning rate.
            direction = _on_arrays(
                optax.chain(
                    optax.scale_by_factored_rms(decay_rate=self.setting("beta2"), epsilon=self.setting("epsilon")),
                    optax.clip_by_block_rms(1.0),
                )
            )
        step = _step(self.setting("weight_decay"), self.schedule(num_train_steps))
        return optax.chain(*self._clipping(), direction, *step)

    def _clipping(self) -> list[optax.GradientTransformation]:
        return [] if self.max_grad_norm is None else [optax.clip_by_global_norm(self.max_grad_norm)]

    def _adam(self) -> dict[str, float]:
        return {"b1": self.setting("beta1"), "b2": self.setting("beta2"), "eps": self.setting("epsilon")}


def decay_mask(parameters: PyTree) -> PyTree:
    """Mark the parameters that weight decay acts on: all but the embedding, norms and biases, as Levanter does."""

    def decays(path: tuple[object, ...], leaf: object) -> bool:
        del leaf
        text = jax.tree_util.keystr(path).lower()
        spared = ("norm", "bias", ".ln_", "embed", "layer_scalar")
        return "unembed" in text or not any(name in text for name in spared)

    return jax.tree_util.tree_map_with_path(decays, parameters)


def completed_updates(opt_state: PyTree) -> Int[Array, ""] | None:
    """Return the number of updates that the schedule of an optimizer has counted; None where it counts none."""
    parts = jax.tree.leaves(opt_state, is_leaf=lambda part: isinstance(part, optax.ScaleByScheduleState))
    return next((part.count for part in parts if isinstance(part, optax.ScaleByScheduleState)), None)


def _step(weight_decay: float, schedule: optax.Schedule) -> list[optax.GradientTransformation]:
    """From a direction to an update."""
    return [optax.add_decayed_weights(weight_decay, decay_mask), optax.scale_by_learning_rate(schedule)]


def _matrix_axes(parameters: PyTree) -> PyTree:
    """Which axes of each array are rows and columns of its matrices, in place of the array."""
    return jax.tree.map(
        lambda parameter: jax.tree.map(lambda _: _matrix(parameter), parameter), parameters, is_leaf=_named
    )


def _matrix(parameter: Any) -> optax.contrib.MuonDimensionNumbers | None:
    """Rows and columns of the matrices that a parameter of the layers stacks; None where it has none.

    A matrix maps from ``embed`` to other axes, or from them to ``embed``, which is how `lockstep.models.weights` orders
    them; the factors of an adapter map to the rank and from it. The matrices of the embedding and of the output layer
    map from or to tokens and are left to AdamW. Each expert has matrices of its own.
    """
    names = [axis.name for axis in parameter.axes] if _named(parameter) else []
    stacked = ("layer", "expert") if names[-1:] != ["expert"] else ("layer",)
    inner = [index for index, name in enumerate(names) if name not in stacked]
    if len(inner) < 2 or "vocab" in names:
        return None
    if names[inner[0]] in ("embed", RANK) and names[inner[-1]] != RANK:
        return optax.contrib.MuonDimensionNumbers(reduction_axis=inner[:1], output_axis=inner[1:])
    if names[inner[-1]] in ("embed", RANK):
        return optax.contrib.MuonDimensionNumbers(reduction_axis=inner[:-1], output_axis=inner[-1:])
    return None


def _named(leaf: Any) -> bool:
    return isinstance(leaf, hax.NamedArray)


def _on_arrays(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """A transformation whose state has plain arrays by name: its shapes are not those of the parameters' axes."""

    def arrays(tree: PyTree) -> dict[str, Array]:
        leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
        return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}

    def init(parameters: PyTree) -> PyTree:
        return inner.init(arrays(parameters))

    def update(updates: PyTree, state: PyTree, parameters: PyTree | None = None) -> tuple[PyTree, PyTree]:
        named = arrays(updates)
        new, state = inner.update(named, state, None if parameters is None else arrays(parameters))
        return jax.tree.unflatten(jax.tree.structure(updates), [new[name] for name in named]), state

    return optax.GradientTransformation(init, update)


def _steps(length: float, num_train_steps: int) -> int:
    """Return a length in steps: up to 1 it is a fraction of the run, as in Levanter."""
    return int(length * num_train_steps) if length <= 1 else int(length)
