"""Adapters in Hugging Face's formats: merged into a checkpoint's rows on a host, or as PEFT stores them."""

import json
import os
import pathlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float
from safetensors.numpy import save

from lockstep.errors import ConfigError
from lockstep.files import write_file
from lockstep.models.config import LlamaConfig
from lockstep.models.families.family import Family
from lockstep.models.families.registry import family_of
from lockstep.models.hf.files import ADAPTER_NAME, CheckpointFiles
from lockstep.models.hf.names import parameters, stored_shapes
from lockstep.models.hf.save_target import save_target
from lockstep.models.hf.save_writer import Read
from lockstep.models.hf.saved_tensor import SavedTensor
from lockstep.models.lora import LoraConfig, weight_of
from lockstep.models.low_rank import exact_change, narrower
from lockstep.models.trainable import skeleton
from lockstep.models.weights import MLP_WEIGHTS

type ReadPair = Callable[[str, int], tuple[np.ndarray, np.ndarray]]
"""The two factors of an adapter by its name and the place of the layer among those that have it."""


def stored_factors(a: np.ndarray, b: np.ndarray) -> tuple[Float[np.ndarray, "rank in"], Float[np.ndarray, "out rank"]]:
    """Return the factors of one layer's adapter as PEFT stores them, ``lora_A.weight`` and ``lora_B.weight``.

    Args:
        a: The first factor, its last axis the rank.
        b: The second factor, its first axis the rank.
    """
    rank = len(b)
    return a.reshape(-1, rank).T, b.reshape(rank, -1).T


def stored_factors_of_experts(
    a: Float[np.ndarray, "expert input rank"], b: Float[np.ndarray, "expert rank output"]
) -> tuple[Float[np.ndarray, "expert*rank input"], Float[np.ndarray, "output rank*expert"]]:
    """Return the factors of one layer's adapters of all experts, whose weights are one parameter, as PEFT has them."""
    return a.transpose(0, 2, 1).reshape(-1, a.shape[1]), b.transpose(2, 1, 0).reshape(b.shape[2], -1)


