"""Weights in MXFP4: the bytes of each number, and a checkpoint that has its experts in it."""

import hashlib
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lockstep.errors import ConfigError
from lockstep.models import Experts, GptOssConfig, LlamaLMHeadModel, load_hf, save_hf
from lockstep.models.hf.mxfp4 import unpack
from lockstep.models.trainable import skeleton
from lockstep.placement import make_mesh

E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


def test_numbers_are_those_of_the_specification() -> None:
    blocks = np.zeros((1, 2, 1, 16), np.uint8)
    blocks[0, 0, 0, :8] = [2 * pair | (2 * pair + 1) << 4 for pair in range(8)]  # all sixteen, the low bits first
    blocks[0, 1, 0, 15] = 0x70
    numbers = unpack(blocks, np.array([[[127], [129]]], np.uint8))
    assert numbers.shape == (1, 32, 2) and numbers.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(numbers[0, :16, 0].astype(np.float32), np.array(E2M1, np.float32))
    assert numbers[0, 31, 1] == 6 * 4 and not numbers[0, :31, 1].any()
    assert np.isnan(unpack(blocks, np.full((1, 2, 1), 255, np.uint8)).astype(np.float32)).all()
    assert unpack(blocks, np.full((1, 2, 1), 1, np.uint8))[0, 2, 0] == 2.0**-126


def test_it_is_what_transformers_makes_of_the_same_bytes() -> None:
    draw = np.random.default_rng(0).integers
    blocks, scales = draw(0, 256, (2, 6, 3, 16), dtype=np.uint8), draw(120, 130, (2, 6, 3), dtype=np.uint8)
    found = hashlib.sha256(unpack(blocks, scales).astype(np.float32).tobytes()).hexdigest()
    # transformers 5.12.1, convert_moe_packed_tensors, in float32
    assert found == "83fca009b9770292fdaff7c947165867bd67a204529495e03305a959ca4f9840"


CONFIG = GptOssConfig(
    max_seq_len=32, hidden_dim=64, intermediate_dim=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
    experts=Experts(num_experts=3, num_experts_per_tok=2),
)  # fmt: skip


def packed(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The nearest numbers of one exponent for all blocks: what a checkpoint has of them, and they themselves."""
    outputs = weight.astype(np.float32).transpose(0, 2, 1)
    codes = np.abs(outputs[..., None] * 64 - np.array(E2M1)).argmin(axis=-1).astype(np.uint8)
    pairs = codes.reshape(*outputs.shape[:2], -1, 16, 2)
    numbers = (np.array(E2M1)[codes] / 64).transpose(0, 2, 1).astype(weight.dtype)
    return pairs[..., 0] | pairs[..., 1] << 4, np.full(pairs.shape[:3], 127 - 6, np.uint8), numbers


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint with experts in 4 bits, and the same in bfloat16."""
    small, wide = (tmp_path_factory.mktemp(name) for name in ("small", "wide"))
    drawn = np.random.default_rng(0)

    def draw(leaf: Any) -> Any:
        return jnp.asarray(drawn.standard_normal(leaf.shape) / 16, jnp.bfloat16)

    model: LlamaLMHeadModel = jax.tree.map(draw, skeleton(40, CONFIG))
    save_hf(model, wide / "model")
    tensors = load_file(wide / "model" / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        blocks, scales, tensors[name] = packed(tensors[name])
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    both = {name for name in tensors if f"{name}_blocks" in tensors}
    config = (wide / "model" / "config.json").read_text()
    for directory, left_out in (
        (small, both),
        (wide, {f"{name}_{end}" for name in both for end in ("blocks", "scales")}),
    ):
        save_file(
            {name: np.ascontiguousarray(each) for name, each in tensors.items() if name not in left_out},
            directory / "model.safetensors",
        )
        (directory / "config.json").write_text(config)
    quantized = {**json.loads(config), "quantization_config": {"quant_method": "mxfp4"}}
    (small / "config.json").write_text(json.dumps(quantized))
    return small, wide


def test_a_checkpoint_in_4_bits_is_the_one_of_its_numbers(checkpoints: tuple[Path, Path]) -> None:
    small, wide = (load_hf(path, make_mesh("1,2,2", jax.devices()[:4]), dtype=jnp.bfloat16) for path in checkpoints)
    assert small.config == wide.config
    for ours, theirs in zip(jax.tree.leaves(small), jax.tree.leaves(wide), strict=True):
        np.testing.assert_array_equal(np.asarray(ours, np.float32), np.asarray(theirs, np.float32))


def test_parts_that_do_not_go_together_are_refused(checkpoints: tuple[Path, Path], tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.down_proj"
    tensors = load_file(checkpoints[0] / "model.safetensors")
    tensors[f"{name}_scales"] = tensors[f"{name}_scales"][:, :-1].copy()
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((checkpoints[0] / "config.json").read_text())
    with pytest.raises(
        ConfigError, match=rf"{name}_blocks has shape \(3, 64, 1, 16\) and {name}_scales has \(3, 63, 1\)"
    ):
        load_hf(tmp_path, make_mesh("1,1,1", jax.devices()[:1]))
