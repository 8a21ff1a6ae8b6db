import dataclasses
from pathlib import Path
from typing import Any

import draccus
import haliax as hax
import jax
import numpy as np
import pytest
import yaml

from lockstep.engine import Engine, EngineConfig
from lockstep.errors import ConfigError
from lockstep.models import (
    Llama3Scaling,
    LlamaConfig,
    MistralConfig,
    ModelConfig,
    Qwen2Config,
    Qwen3Config,
    RotaryConfig,
    Variant,
    padded_vocab_size,
)
from tests.extras import NEEDS_DRACCUS_PARSE
from tests.unit.engine.models import LLAMA, mesh_of, mixed_requests, model_on

SMALL: dict[str, Any] = {
    "max_seq_len": 64,
    "hidden_dim": 32,
    "intermediate_dim": 48,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Script:
    model: ModelConfig


def read(text: str) -> ModelConfig:
    """As `draccus.parse` decodes a file; it first spends a second on the options of all types of models."""
    return draccus.decode(Script, yaml.safe_load(text)).model


@NEEDS_DRACCUS_PARSE
def test_a_users_script_reads_a_file_and_options(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("model: {type: qwen3, num_layers: 3, hidden_dim: 64}", encoding="utf-8")
    script = draccus.parse(Script, config_path=str(file), args=["--model.num_layers", "5"])
    assert script == Script(model=Qwen3Config(num_layers=5, hidden_dim=64))


@pytest.mark.parametrize(
    ("name", "cls"),
    [("llama", LlamaConfig), ("mistral", MistralConfig), ("qwen2", Qwen2Config), ("qwen3", Qwen3Config)],
)
def test_every_type_is_read_from_yaml(name: str, cls: type[LlamaConfig]) -> None:
    text = f"""
        model:
          type: {name}
          max_seq_len: 512
          hidden_dim: 64
          intermediate_dim: 128
          num_layers: 5
          num_heads: 8
          num_kv_heads: 4
          head_dim: 16
          layer_norm_epsilon: 1.0e-5
          tie_word_embeddings: true
          initializer_range: 0.01
          gradient_checkpointing: false
          rope:
            theta: 500000.0
            scaling:
              factor: 32.0
        """
    config = read(text)
    assert config == cls(
        max_seq_len=512,
        hidden_dim=64,
        intermediate_dim=128,
        num_layers=5,
        num_heads=8,
        num_kv_heads=4,
        head_dim=16,
        layer_norm_epsilon=1e-5,
        tie_word_embeddings=True,
        initializer_range=0.01,
        gradient_checkpointing=False,
        rope=RotaryConfig(theta=500000.0, scaling=Llama3Scaling(factor=32.0)),
    )
    assert type(config) is cls
    assert (config.qkv_bias, config.qk_norm) == (name == "qwen2", name == "qwen3")


def test_a_written_config_reads_back() -> None:
    config = Script(model=Qwen3Config(**SMALL, rope=RotaryConfig(scaling=Llama3Scaling())))
    assert read(draccus.dump(config)) == config.model


def test_an_unknown_key_is_an_error() -> None:
    with pytest.raises(draccus.utils.DecodingError, match="hidden_size"):
        read("model: {type: llama, hidden_size: 64}")


def test_configs_are_hashable_and_frozen() -> None:
    config = LlamaConfig(**SMALL)
    assert hash(config) == hash(LlamaConfig(**SMALL))
    assert config != MistralConfig(**SMALL)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.num_layers = 3  # type: ignore[misc] (frozen: it must raise)


def test_head_size_follows_from_hidden_dim_unless_given() -> None:
    assert LlamaConfig(**SMALL).head_size == 8
    assert LlamaConfig(**SMALL, head_dim=24).head_size == 24
    assert LlamaConfig(**SMALL).q_heads_per_group == 2


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"num_heads": 6, "num_kv_heads": 4}, r"num_heads is 6 and num_kv_heads is 4; .*one of \[1, 2, 3, 6\]"),
        ({"hidden_dim": 30}, r"hidden_dim is 30 and num_heads is 4; .*Set head_dim"),
        ({"head_dim": 7}, r"head size is 7 \(head_dim\); .*even .*Set head_dim to an even number"),
        ({"hidden_dim": 12}, r"head size is 3 \(hidden_dim // num_heads\)"),
        ({"num_layers": 10_001}, r"num_layers is 10001; a model has at most 10000 layers"),
        ({"num_layers": 0}, r"num_layers is 0; it must be at least 1\. Set num_layers"),
        ({"max_seq_len": -1}, r"max_seq_len is -1"),
        ({"num_heads": 2**63, "num_kv_heads": 3}, r"num_heads is 9223372036854775808; it must be a whole number below"),
        ({"num_heads": 2**31 - 1, "num_kv_heads": 2}, r"must divide num_heads"),
        ({"hidden_dim": 32.0}, r"hidden_dim is 32\.0; it must be a whole number"),
        ({"layer_norm_epsilon": 0.0}, r"layer_norm_epsilon is 0\.0 .*must be positive"),
        ({"qkv_bias": True, "qk_norm": True}, r"qkv_bias and qk_norm are both true; .*Set one to false"),
    ],
)
def test_values_that_cannot_work_are_refused(change: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        LlamaConfig(**{**SMALL, **change})


@pytest.mark.parametrize("tp", [1, 2, 8, 128])
def test_the_rows_of_an_embedding_do_not_depend_on_the_mesh(tp: int) -> None:
    assert [padded_vocab_size(ids, tp) for ids in (1, 128, 129, 50257)] == [128, 128, 256, 50304]


def test_an_odd_mesh_can_split_the_vocabulary_too() -> None:
    assert padded_vocab_size(1000, 3) == 1152 and 1152 % 3 == 0


SLIDING, FULL = "sliding_attention", "full_attention"


def test_layer_types_are_read_from_yaml() -> None:
    text = """
        model:
          type: llama
          num_layers: 2
          rope: {theta: 1000000, linear_factor: 8}
          variant:
            sliding_window: 512
            layer_types: [sliding_attention, full_attention]
            sliding_rope: {theta: 10000}
    """
    config = read(text)
    assert isinstance(config, LlamaConfig) and config.variant == Variant(
        sliding_window=512, layer_types=(SLIDING, FULL), sliding_rope=RotaryConfig(theta=10000.0)
    )
    assert hash(config) and config.rope == RotaryConfig(theta=1e6, linear_factor=8.0)


def with_variant(**fields):
    return dataclasses.replace(LLAMA, variant=Variant(**fields))


def test_an_embedding_is_read_whole_only_where_it_is_the_output_layer():
    tied = dataclasses.replace(LLAMA, tie_word_embeddings=True)
    assert [config.part_read("embed", 8) for config in (LLAMA, tied)] == [0, 1] and LLAMA.part_read("up", 1) == 1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param(LLAMA, with_variant(layer_types=(FULL, FULL)), id="full", marks=pytest.mark.slow),
        pytest.param(
            dataclasses.replace(with_variant(sliding_window=3), rope=RotaryConfig(theta=7.0)),
            with_variant(sliding_window=3, layer_types=(SLIDING,) * 2, sliding_rope=RotaryConfig(theta=7.0)),
            id="sliding",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_layers_of_one_kind_are_compiled_as_without_types(one, other):
    def digests(config):
        engine = Engine(EngineConfig(layout={"tensor": 2}), mesh_of("1,2,2"))
        engine.prepare(model_on("1,2,2", config), mixed_requests())
        return {name: program.digest for name, program in engine.programs.items()}

    assert digests(one) == digests(other)


def test_training_of_layers_of_one_kind_is_lowered_as_without_types():
    ids = np.zeros((2, 8), np.int32)

    def text(config):
        def total(model):
            return model(hax.named(ids, ("batch", "position"))).array.sum()

        return jax.jit(jax.grad(total)).lower(model_on("1,1,1", config)).as_text()

    plain = text(LLAMA)
    assert text(with_variant(layer_types=(FULL, FULL))) == plain
    assert text(with_variant(sliding_window=3, layer_types=(FULL, SLIDING))) != plain
