"""Checkpoints of this directory with one thing changed, as people have them: for transformers, and for lockstep."""

import dataclasses
import json
import pathlib
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_dtypes  # noqa: F401  (NumPy learns bfloat16)
import numpy as np
from safetensors.numpy import load_file, save_file

GOLDEN = pathlib.Path(__file__).parent
POSITIONS = slice(5, None, 6)
"""The positions whose logits ``variants.npz`` has."""
HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
PLAIN = {"rope_type": "default", "rope_theta": 500.0}
Tensors = dict[str, np.ndarray]  # not a `type` statement: the Python of make_goldens.py is 3.11


@dataclasses.dataclass(frozen=True)
class Variant:
    """One change of a checkpoint: of keys of config.json (None in ``without``), or of its tensors."""

    family: str
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    without: tuple[str, ...] = ()
    tensors: Callable[[Tensors], Tensors] = lambda tensors: tensors

    def write(self, directory: pathlib.Path) -> None:
        """Write the checkpoint to a directory that is not there yet."""
        shutil.copytree(GOLDEN / self.family, directory)
        (directory / "golden.npz").unlink()
        hf = json.loads((directory / "config.json").read_text())
        hf = {key: value for key, value in (hf | dict(self.config)).items() if key not in self.without}
        (directory / "config.json").write_text(json.dumps(hf))
        tensors = self.tensors(load_file(directory / "model.safetensors"))
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def _with_own_head(tensors: Tensors, rows: slice = slice(None)) -> Tensors:
    head = tensors[EMBED].copy()
    head[rows] = head[rows][::-1] * np.asarray(0.5, head.dtype)
    return tensors | {HEAD: head}


def _with_head_alone(tensors: Tensors) -> Tensors:
    return {HEAD if name == EMBED else name: value for name, value in tensors.items()}


def _without_prefix(tensors: Tensors) -> Tensors:
    return {name.removeprefix("model."): value for name, value in tensors.items()}


def _with_more_prefix(tensors: Tensors) -> Tensors:
    return {f"model.{name}" if name == HEAD else name: value for name, value in tensors.items()}


def _with_fused_experts(tensors: Tensors) -> Tensors:
    """What transformers 5 has in memory, and people save: the experts of a layer in two tensors, gate above up."""
    experts: dict[str, dict[int, dict[str, np.ndarray]]] = {}
    fused: Tensors = {}
    for name, value in tensors.items():
        name = name.replace(".block_sparse_moe.", ".mlp.")
        if match := re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)\.weight", name):
            part = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}.get(match[3], match[3])
            experts.setdefault(match[1], {}).setdefault(int(match[2]), {})[part] = value
        else:
            fused[name] = value
    for stem, parts in experts.items():
        own = [parts[expert] for expert in sorted(parts)]
        fused[f"{stem}.gate_up_proj"] = np.stack([np.concatenate([e["gate_proj"], e["up_proj"]]) for e in own])
        fused[f"{stem}.down_proj"] = np.stack([e["down_proj"] for e in own])
    return fused


def _seeing(
    family: str,
    tensors: Callable[[Tensors], Tensors] = lambda tensors: tensors,
    *,
    prefix: str = "model.language_model.",
    left_out: Sequence[str] = ("model.visual.merger.weight", "mtp.fc.weight"),
    **whole: Any,
) -> Variant:
    """A model with a vision tower around a family's.

    Args:
        prefix: The beginning of the names of the family's tensors, in place of ``model.``.
        left_out: The names of tensors of the tower, and of multi-token prediction.
        whole: Other keys of its ``config.json``.
    """
    text = json.loads((GOLDEN / family / "config.json").read_text())
    name, kind = text["architectures"][0].replace("CausalLM", "ConditionalGeneration"), text["model_type"]

    def change(stored: Tensors) -> Tensors:
        stored = {name.replace("model.", prefix): value for name, value in tensors(stored).items()}
        return stored | {name: np.ones((2, 2), np.float32) for name in left_out}

    config = {"architectures": [name], "model_type": kind.removesuffix("_text"), "text_config": text, **whole}
    return Variant(family, config, without=tuple(text.keys() - config.keys()), tensors=change)


