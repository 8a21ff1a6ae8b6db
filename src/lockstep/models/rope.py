"""Rotary position embeddings: their configuration, frequencies, and spelling in Hugging Face's ``config.json``."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float

from lockstep.config_fields import check_fields
from lockstep.errors import ConfigError, check_at_least


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Rotary frequency scaling of Llama 3.1 ("llama3" in Hugging Face): low frequencies are lowered, high ones kept.

    Source: ``transformers/modeling_rope_utils.py``, ``_compute_llama3_parameters``.

    Example:
        >>> lockstep.models.Llama3Scaling(factor=32.0).original_max_position_embeddings
        8192
    """

    factor: float = 8.0
    """The divisor of low frequencies; at least 1."""
    low_freq_factor: float = 1.0
    """Wavelengths above ``original_max_position_embeddings / low_freq_factor`` tokens are scaled in full."""
    high_freq_factor: float = 4.0
    """Wavelengths below ``original_max_position_embeddings / high_freq_factor`` tokens are not scaled."""
    original_max_position_embeddings: int = 8192
    """The context length in tokens before it was extended."""

    def __post_init__(self) -> None:
        check_fields(self, "rope.scaling.")
        fixes = {
            "factor": "Llama 3.1 uses 8, Llama 3.2 uses 32",
            "original_max_position_embeddings": "Llama 3 uses 8192",
        }
        for name, fix in fixes.items():
            check_at_least(self, 1, name, block="rope.scaling.", fix=f". {fix}.")
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ConfigError(
                f"rope.scaling.low_freq_factor is {self.low_freq_factor} and rope.scaling.high_freq_factor is "
                f"{self.high_freq_factor}; it must hold that 0 < low_freq_factor < high_freq_factor. Llama 3 uses 1 "
                "and 4."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """Rotary frequency scaling of YaRN (Peng et al. 2023, https://arxiv.org/abs/2309.00071, section 3.4), of gpt-oss.

    Pairs that turn more than ``beta_fast`` times within the original context are kept, those that turn less than
    ``beta_slow`` times are slowed by ``factor``, and those between are blended.

    Example:
        >>> round(lockstep.models.YarnScaling(factor=32.0).amplitude, 4)
        1.3466
    """

    factor: float = 32.0
    """The divisor of low frequencies; at least 1."""
    beta_fast: float = 32.0
    """The turns above which a pair is kept."""
    beta_slow: float = 1.0
    """The turns below which a pair is slowed in full."""
    truncate: bool = True
    """Whether the two bounds are rounded to whole pairs, outwards; gpt-oss does not."""
    original_max_position_embeddings: int = 4096
    """The context length in tokens before it was extended."""
    attention_factor: float | None = None
    """The factor of rotated queries, and of rotated keys. Null for ``0.1 ln(factor) + 1`` (the paper's equation 22)."""
    llama_4_scaling_beta: float | None = None
    """Beta of the factor of queries that grows with their position (Ministral 3), see `query_factor`. Null for 1."""

    def __post_init__(self) -> None:
        check_fields(self, "rope.yarn.")
        check_at_least(self, 1, "factor", block="rope.yarn.", fix=". gpt-oss uses 32.")
        check_at_least(self, 1, "original_max_position_embeddings", block="rope.yarn.", fix=". gpt-oss uses 4096.")
        if not 0 < self.beta_slow < self.beta_fast:
            raise ConfigError(
                f"rope.yarn.beta_slow is {self.beta_slow} and rope.yarn.beta_fast is {self.beta_fast}; it must hold "
                "that 0 < beta_slow < beta_fast. gpt-oss uses 1 and 32."
            )
        if self.attention_factor is not None and not 0 < self.attention_factor < math.inf:
            raise ConfigError(
                f"rope.yarn.attention_factor is {self.attention_factor}; it must be finite and more than 0. Use null "
                "for the paper's."
            )
        if self.llama_4_scaling_beta is not None and not 0 < self.llama_4_scaling_beta < math.inf:
            raise ConfigError(
                f"rope.yarn.llama_4_scaling_beta is {self.llama_4_scaling_beta}; it must be finite and more than 0. "
                "Ministral 3 uses 0.1; use null for none."
            )

    @property
    def amplitude(self) -> float:
        """The factor of rotated queries, and of rotated keys."""
        return _amplitude(self.factor) if self.attention_factor is None else self.attention_factor

    def scale(self, frequencies: Float[np.ndarray, " half_head"], theta: float) -> Float[np.ndarray, " half_head"]:
        """The scaled frequencies.

        Args:
            frequencies: The frequencies of a model that is not scaled, in radians per token.
            theta: The base of the wavelengths.
        """
        pairs = len(frequencies)

        def pair(turns: float) -> float:
            """The pair, with a fraction, that turns so often within the original context."""
            wavelength = self.original_max_position_embeddings / turns
            return pairs * math.log(wavelength / (2 * math.pi)) / math.log(theta)

        first, last = pair(self.beta_fast), pair(self.beta_slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * pairs - 1)
        last += 0.001 * (first == last)
        slowed = np.clip((np.arange(pairs, dtype=np.float32) - np.float32(first)) / np.float32(last - first), 0, 1)
        return (frequencies / np.float32(self.factor) * slowed + frequencies * (1 - slowed)).astype(np.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RotaryConfig:
    """Rotary position embeddings (Su et al. 2021, https://arxiv.org/abs/2104.09864), half-split as in Hugging Face.

    Example:
        >>> lockstep.models.RotaryConfig(theta=500000.0, scaling=lockstep.models.Llama3Scaling()).theta
        500000.0
    """

    theta: float = 10000.0
    """The base of the wavelengths."""
    scaling: Llama3Scaling | None = None
    """The frequency scaling of Llama 3.1. Null for none."""
    yarn: YarnScaling | None = None
    """The frequency scaling of YaRN. Null for none."""
    linear_factor: float = 1.0
    """The divisor of positions, "linear" scaling in Hugging Face; at least 1. Gemma 3 has 8 in its larger models.
    Infinity: no positions, as in layers without rotary embeddings (Snowball)."""
    partial_rotary_factor: float = 1.0
    """The part of each head that is rotated, from its first element on; the rest has no position (Phi-4-mini: 0.75)."""

    def __post_init__(self) -> None:
        check_fields(self, "rope.")
        check_at_least(self, 1, "linear_factor", block="rope.", fix=". Use 1 for none.")
        if not 0 < self.partial_rotary_factor <= 1:
            raise ConfigError(
                f"rope.partial_rotary_factor is {self.partial_rotary_factor}; it must be more than 0 and at most 1, "
                "which rotates whole heads."
            )
        if self.scaling is not None and self.linear_factor != 1:
            raise ConfigError(
                f"rope.linear_factor is {self.linear_factor} and rope.scaling is set; no model has both. Set "
                "linear_factor to 1, or scaling to null."
            )
        if self.yarn is not None and (self.scaling is not None or self.linear_factor != 1):
            raise ConfigError(
                "rope.yarn is set, and rope.scaling or rope.linear_factor too; no model has both. Set scaling to null "
                "and linear_factor to 1, or yarn to null."
            )
        if self.yarn is not None and self.partial_rotary_factor != 1:
            raise ConfigError(
                f"rope.yarn is set and rope.partial_rotary_factor is {self.partial_rotary_factor}; YaRN scales the "
                "scores of whole heads here. Set partial_rotary_factor to 1, or yarn to null."
            )
        if not (self.theta > 1 and math.isfinite(self.theta)):
            raise ConfigError(
                f"rope.theta is {self.theta}; it must be finite and greater than 1. Llama 2 uses 10000, Llama 3 500000."
            )

    @property
    def score_factor(self) -> float:
        """The factor of attention scores that comes with the scaling."""
        return 1.0 if self.yarn is None else self.yarn.amplitude**2

    def query_factors(self, positions: int) -> tuple[Float[np.ndarray, " entry"], int]:
        """The factors of queries by their position, and the number of positions that each of them has."""
        yarn = self.yarn
        if yarn is None or yarn.llama_4_scaling_beta is None:
            return np.ones(1), positions
        context = yarn.original_max_position_embeddings
        return query_factor(np.arange(0, positions, context) // context, yarn.llama_4_scaling_beta), context

    def rotated(self, head_size: int) -> int:
        """The number of elements of a head that are rotated, in pairs."""
        return int(head_size * self.partial_rotary_factor)

    def frequencies(self, head_size: int) -> Float[np.ndarray, " half_head"]:
        """Radians per token of each pair of elements of a head, float32 ``[rotated // 2]``.

        Pair ``i`` is elements ``i`` and ``i + rotated // 2`` (Hugging Face's ``rotate_half``). RoFormer (Su et al.
        2021, https://arxiv.org/abs/2104.09864, section 3.2.2), computed in float32 in the order of Hugging Face's code,
        so that long contexts do not drift from the reference.
        """
        size, scaling = self.rotated(head_size), self.scaling
        exponents = np.arange(0, size, 2, dtype=np.float32) / np.float32(size)
        frequencies = np.float32(1.0) / np.float32(self.theta) ** exponents
        if self.yarn is not None:
            return self.yarn.scale(frequencies, self.theta)
        if scaling is None:
            return frequencies / np.float32(self.linear_factor)
        context = scaling.original_max_position_embeddings
        wavelengths = 2 * math.pi / frequencies
        smooth = context / wavelengths - scaling.low_freq_factor
        smooth = np.clip(smooth / (scaling.high_freq_factor - scaling.low_freq_factor), 0.0, 1.0)
        return ((1 - smooth) * frequencies / scaling.factor + smooth * frequencies).astype(np.float32)


def query_factor(contexts: Any, beta: Any, log: Any = np.log) -> Any:
    """The factor of a query that comes after so many original contexts: ``1 + beta ln(1 + contexts)``.

    Source: ``transformers/models/ministral3/modeling_ministral3.py``, ``get_llama_4_attn_scale``.
    """
    return 1 + beta * log(1 + contexts)


def rope_from_hf(hf: Mapping[str, Any]) -> RotaryConfig:
    """The rotary embeddings of a ``config.json``, in either spelling: ``rope_parameters`` is that of transformers 5.

    Where a file has both, ``rope_scaling`` counts, as in transformers 5, unless ``rope_parameters`` contradicts it.
    Source: ``transformers/modeling_rope_utils.py``, ``convert_rope_params_to_dict`` and ``standardize_rope_params``.

    Args:
        hf: The parsed file, or a mapping with the keys of one kind of its layers.

    Raises:
        ConfigError: They are of a type that lockstep does not compute, they contradict each other, or a key is missing.
    """
    scaling, parameters = hf.get("rope_scaling") or {}, hf.get("rope_parameters") or {}
    rope = _rotary(scaling or parameters, hf)
    if scaling and parameters:
        from_parameters = _rotary(parameters, hf)
        plain = RotaryConfig(theta=rope.theta, partial_rotary_factor=rope.partial_rotary_factor)
        if from_parameters not in (rope, plain):
            raise ConfigError(
                f"the checkpoint's config.json has rope_scaling {scaling} and rope_parameters {parameters}, which "
                f"contradict each other: transformers would take rope_scaling, with rope_theta {rope.theta:g}. Keep "
                "one of them, with rope_theta in it."
            )
    return rope


def _rotary(parameters: Mapping[str, Any], hf: Mapping[str, Any]) -> RotaryConfig:
    """The rotary embeddings of one of the two spellings."""
    kind = _rope_type(parameters)
    parts = {place["partial_rotary_factor"] for place in (parameters, hf) if place.get("partial_rotary_factor")}
    if len(parts) > 1:
        raise ConfigError(
            f"the checkpoint's config.json has two values of partial_rotary_factor, {min(parts)} and {max(parts)}, one "
            "beside the rotary settings and one in them. Keep the right one."
        )
    common: dict[str, Any] = {
        "theta": required(parameters if "rope_theta" in parameters else {"rope_theta": 10000.0, **hf}, "rope_theta"),
        "partial_rotary_factor": max(parts, default=1.0),
    }
    if kind == "default":
        return RotaryConfig(**common)
    if kind == "linear":
        return RotaryConfig(**common, linear_factor=required(parameters, "factor"))
    if kind == "yarn":
        return RotaryConfig(**common, yarn=_yarn_from_hf(parameters, hf))
    if kind != "llama3":
        # longrope scales the angles' cosines and sines at any length.
        remove = (
            ""
            if kind in ("longrope", "su")
            else (
                ", or remove rope_scaling from its config.json where the model is used only up to its original context "
                "length"
            )
        )
        raise ConfigError(
            f"the checkpoint has rope type {kind!r}; lockstep computes 'default', 'linear', 'llama3' and 'yarn'. "
            f"Choose another checkpoint{remove}."
        )
    factors = {key: required(parameters, key) for key in ("factor", "low_freq_factor", "high_freq_factor")}
    context = _original_context(parameters, hf)
    return RotaryConfig(**common, scaling=Llama3Scaling(**factors, original_max_position_embeddings=context))


def _rope_type(parameters: Mapping[str, Any]) -> str:
    """The type of rotary settings, whose key has two names."""
    nested = [key for key, value in parameters.items() if isinstance(value, Mapping)]
    if nested:
        raise ConfigError(
            f"the checkpoint's rotary settings have {', '.join(nested)}, settings of each kind of layers, which "
            "lockstep computes in gemma3 only. Choose another checkpoint."
        )
    kinds = [parameters[key] for key in ("rope_type", "type") if key in parameters]
    if len(set(kinds)) > 1:
        raise ConfigError(
            f"the checkpoint's rotary settings have rope_type {kinds[0]!r} and type {kinds[1]!r}, which contradict "
            "each other. Keep one of them in its config.json."
        )
    if not kinds and parameters.get("factor") is not None:
        raise ConfigError(
            f"the checkpoint's rotary settings have factor {parameters['factor']!r} and no rope_type, so that "
            "transformers would not use it. Add rope_type to its config.json, or remove factor."
        )
    return str(kinds[0]) if kinds else "default"


def _original_context(parameters: Mapping[str, Any], hf: Mapping[str, Any]) -> int:
    """The context length before it was extended; that beside the rotary settings counts more, as in transformers 5."""
    key = "original_max_position_embeddings"
    place = hf if key in hf else parameters
    return int(required(place, key) if key in place else required(hf, "max_position_embeddings"))


def _yarn_from_hf(parameters: Mapping[str, Any], hf: Mapping[str, Any]) -> YarnScaling:
    context, factor = _original_context(parameters, hf), parameters.get("factor")
    if factor is None and "factor" in parameters:
        factor = required(hf, "max_position_embeddings") / context
    stated, scale, divisor = (parameters.get(key) for key in ("attention_factor", "mscale", "mscale_all_dim"))
    yarn = YarnScaling(
        factor=required({**parameters, "factor": factor}, "factor"),
        beta_fast=parameters.get("beta_fast") or 32.0,
        beta_slow=parameters.get("beta_slow") or 1.0,
        truncate=bool(parameters.get("truncate", True)),
        original_max_position_embeddings=context,
        attention_factor=stated,
    )
    if stated is None and scale and divisor:  # of DeepSeek
        ratio = _amplitude(yarn.factor, scale) / _amplitude(yarn.factor, divisor)
        yarn = dataclasses.replace(yarn, attention_factor=ratio)
    one_spelling = dataclasses.replace(yarn, attention_factor=None)
    return one_spelling if math.isclose(yarn.amplitude, one_spelling.amplitude, rel_tol=1e-6) else yarn


def _amplitude(factor: float, scale: float = 1.0) -> float:
    return 0.1 * scale * math.log(factor) + 1.0


def rope_to_hf(rope: RotaryConfig) -> dict[str, Any] | None:
    """The ``rope_scaling`` of a ``config.json``; None for none."""
    if rope.linear_factor != 1:
        return {"rope_type": "linear", "factor": rope.linear_factor}
    if rope.yarn is not None:
        stated = {key: value for key, value in dataclasses.asdict(rope.yarn).items() if value is not None}
        return {"rope_type": "yarn", **stated}
    if rope.scaling is None:
        return None
    return {"rope_type": "llama3", **dataclasses.asdict(rope.scaling)}


def required(hf: Mapping[str, Any], key: str) -> Any:
    """The value of a key of ``config.json``.

    Raises:
        ConfigError: There is none, or it is null.
    """
    if hf.get(key) is None:
        state = f"{key}: null" if key in hf else f"no {key}"
        raise ConfigError(
            f"the checkpoint's config.json has {state}; lockstep needs it. Found keys: {', '.join(sorted(hf))}. Save "
            "the checkpoint again with a recent version of transformers, or add the key."
        )
    return hf[key]
