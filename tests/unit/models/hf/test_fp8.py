"""Weights in 8 bits with a factor for each block, and a checkpoint that has its matrices so."""

import json
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lockstep.errors import ConfigError
from lockstep.models import load_hf
from lockstep.models.hf.fp8 import scaled
from tests.unit.engine.models import mesh_of

GOLDEN = Path(__file__).parents[3] / "golden" / "deepseek_v3"
QUANTISED = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def test_a_row_has_the_factor_of_its_block() -> None:
    rng = np.random.default_rng(0)
    numbers = rng.normal(size=(300, 200)).astype(ml_dtypes.float8_e4m3fn)
    factors = rng.uniform(0.5, 2, (3, 2)).astype(np.float32)
    whole = scaled(numbers, factors, 0)
    assert whole.dtype == ml_dtypes.bfloat16
    for row, column in ((0, 0), (127, 128), (128, 127), (299, 199)):
        exact = np.float32(numbers[row, column]) * factors[row // 128, column // 128]
        assert whole[row, column] == ml_dtypes.bfloat16(exact)
    np.testing.assert_array_equal(scaled(numbers[130:280], factors[1:3], 2), whole[130:280])


@pytest.fixture
def packed(tmp_path: Path) -> dict[str, np.ndarray]:
    """The tensors of a checkpoint ``fp8`` with matrices in 8 bits, beside which ``plain`` has them in bfloat16."""
    rng = np.random.default_rng(1)
    packed: dict[str, np.ndarray] = {}
    plain: dict[str, np.ndarray] = {}
    for name, tensor in load_file(GOLDEN / "model.safetensors").items():
        packed[name] = plain[name] = tensor
        if "proj" in name:
            factor = np.exp2(rng.integers(-3, 3, (1, 1))).astype(np.float32)
            packed[name] = (tensor.astype(np.float32) / factor).astype(ml_dtypes.float8_e4m3fn)
            packed[f"{name}_scale_inv"] = factor
            plain[name] = (packed[name].astype(np.float32) * factor).astype(ml_dtypes.bfloat16)
    config = json.loads((GOLDEN / "config.json").read_text())
    for place, tensors, more in (("fp8", packed, {"quantization_config": QUANTISED}), ("plain", plain, {})):
        (tmp_path / place).mkdir()
        save_file(tensors, tmp_path / place / "model.safetensors", metadata={"format": "pt"})
        (tmp_path / place / "config.json").write_text(json.dumps(config | more))
    return packed


def test_a_checkpoint_in_8_bits_is_read(packed: dict[str, np.ndarray], tmp_path: Path) -> None:
    ours, plain = (jax.tree.leaves(load_hf(str(tmp_path / place), mesh_of("1,2,1"))) for place in ("fp8", "plain"))
    assert len(ours) == len(plain)
    for leaf, expected in zip(ours, plain, strict=True):
        np.testing.assert_array_equal(leaf, expected)


def test_other_blocks_are_refused(packed: dict[str, np.ndarray], tmp_path: Path) -> None:
    name = next(name for name in packed if name.endswith("o_proj.weight_scale_inv"))
    file = tmp_path / "fp8" / "model.safetensors"
    save_file(packed | {name: np.ones((2, 1), np.float32)}, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"o_proj\.weight_scale_inv has \(2, 1\); FP8 is read with a factor for each"):
        load_hf(str(tmp_path / "fp8"), mesh_of("1,1,1"))
    config = json.loads((GOLDEN / "config.json").read_text())
    for block in ([64, 128], None):
        changed = config | {"quantization_config": QUANTISED | {"weight_block_size": block}}
        (tmp_path / "fp8" / "config.json").write_text(json.dumps(changed))
        with pytest.raises(ConfigError, match=r"quant_method 'fp8'\): its weights are quantised"):
            load_hf(str(tmp_path / "fp8"), mesh_of("1,1,1"))
