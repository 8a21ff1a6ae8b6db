"""How a decoder-only transformer departs from Llama: data for the trained model and the decoder alike."""

import dataclasses
from typing import Literal, get_args

from lockstep.errors import ConfigError

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "xielu"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """Departures from Llama; each at its default costs nothing.

    Raises:
        ConfigError: a value that cannot work.
    """

    activation: Activation = "silu"
    """Of the gated MLP: ``gelu_tanh`` is the approximate GELU of Gemma. ``xielu`` (https://arxiv.org/abs/2411.13010,
    Apertus) has parameters in each layer, and no gate."""
    pre_norm: bool = True
    """An RMSNorm before attention and MLP. OLMo 2 has none."""
    post_norm: bool = False
    """An RMSNorm after attention and MLP, before they are added to the stream: OLMo 2, Gemma 2 and 3."""
    norm_plus_one: bool = False
    """RMSNorm multiplies by 1 + weight, in float32 (Gemma)."""
    wide_qk_norm: bool = False
    """``qk_norm`` is over all heads together (OLMo 2), not over each head."""
    embed_norm: bool = False
    """An RMSNorm after the embedding."""
    embed_scale: float | None = None
    """The embedding is multiplied by this; Gemma: the square root of ``hidden_dim``. Null for 1."""
    attention_scale: float | None = None
    """Attention scores are multiplied by this; null: ``head_dim ** -0.5``."""
    attention_soft_cap: float | None = None
    """Attention scores s become ``cap * tanh(s / cap)`` (Gemma 2). Null for none."""
    logit_soft_cap: float | None = None
    """The same for the logits of the output layer."""
    sliding_window: int | None = None
    """Positions that a query sees, its own among them. Null for all."""

    def __post_init__(self) -> None:
        for name in ("embed_scale", "attention_scale", "attention_soft_cap", "logit_soft_cap", "sliding_window"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"variant.{name} is {value}; it must be more than 0. Use null for none.")
        if not (self.pre_norm or self.post_norm):
            raise ConfigError(
                "variant.pre_norm and variant.post_norm are both false; attention and MLP need a norm before or after "
                "them. Set one of them to true."
            )
        known = get_args(Activation)
        if self.activation not in known:
            raise ConfigError(f"variant.activation is {self.activation!r}; it must be one of {', '.join(known)}.")

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate."""
        return self.activation != "xielu"
