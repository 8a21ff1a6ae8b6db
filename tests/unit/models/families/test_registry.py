"""Presets are found by a checkpoint's path, and a model that no family computes is not saved as one."""

import dataclasses

import pytest

from lockstep.errors import ConfigError
from lockstep.models import Llama3Scaling, Variant, find_preset
from lockstep.models.families.registry import PRESETS, family_of
from lockstep.models.rope import RotaryConfig


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_found_by_its_own_name(name):
    assert find_preset(name) is PRESETS[name]


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("gs://bucket/models/Meta-Llama-3-8B-Instruct", "llama-3-8b"),
        ("meta-llama/Llama-3.1-8B/", "llama-3.1-8b"),
        ("Qwen/Qwen2.5-0.5B-Instruct", "qwen2.5-0.5b"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b-v0.3"),
    ],
)
def test_case_owner_and_instruct_do_not_count(path, name):
    assert find_preset(path) is PRESETS[name]


@pytest.mark.parametrize("path", ["", "llama-9-8b", "llama-3-8b/checkpoint-100", "llama-3-8b-tuned"])
def test_another_checkpoint_has_none(path):
    assert find_preset(path) is None


def test_a_longer_context_comes_with_its_rotary_scaling():
    assert PRESETS["llama-3-8b"].config.rope.scaling is None
    assert PRESETS["llama-3.1-8b"].config.rope.scaling == Llama3Scaling(factor=8)
    assert PRESETS["llama-3.2-1b"].config.rope.scaling == Llama3Scaling(factor=32)


@pytest.mark.parametrize(
    ("rope", "why"),
    [
        (RotaryConfig(), "exclusive_attention"),
        (RotaryConfig(partial_rotary_factor=0.5), "partial_rotary_factor 0.5; LlamaForCausalLM rotates whole heads"),
    ],
)
def test_what_no_family_computes_cannot_be_saved(rope, why):
    config = dataclasses.replace(PRESETS["llama-3-8b"].config, rope=rope, variant=Variant(exclusive_attention=True))
    with pytest.raises(
        ConfigError, match=f"cannot be saved as a Hugging Face checkpoint: as LlamaForCausalLM, .*{why}"
    ):
        family_of(config)
