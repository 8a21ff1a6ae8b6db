"""Frequencies of rotary embeddings."""

from typing import Any

import numpy as np
import pytest

from lockstep.errors import ConfigError
from lockstep.models import Llama3Scaling, LlamaConfig, RotaryConfig, rotary_frequencies

SMALL: dict[str, Any] = {"hidden_dim": 32, "num_heads": 4, "num_kv_heads": 2}


def test_rotary_values_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"rope\.theta is 1\.0; .*greater than 1"):
        RotaryConfig(theta=1.0)
    with pytest.raises(ConfigError, match=r"rope\.scaling\.factor is 0\.5; it must be at least 1"):
        Llama3Scaling(factor=0.5)
    with pytest.raises(ConfigError, match=r"low_freq_factor is 4 and .*high_freq_factor is 1"):
        Llama3Scaling(low_freq_factor=4, high_freq_factor=1)
    with pytest.raises(ConfigError, match=r"original_max_position_embeddings is 0"):
        Llama3Scaling(original_max_position_embeddings=0)


def test_rotary_frequencies_fall_by_powers_of_theta() -> None:
    frequencies = rotary_frequencies(LlamaConfig(**SMALL, rope=RotaryConfig(theta=16.0)))
    assert frequencies.dtype == np.float32
    np.testing.assert_allclose(frequencies, [1, 1 / 2, 1 / 4, 1 / 8], rtol=1e-6)


def test_llama3_scaling_slows_long_waves_and_keeps_short_ones() -> None:
    # Waves of 2 pi * 4**i tokens: 6.3, 25, 101, 402; the original context is 64, so the bands end at 16 and 64 tokens.
    scaling = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
    base = rotary_frequencies(LlamaConfig(**SMALL, rope=RotaryConfig(theta=256.0)))
    scaled = rotary_frequencies(LlamaConfig(**SMALL, rope=RotaryConfig(theta=256.0, scaling=scaling)))
    assert scaled.dtype == np.float32
    smooth = (64 / (2 * np.pi * 4) - 1) / 3
    expected = [1, smooth + (1 - smooth) / 8, 1 / 8, 1 / 8]
    np.testing.assert_allclose(scaled / base, expected, rtol=1e-6)


def test_linear_scaling_divides_positions_and_excludes_the_other() -> None:
    base = rotary_frequencies(LlamaConfig(**SMALL))
    scaled = rotary_frequencies(LlamaConfig(**SMALL, rope=RotaryConfig(linear_factor=8.0)))
    np.testing.assert_array_equal(scaled, base / 8)
    with pytest.raises(ConfigError, match=r"rope\.linear_factor is 0\.5; it must be at least 1"):
        RotaryConfig(linear_factor=0.5)
    with pytest.raises(ConfigError, match=r"rope\.linear_factor is 2\.0 and rope\.scaling is set"):
        RotaryConfig(linear_factor=2.0, scaling=Llama3Scaling())


def test_a_part_of_a_head_has_the_frequencies_of_a_head_of_its_size() -> None:
    part = RotaryConfig(theta=16.0, partial_rotary_factor=0.75)
    assert part.rotated(16) == 12
    np.testing.assert_array_equal(part.frequencies(16), RotaryConfig(theta=16.0).frequencies(12))
    with pytest.raises(ConfigError, match=r"partial_rotary_factor is 1\.5; .*at most 1"):
        RotaryConfig(partial_rotary_factor=1.5)
    with pytest.raises(ConfigError, match=r"partial_rotary_factor 0\.4 of a head of 8 elements rotates 3; .*pairs"):
        LlamaConfig(**SMALL, rope=RotaryConfig(partial_rotary_factor=0.4))
