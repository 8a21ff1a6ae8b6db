"""Adapters in Hugging Face's formats: merged into a checkpoint's rows on a host, or as PEFT stores them."""

import json
import os
import pathlib
import secrets
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float
from safetensors.numpy import save_file

from lockstep.models.config import LlamaConfig
from lockstep.models.families.registry import family_of
from lockstep.models.hf.files import CheckpointFiles
from lockstep.models.hf.names import parameters, stored_shapes
from lockstep.models.hf.save_target import save_target
from lockstep.models.hf.save_writer import Read
from lockstep.models.hf.saved_tensor import SavedTensor
from lockstep.models.lora import MODULES, LoraConfig
from lockstep.models.trainable import skeleton

type ReadPair = Callable[[str, int], tuple[np.ndarray, np.ndarray]]
"""Returns the two factors of an adapter by the name of the linear layer and the number of the layer."""


def stored_factors(a: np.ndarray, b: np.ndarray) -> tuple[Float[np.ndarray, "rank in"], Float[np.ndarray, "out rank"]]:
    """Returns the factors of one layer's adapter as PEFT stores them, ``lora_A.weight`` and ``lora_B.weight``.

    Args:
        a: The first factor, its last axis the rank.
        b: The second factor, its first axis the rank.
    """
    rank = len(b)
    return a.reshape(-1, rank).T, b.reshape(rank, -1).T


def merged_rows(base: str, dtype: str, lora: LoraConfig, read_pair: ReadPair) -> Read:
    """Returns a function that reads rows of the base model's checkpoint and adds what the adapters add.

    Args:
        dtype: The float type in which training had its weights.
        read_pair: Reads the factors of an adapter, in float32; threads may share it.

    Raises:
        ConfigError: The checkpoint cannot be read.
    """
    files = CheckpointFiles(base)
    adapted = {_weight(name): name for name in lora.modules}

    def read(tensor: SavedTensor, start: int, stop: int) -> np.ndarray:
        inner = tensor.shape[0] // tensor.rows
        first, last = start * inner, stop * inner
        before = tensor.parameter.first_row
        rows = files.read_rows(tensor.names, before + first, before + last).astype(jnp.dtype(dtype))
        if tensor.parameter.name in adapted:
            assert tensor.layer is not None, "adapters are of layers"
            low, high = stored_factors(*read_pair(adapted[tensor.parameter.name], tensor.layer))
            rows = rows.astype(np.float32) + np.float32(lora.scale) * (high[first:last] @ low)
        return rows.astype(tensor.dtype)

    return read


def save_peft(
    path: str | os.PathLike[str], config: LlamaConfig, lora: LoraConfig, base: str, read_pair: ReadPair
) -> None:
    """Saves adapters, which ``PeftModel.from_pretrained(base_model, path)`` loads; one process calls it.

    Args:
        path: A directory, which appears as a whole and replaces one that is there, or an fsspec URL.
        base: The name of the base model, for PEFT to say.
        read_pair: Reads the factors of an adapter.

    Raises:
        OSError: It cannot be written.
    """
    found = parameters(skeleton(1, config), family_of(config).tensors)
    by_weight, shapes = {each.name: each for each in found}, stored_shapes(found)
    together: dict[str, list[str]] = {}  # the adapters whose weights are rows of one tensor
    for name in lora.modules_of(config):
        together.setdefault(by_weight[_weight(name)].stored.template, []).append(name)
    tensors: dict[str, np.ndarray] = {}
    for template, names in together.items():
        for layer in range(config.num_layers):
            stored = template.format(layer=layer)
            factors = {name: stored_factors(*read_pair(name, layer)) for name in names}
            high = np.zeros((shapes[stored][0], lora.r * len(names)), np.float32)
            for number, (name, (_, part)) in enumerate(factors.items()):
                first = by_weight[_weight(name)].first_row
                high[first : first + len(part), lora.r * number : lora.r * (number + 1)] = part
            key = f"base_model.model.{stored.removesuffix('.weight')}.lora_"
            tensors[f"{key}A.weight"] = np.concatenate([low for low, _ in factors.values()])
            tensors[f"{key}B.weight"] = high
    modules = {template.rsplit(".", 2)[1]: len(names) for template, names in together.items()}
    several = {module: count for module, count in modules.items() if count > 1}
    # https://huggingface.co/docs/peft/developer_guides/checkpoint
    values = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.r,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        # Adapters of rows of one tensor are one adapter of as many times the rank, with the same scale.
        "rank_pattern": {module: count * lora.r for module, count in several.items()},
        "alpha_pattern": {module: count * lora.alpha for module, count in several.items()},
        "target_modules": list(modules),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }

    def write(place: str) -> None:
        directory = pathlib.Path(place)
        save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
        (directory / "adapter_config.json").write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")

    target = save_target(os.fspath(path), secrets.token_hex(4))
    target.begin()
    try:
        target.write_small(write)
        target.commit()
    except BaseException:
        target.abort()
        raise


def _weight(module: str) -> str:
    """The name of the weight of a linear layer."""
    return MODULES[module][0].rpartition(".")[2]
