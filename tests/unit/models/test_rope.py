"""Frequencies of rotary embeddings."""

from typing import Any

import numpy as np
import pytest

from lockstep.errors import ConfigError
from lockstep.models import Llama3Scaling, LlamaConfig, RotaryConfig, Variant, YarnScaling, rotary_frequencies
from lockstep.models.rope import rope_from_hf, rope_to_hf

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


YARN_OF_TRANSFORMERS = {  # transformers 5.12.1, ROPE_INIT_FUNCTIONS["yarn"], theta 150000
    YarnScaling(truncate=False): (
        64, {0: 1, 8: 0.05081327, 9: 0.0317057, 17: 1.293187e-4, 31: 3.023511e-7}, 1.34657359,
    ),
    YarnScaling(factor=4.0, original_max_position_embeddings=2048): (
        64, {6: 0.1070244, 7: 0.06821372, 16: 6.454972e-4, 17: 4.447762e-4, 31: 2.418809e-6}, 1.138629436,
    ),
    YarnScaling(factor=8.0, beta_fast=4.0, original_max_position_embeddings=64): (
        16, {0: 1, 1: 0.1267976, 2: 0.006351659, 3: 0.001431778, 7: 3.696836e-6}, 1.207944154,
    ),
}  # fmt: skip


@pytest.mark.parametrize("yarn", YARN_OF_TRANSFORMERS, ids=lambda yarn: f"factor{yarn.factor:g}")
def test_yarn_is_that_of_transformers(yarn: YarnScaling) -> None:
    size, some, factor = YARN_OF_TRANSFORMERS[yarn]
    rope = RotaryConfig(theta=150000.0, yarn=yarn)
    frequencies = rope.frequencies(size)
    assert frequencies.dtype == np.float32
    np.testing.assert_allclose([frequencies[pair] for pair in some], list(some.values()), rtol=1e-6)
    assert yarn.amplitude == pytest.approx(factor, rel=1e-8)
    config = LlamaConfig(**SMALL, rope=rope, variant=Variant(attention_scale=0.5))
    assert config.attention_scale == pytest.approx(0.5 * factor**2, rel=1e-8)
    written = rope_to_hf(rope)
    assert rope_from_hf({"rope_theta": 150000.0, "rope_scaling": written}) == rope


def test_the_factor_of_queries_grows_with_every_original_context() -> None:
    yarn = YarnScaling(original_max_position_embeddings=16, llama_4_scaling_beta=0.1)
    table, count = RotaryConfig(yarn=yarn).query_factors(40)
    assert count == 16
    np.testing.assert_allclose(table, 1 + 0.1 * np.log([1, 2, 3]))
    table, count = RotaryConfig().query_factors(40)
    assert (table.tolist(), count) == ([1.0], 40)


def test_yarn_that_cannot_be_computed_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"rope\.yarn\.beta_slow is 32\.0 and rope\.yarn\.beta_fast is 32\.0"):
        YarnScaling(beta_slow=32.0)
    with pytest.raises(ConfigError, match=r"rope\.yarn\.factor is 0\.5; it must be at least 1"):
        YarnScaling(factor=0.5)
    with pytest.raises(ConfigError, match=r"rope\.yarn\.original_max_position_embeddings is 0"):
        YarnScaling(original_max_position_embeddings=0)
    with pytest.raises(ConfigError, match=r"rope\.yarn is set, and rope\.scaling or rope\.linear_factor too"):
        RotaryConfig(yarn=YarnScaling(), linear_factor=2.0)
    with pytest.raises(ConfigError, match=r"rope\.yarn is set and rope\.partial_rotary_factor is 0\.5"):
        RotaryConfig(yarn=YarnScaling(), partial_rotary_factor=0.5)
    with pytest.raises(ConfigError, match=r"rope\.yarn\.attention_factor is 0\.0; it must be finite and more than 0"):
        YarnScaling(attention_factor=0.0)
    with pytest.raises(ConfigError, match=r"rope\.yarn\.llama_4_scaling_beta is 0\.0; it must be finite and more than"):
        YarnScaling(llama_4_scaling_beta=0.0)


def test_yarn_has_the_attention_factor_of_the_file() -> None:
    hf = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    plain = rope_from_hf({"rope_parameters": hf})
    assert rope_from_hf({"rope_parameters": {**hf, "mscale": 0.5}}) == plain  # only both count
    assert rope_from_hf({"rope_parameters": {**hf, "attention_factor": plain.yarn.amplitude}}) == plain
    stated = rope_from_hf({"rope_parameters": {**hf, "attention_factor": 2.0, "mscale": 1.0, "mscale_all_dim": 2.0}})
    assert stated.score_factor == 4.0
    scaled = rope_from_hf({"rope_parameters": {**hf, "mscale": 1.0, "mscale_all_dim": 0.5}})
    assert scaled.score_factor == pytest.approx(((0.1 * np.log(4) + 1) / (0.05 * np.log(4) + 1)) ** 2)
    for rope in (stated, scaled):
        assert rope_from_hf({"rope_theta": 1e4, "rope_scaling": rope_to_hf(rope)}) == rope


@pytest.mark.parametrize(
    ("hf", "text"),
    [
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_theta": 500.0}},
            r"rope_scaling .*'linear'.* and rope_parameters .*500\.0.*contradict each other: .*rope_theta 10000\.",
        ),
        (
            {"rope_scaling": {"type": "linear", "rope_type": "yarn"}},
            r"rope_type 'yarn' and type 'linear', .*contradict",
        ),
        ({"rope_scaling": {"factor": 2.0}}, r"factor 2\.0 and no rope_type, .*would not use it"),
        ({"rope_parameters": {"full_attention": {}}}, r"have full_attention, settings of each kind .*gemma3 only"),
        ({"rope_theta": None}, r"has rope_theta: null; lockstep needs it"),
        ({"rope_theta": 9.0, "rope_parameters": {"rope_theta": None}}, r"has rope_theta: null; lockstep needs it"),
        (
            {"partial_rotary_factor": 0.5, "rope_parameters": {"partial_rotary_factor": 0.25}},
            r"two values of partial_rotary_factor, 0\.25 and 0\.5",
        ),
    ],
)
def test_rotary_settings_that_contradict_each_other_are_refused_by_key(hf: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        rope_from_hf(hf)