def merged_rows(base: str, dtype: str, config: LlamaConfig, lora: LoraConfig, read_pair: ReadPair) -> Read:
    """Return a function that reads rows of the base model's checkpoint and adds what the adapters add.

    With ``numerics: exact`` they are merged as `lockstep.models.merge_adapters` does.

    Args:
        dtype: The float type in which training had its weights.
        read_pair: Reads the factors of an adapter, in float32; threads may share it.

    Raises:
        ConfigError: The checkpoint cannot be read.
    """
    files = CheckpointFiles(base, tied=config.tie_word_embeddings)
    adapted = {weight_of(name): name for name in lora.modules_of(config)}

    def change(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        if not config.exact:
            return np.float32(lora.scale) * (a @ b)
        return np.asarray(exact_change("er,rm->em" if a.ndim == 2 else "xer,xrm->xem", lora.scale, a, b))

    def read(tensor: SavedTensor, start: int, stop: int) -> np.ndarray:
        inner = tensor.shape[0] // tensor.rows
        first, last = start * inner, stop * inner
        before = tensor.parameter.first_row
        rows = files.read_rows(tensor.names, before + first, before + last).astype(jnp.dtype(dtype))
        if tensor.parameter.name in adapted:
            assert tensor.place is not None, "adapters are of layers"
            a, b = read_pair(adapted[tensor.parameter.name], tensor.place)
            if config.exact:
                compute = narrower(dtype, tensor.dtype)
                rows, a, b = (array.astype(compute) for array in (rows, a, b))
            if tensor.row_axis == "expert":
                parameter, sizes = tensor.parameter, tensor.parameter.sizes | {"expert": stop - start}
                delta = parameter.stored.to_stored(change(a[start:stop], b[start:stop]), parameter.axes, sizes)
            else:
                low, high = stored_factors(a, b)
                delta = change(low.T, high[first:last].T).T
            rows = rows.astype(np.float32) + delta
            rows = rows.astype(compute) if config.exact else rows
        return rows.astype(tensor.dtype)

    return read


def save_peft(
    path: str | os.PathLike[str], config: LlamaConfig, lora: LoraConfig, base: str, read_pair: ReadPair
) -> None:
    """Save adapters, which ``PeftModel.from_pretrained(base_model, path)`` loads; one process calls it.

    Args:
        path: A directory, which appears as a whole and replaces one that is there, or an fsspec URL.
        base: The name of the base model, for PEFT to say.
        read_pair: Reads the factors of an adapter.

    Raises:
        OSError: It cannot be written.
        ConfigError: PEFT has no such adapters.
    """
    family, adapters = family_of(config), lora.modules_of(config)
    _check_peft([weight_of(name) for name in adapters], family)
    adapted = parameters(skeleton(1, config), family.tensors)
    by_weight, shapes = {parameter.name: parameter for parameter in adapted}, stored_shapes(adapted)
    together: dict[tuple[str, tuple[Any, ...]], list[str]] = {}  # the adapters whose weights are rows of one tensor
    for name in adapters:
        own_weight = by_weight[weight_of(name)]
        together.setdefault((own_weight.stored.template, tuple(own_weight.layers)), []).append(name)
    # A parameter of all experts is no module: PEFT wraps the one that has it, once for each, the first the innermost.
    wrapped = [
        template
        for (template, _), (name, *_) in together.items()
        if "{expert}" not in template and "expert" in by_weight[weight_of(name)].axes
    ]
    tensors: dict[str, np.ndarray] = {}
    for (template, _), names in together.items():
        own = [by_weight[weight_of(name)] for name in names]
        for place, layer in enumerate(own[0].layers):
            pairs = [read_pair(name, place) for name in names]
            for expert, stored in enumerate(own[0].names(layer)):
                module = stored.removesuffix(".weight")
                if template in wrapped:
                    low, high = stored_factors_of_experts(*pairs[0])
                    module = stored.rpartition(".")[0] + ".base_layer" * (len(wrapped) - 1 - wrapped.index(template))
                else:
                    parts = [(a[expert], b[expert]) if "{expert}" in template else (a, b) for a, b in pairs]
                    low, high = _joined(parts, [parameter.first_row for parameter in own], shapes[stored][0])
                tensors[f"base_model.model.{module}.lora_A.weight"] = low
                tensors[f"base_model.model.{module}.lora_B.weight"] = high
    modules = {
        template.rsplit(".", 2)[1]: len(names) for (template, _), names in together.items() if template not in wrapped
    }
    values = _peft_config(lora, base, modules, wrapped)

    def write(place: str) -> None:
        directory = pathlib.Path(place)
        # safetensors 0.8.0 writes the memory of an array in any order, whatever its strides say.
        contiguous = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
        write_file(directory / "adapter_model.safetensors", save(contiguous, metadata={"format": "pt"}))
        write_file(directory / ADAPTER_NAME, json.dumps(values, indent=2, sort_keys=True) + "\n")

    target = save_target(os.fspath(path), secrets.token_hex(4))
    target.begin()
    try:
        target.write_small(write)
        target.commit()
    except BaseException:
        target.abort()
        raise


def _peft_config(lora: LoraConfig, base: str, modules: Mapping[str, int], wrapped: Sequence[str]) -> dict[str, Any]:
    """The contents of adapter_config.json (https://huggingface.co/docs/peft/developer_guides/checkpoint).

    Args:
        modules: The number of adapters whose weights are rows of a module's tensor, by the module's name.
        wrapped: The parameters of all experts that have adapters.
    """
    several = {module: count for module, count in modules.items() if count > 1}
    return {
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
        "target_parameters": [template.rpartition("{layer}.")[2] for template in wrapped],
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def _joined(
    pairs: Sequence[tuple[np.ndarray, np.ndarray]], first_rows: Sequence[int], rows: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return adapters of rows of one tensor as one adapter of it, of as many times the rank."""
    factors = [stored_factors(*pair) for pair in pairs]
    low = np.concatenate([factor for factor, _ in factors])
    high, column = np.zeros((rows, len(low)), np.float32), 0
    for first, (_, part) in zip(first_rows, factors, strict=True):
        high[first : first + len(part), column : column + part.shape[1]] = part
        column += part.shape[1]
    return low, high


def _check_peft(weights: Sequence[str], family: Family) -> None:
    """Refuse adapters that PEFT would not load whole, for transformers 5 puts all experts into two parameters."""
    if not any("{expert}" in family.tensors[weight] for weight in weights):
        return
    mlps = [weight for weight in weights if weight in MLP_WEIGHTS or weight.startswith("shared_")]
    joined = [weight for weight in weights if weight in ("expert_gate", "expert_up")]
    why = ""
    if family.packed_experts:
        why = f"transformers has no names of single experts of {family.model_type}"
    elif mlps:
        why = "the MLPs beside experts have adapters, which PEFT skips where the experts have some"
    elif len(joined) == 1:
        why = "gate_proj and up_proj of experts are one parameter in transformers, and one of the two has no adapters"
    if why:
        raise ConfigError(
            f"adapters of {', '.join(weights)} cannot be saved as PEFT has them: {why}. Export the merged model, "
            "without adapters."
        )