def _rope(scaling: Mapping[str, Any], **more: Any) -> Variant:
    return Variant("llama3", {"rope_theta": 500.0, "rope_scaling": scaling, **more}, without=("rope_parameters",))


VARIANTS: dict[str, Variant] = {
    **{
        f"{name}_beside_rope_parameters": Variant(
            "llama3", {"rope_theta": 500.0, "rope_scaling": scaling, "rope_parameters": PLAIN}
        )
        for name, scaling in (("yarn", YARN), ("linear", {"type": "linear", "factor": 4.0}), ("llama3", LLAMA3))
    },
    "yarn_old_spelling": _rope({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}),
    "yarn_without_original": _rope({"type": "yarn", "factor": 4.0}),
    "yarn_original_beside": _rope({"rope_type": "yarn", "factor": 4.0}, original_max_position_embeddings=16),
    "yarn_original_twice": _rope(YARN, original_max_position_embeddings=32),
    "llama3_original_twice": _rope(LLAMA3, original_max_position_embeddings=32),
    "yarn_attention_factor": _rope({**YARN, "attention_factor": 1.0}),
    "yarn_mscale": _rope({**YARN, "mscale": 0.707, "mscale_all_dim": 1.0}),
    "yarn_one_mscale": _rope({**YARN, "mscale": 0.707}),
    "yarn_factor_null": _rope({**YARN, "factor": None}),
    "yarn_in_layers_with_a_window": Variant("cohere2", {"rope_parameters": {**YARN, "rope_theta": 300.0}}),
    "yarn_betas": _rope({**YARN, "beta_fast": 16, "beta_slow": 2, "truncate": False}),
    "gemma3_scaling_beside": Variant(
        "gemma3",
        {
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "rope_parameters": {
                "full_attention": PLAIN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "gemma3_old_spelling": Variant(
        "gemma3",
        {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_theta": 700.0, "rope_local_base_freq": 70.0},
        without=("rope_parameters",),
    ),
    "tied_with_own_head": Variant("llama_tied", tensors=_with_own_head),
    "tied_with_head_of_other_last_rows": Variant(
        "llama_tied", tensors=lambda tensors: _with_own_head(tensors, slice(-2, None))
    ),
    "tied_with_head_alone": Variant("llama_tied", tensors=_with_head_alone),
    "tied_gemma_with_own_head": Variant("gemma3", tensors=_with_own_head),
    "no_prefix": Variant("llama3", tensors=_without_prefix),
    "tied_with_head_alone_no_prefix": Variant(
        "llama_tied", tensors=lambda tensors: _without_prefix(_with_head_alone(tensors))
    ),
    "prefix_of_head": Variant("llama3", tensors=_with_more_prefix),
    **{
        f"{family}_fused": Variant(family, tensors=_with_fused_experts)
        for family in ("mixtral", "qwen2_moe", "qwen3_moe", "qwen3_moe_mixed")
    },
    "qwen3_5_seeing": _seeing("qwen3_5"),
    "qwen3_5_moe_seeing": _seeing("qwen3_5_moe", _with_fused_experts),
    "gemma3_seeing": _seeing(
        "gemma3",
        prefix="language_model.model.",
        left_out=("vision_tower.vision_model.other.weight", "multi_modal_projector.other.weight"),
        vision_config={
            **{"hidden_size": 2, "intermediate_size": 2, "num_hidden_layers": 1, "num_attention_heads": 1},
            **{"image_size": 28, "patch_size": 14},
        },
        mm_tokens_per_image=4,
    ),
    "qwen3_moe_fused_no_prefix": Variant(
        "qwen3_moe", tensors=lambda tensors: _without_prefix(_with_fused_experts(tensors))
    ),
}  # fmt: skip
