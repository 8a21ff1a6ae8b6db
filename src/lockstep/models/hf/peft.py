"""Adapters as PEFT stores them: ``adapter_config.json`` beside ``adapter_model.safetensors``."""

import json
import os
import pathlib
import secrets

import numpy as np
from safetensors.numpy import save_file

from lockstep.models.config import LlamaConfig
from lockstep.models.hf.adapter_rows import ReadPair, stored_factors
from lockstep.models.hf.config import architecture_of
from lockstep.models.hf.save_target import save_target
from lockstep.models.lora import MODULES, LoraConfig


def save_peft(
    path: str | os.PathLike[str], config: LlamaConfig, lora: LoraConfig, base: str, read_pair: ReadPair
) -> None:
    """Saves adapters, which ``PeftModel.from_pretrained(base_model, path)`` loads; one process calls it.

    Args:
        path: A directory, which appears as a whole and replaces one that is there, or an fsspec URL.
        config: The configuration of the base model.
        lora: The adapters.
        base: The name of the base model, for PEFT to say.
        read_pair: Reads the factors of an adapter.

    Raises:
        OSError: It cannot be written.
    """
    stored = architecture_of(config).tensors
    tensors: dict[str, np.ndarray] = {}
    for name in lora.modules:
        for layer in range(config.num_layers):
            weight = stored[f"layers.stacked.{MODULES[name][0]}"].name(layer)
            for letter, factor in zip("AB", stored_factors(*read_pair(name, layer)), strict=True):
                key = f"base_model.model.{weight.removesuffix('.weight')}.lora_{letter}.weight"
                tensors[key] = np.ascontiguousarray(factor)
    # https://huggingface.co/docs/peft/developer_guides/checkpoint
    values = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.r,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": list(lora.modules),
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
