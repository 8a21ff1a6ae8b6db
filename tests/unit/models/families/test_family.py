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
    layer_kinds,
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


def test_another_activation_is_kept() -> None:
    config = config_from_hf(hf("llama3", hidden_act="gelu_pytorch_tanh"))
    assert config.variant.activation == "gelu_tanh" and config_to_hf(config, 8)["hidden_act"] == "gelu_pytorch_tanh"


def test_the_first_llama_has_no_number_of_key_value_heads() -> None:
    assert config_from_hf(hf("llama3", num_key_value_heads=None)).num_kv_heads == 4


def test_windows_are_those_that_transformers_applies() -> None:
    config = config_from_hf(hf("mistral", sliding_window=64))
    assert config.variant.sliding_window == 64 and [kind.window for kind in layer_kinds(config)] == [64, 64]
    short = config_from_hf(hf("mistral", sliding_window=64), max_seq_len=64)
    assert short.variant.sliding_window == 64 and [kind.window for kind in layer_kinds(short)] == [None, None]
    assert config_from_hf({key: value for key, value in hf("mistral").items() if key != "sliding_window"}) == (
        config_from_hf(hf("mistral", sliding_window=4096))
    )
    qwen = hf("qwen2", sliding_window=64, layer_types=None)
    assert [kind.window for kind in layer_kinds(config_from_hf(qwen))] == [None, None]
    qwen["use_sliding_window"] = True
    assert [kind.window for kind in layer_kinds(config_from_hf({**qwen, "max_window_layers": 0}))] == [64, 64]
    assert [kind.window for kind in layer_kinds(config_from_hf({**qwen, "max_window_layers": 1}))] == [None, 64]
    assert [kind.window for kind in layer_kinds(config_from_hf({**qwen, "max_window_layers": 28}))] == [None, None]


@pytest.mark.parametrize("first", [0, 1])
def test_windows_are_written_as_transformers_reads_them(first: int, tmp_path: Path) -> None:
    types = [("full" if layer < first else "sliding") + "_attention" for layer in range(2)]
    qwen = hf("qwen3", sliding_window=64, use_sliding_window=True, layer_types=types)
    written = config_to_hf(config_from_hf(qwen), 112)
    assert config_from_hf(written) == config_from_hf(qwen)
    (tmp_path / "config.json").write_text(json.dumps(written))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    assert (theirs.layer_types, theirs.sliding_window) == (types, 64)
    mistral = config_to_hf(config_from_hf(hf("mistral", sliding_window=64)), 112)
    assert mistral["architectures"] == ["MistralForCausalLM"] and mistral["sliding_window"] == 64


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"architectures": ["GemmaForCausalLM"], "model_type": "gemma"}, r"\['GemmaForCausalLM'\] .*LlamaForCausalLM"),
        ({"architectures": None}, r"architectures \[\]"),
        ({"hidden_act": "quick_gelu"}, r"hidden_act 'quick_gelu'; lockstep computes 'silu', 'gelu', .* only"),
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
