import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from lockstep.errors import ConfigError
from lockstep.models import (
    Llama3Scaling,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    RotaryConfig,
    config_from_hf,
    config_to_hf,
    load_config,
)

GOLDEN = Path(__file__).parents[3] / "golden"
SIZES: dict[str, Any] = {
    "max_seq_len": 128,
    "hidden_dim": 64,
    "intermediate_dim": 40,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
}
BANDS = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
FAMILIES = {
    "llama3": LlamaConfig(**SIZES, layer_norm_epsilon=1e-5, rope=RotaryConfig(scaling=BANDS)),
    "llama_tied": LlamaConfig(**{**SIZES, "num_layers": 3}, layer_norm_epsilon=1e-6, tie_word_embeddings=True),
    "mistral": MistralConfig(**SIZES, head_dim=8, layer_norm_epsilon=1e-6),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=24),
}


def hf(family: str, **changes: Any) -> dict[str, Any]:
    return {**json.loads((GOLDEN / family / "config.json").read_text()), **changes}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_read(family: str) -> None:
    assert load_config(str(GOLDEN / family)) == FAMILIES[family]


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_written_reads_back(family: str) -> None:
    config = FAMILIES[family]
    back = config_from_hf(json.loads(json.dumps(config_to_hf(config, 112))))
    assert type(back) is type(config)
    assert config_to_hf(back, 112) == config_to_hf(config, 112)


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_reads_what_is_written_as_its_own(family: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_to_hf(FAMILIES[family], 112)))
    ours = transformers.AutoConfig.from_pretrained(tmp_path).to_dict()
    theirs = transformers.AutoConfig.from_pretrained(GOLDEN / family).to_dict()
    # Special tokens and dtype belong to the checkpoint, which save_hf writes; Qwen2 takes a head_dim but writes none.
    skip = ("_name_or_path", "dtype", "bos_token_id", "eos_token_id", "pad_token_id")
    for key in (*skip, "head_dim") if family == "qwen2" else skip:
        ours.pop(key, None), theirs.pop(key, None)
    assert ours == theirs


def test_old_and_new_spelling_of_the_rotary_settings_are_the_same() -> None:
    new = hf("llama3")
    old = dict(new)
    parameters = dict(old.pop("rope_parameters"))
    old["rope_theta"] = parameters.pop("rope_theta")
    parameters["type"] = parameters.pop("rope_type")
    old["rope_scaling"] = parameters
    assert config_from_hf(old) == config_from_hf(new) == FAMILIES["llama3"]
    assert config_from_hf({**old, "rope_scaling": None, "rope_theta": 5e5}).rope == RotaryConfig(theta=5e5)


def test_linear_scaling_is_kept(tmp_path: Path) -> None:
    config = dataclasses.replace(FAMILIES["qwen3"], rope=RotaryConfig(theta=5e5, linear_factor=4.0))
    written = config_to_hf(config, 112)
    assert config_from_hf(written) == config
    (tmp_path / "config.json").write_text(json.dumps(written))
    parameters = transformers.AutoConfig.from_pretrained(tmp_path).rope_parameters
    assert (parameters["rope_type"], parameters["factor"], parameters["rope_theta"]) == ("linear", 4.0, 5e5)


def test_the_first_llama_has_no_number_of_key_value_heads() -> None:
    assert config_from_hf(hf("llama3", num_key_value_heads=None)).num_kv_heads == 4


def test_a_sliding_window_below_the_sequence_length_is_refused_with_the_fix() -> None:
    windowed = hf("mistral", sliding_window=64)
    with pytest.raises(
        ConfigError, match=r"sliding_window 64, and max_seq_len is 128; .*Set max_seq_len to 64 or less"
    ):
        config_from_hf(windowed)
    assert config_from_hf(windowed, max_seq_len=64).max_seq_len == 64
    assert config_from_hf(hf("mistral", sliding_window=128)).max_seq_len == 128
    qwen = hf("qwen2", sliding_window=64)
    assert config_from_hf(qwen).max_seq_len == 128
    with pytest.raises(ConfigError, match="sliding_window 64"):
        config_from_hf({**qwen, "use_sliding_window": True})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"architectures": ["GemmaForCausalLM"], "model_type": "gemma"}, r"\['GemmaForCausalLM'\] .*LlamaForCausalLM"),
        ({"architectures": None}, r"architectures \[\]"),
        ({"hidden_act": "gelu"}, r"hidden_act 'gelu'; lockstep computes 'silu' only"),
        ({"attention_bias": True}, r"attention_bias: true"),
        ({"mlp_bias": True}, r"mlp_bias: true"),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}},
            r"rope type 'yarn'; .*'default', 'linear' and 'llama3'",
        ),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, r"has no factor; .*Found keys: rope_theta"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor 0\.5"),
        ({"hidden_size": None}, r"has no hidden_size; .*Found keys: .*intermediate_size"),
        ({"num_attention_heads": 3}, r"num_heads is 3 and num_kv_heads is 2"),
    ],
)
def test_what_lockstep_does_not_compute_is_refused_by_name(change: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        config_from_hf(hf("llama3", **change))


def test_the_architecture_follows_from_what_the_model_computes() -> None:
    assert config_to_hf(LlamaConfig(**SIZES, qkv_bias=True), 112)["architectures"] == ["Qwen2ForCausalLM"]
    assert config_to_hf(LlamaConfig(**SIZES, qk_norm=True), 112)["architectures"] == ["Qwen3ForCausalLM"]
    assert config_to_hf(Qwen2Config(**SIZES, qkv_bias=False), 112)["architectures"] == ["LlamaForCausalLM"]
