"""AdamW with a learning-rate schedule, from a configuration."""

import dataclasses
from typing import Literal

import jax
import optax
from jaxtyping import PyTree

from lockstep.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW (Loshchilov & Hutter 2019, arXiv 1711.05101) with gradient clipping and a schedule.

    Raises:
        ConfigError: A value is out of its range.
    """

    learning_rate: float = 6e-4
    """Peak learning rate."""
    weight_decay: float = 0.1
    """Decoupled weight decay; norms and biases are not decayed."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.95
    """Decay of the second moment."""
    epsilon: float = 1e-8
    """Added to the root of the second moment."""
    max_grad_norm: float | None = 1.0
    """Gradients are scaled down to this global norm; null for no clipping."""
    warmup: float = 0.01
    """Linear warm-up from 0: a fraction of the run below 1, a number of steps from 1 on."""
    decay: float | None = None
    """Length of the final decay: a fraction below 1, steps from 1 on; null for everything after the warm-up."""
    lr_schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape of the decay."""
    min_lr_ratio: float = 0.1
    """Learning rate at the end, as a fraction of the peak; ``constant`` has no use for it."""

    def __post_init__(self) -> None:
        for name, low, high in (
            ("learning_rate", 0.0, float("inf")),
            ("weight_decay", 0.0, float("inf")),
            ("beta1", 0.0, 1.0),
            ("beta2", 0.0, 1.0),
            ("epsilon", 0.0, 1.0),
            ("warmup", 0.0, float("inf")),
            ("min_lr_ratio", 0.0, 1.00001),
        ):
            value = getattr(self, name)
            if not low <= value < high:
                raise ConfigError(
                    f"optimizer.{name} is {value}; it must be at least {low:g} and less than {high:g}. Change it."
                )
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise ConfigError(
                f"optimizer.max_grad_norm is {self.max_grad_norm}; it must be above 0. Use null for no clipping."
            )
        if self.decay is not None and not self.decay > 0:
            raise ConfigError(
                f"optimizer.decay is {self.decay}; it must be above 0. Use lr_schedule: constant for none."
            )

    def schedule(self, num_train_steps: int) -> optax.Schedule:
        """Build the learning-rate schedule.

        Args:
            num_train_steps: The number of steps of the whole run.

        Returns:
            A function from the number of completed steps to the learning rate of the next.

        Raises:
            ConfigError: Warm-up and decay together are longer than the run.
        """
        warmup = _steps(self.warmup, num_train_steps)
        rest = num_train_steps - warmup
        decay = rest if self.decay is None else _steps(self.decay, num_train_steps)
        if rest < 0 or decay > rest:
            raise ConfigError(
                f"optimizer.warmup ({warmup} steps) and optimizer.decay ({decay} steps) are longer than "
                f"trainer.num_train_steps = {num_train_steps}. Shorten them or train longer."
            )
        peak, last = self.learning_rate, self.learning_rate * self.min_lr_ratio
        if self.lr_schedule == "constant" or decay == 0:
            falling = optax.constant_schedule(peak)
        elif self.lr_schedule == "linear":
            falling = optax.linear_schedule(peak, last, decay)
        else:
            falling = optax.cosine_decay_schedule(peak, decay, self.min_lr_ratio)
        # Step 0 of a warm-up from exactly 0 would be wasted: it starts one step in.
        rising = optax.linear_schedule(peak / (warmup + 1), peak, max(warmup, 1))
        return optax.join_schedules([rising, optax.constant_schedule(peak), falling], [warmup, num_train_steps - decay])

    def build(self, num_train_steps: int) -> optax.GradientTransformation:
        """Build the optimizer.

        Args:
            num_train_steps: The number of steps of the whole run.

        Returns:
            An optax transformation over a tree of parameters.

        Raises:
            ConfigError: Warm-up and decay together are longer than the run.
        """
        adamw = optax.adamw(
            self.schedule(num_train_steps),
            b1=self.beta1,
            b2=self.beta2,
            eps=self.epsilon,
            weight_decay=self.weight_decay,
            mask=decay_mask,
        )
        if self.max_grad_norm is None:
            return adamw
        return optax.chain(optax.clip_by_global_norm(self.max_grad_norm), adamw)


def decay_mask(parameters: PyTree) -> PyTree:
    """Mark the parameters that weight decay acts on: all but those whose path names a norm or a bias.

    Args:
        parameters: The model's parameters.

    Returns:
        The same tree with a bool for every leaf.
    """

    def decays(path: tuple[object, ...], leaf: object) -> bool:
        del leaf
        text = jax.tree_util.keystr(path).lower()
        return "norm" not in text and "bias" not in text and ".ln_" not in text

    return jax.tree_util.tree_map_with_path(decays, parameters)


def _steps(length: float, num_train_steps: int) -> int:
    """Return a length in steps: below 1 it is a fraction of the run."""
    return int(length * num_train_steps) if length < 1 else int(length)
