"""All model families: each module of this package with a ``FAMILY`` is one."""

import importlib
import pkgutil
import re
from collections.abc import Mapping
from typing import Any, Final

from lockstep.errors import ConfigError
from lockstep.json_text import refused
from lockstep.limits import LAYERS
from lockstep.models import families
from lockstep.models.config import LlamaConfig
from lockstep.models.families.family import Family, ModelPreset
from lockstep.models.rope import required

_MODULES: Final = [
    importlib.import_module(f"{families.__name__}.{module.name}")
    for module in pkgutil.iter_modules(families.__path__)
    if module.name != "registry"
]

FAMILIES: Final[Mapping[str, Family]] = {
    module.FAMILY.architecture: module.FAMILY for module in _MODULES if hasattr(module, "FAMILY")
}
"""The families by their entry of ``architectures`` in ``config.json``."""

NOT_COMPUTED: Final[Mapping[str, str]] = {
    "ApertusForCausalLM": "activations whose settings are stored as single numbers",
    "DeepseekV32ForCausalLM": "attention to positions that an indexer chooses",
    "GraniteMoeHybridForCausalLM": "layers of Mamba 2",
}
"""The parts of well-known architectures that lockstep does not compute."""

PRESETS: Final[Mapping[str, ModelPreset]] = {
    name: preset for family in FAMILIES.values() for name, preset in family.presets.items()
}
"""The configurations of well-known checkpoints, for planning where a checkpoint cannot be read."""


DEQUANTISE: Final = (
    "Lockstep reads floats, gpt-oss in MXFP4, and FP8 in blocks of 128 rows and columns. Choose the checkpoint that "
    "this was made of, or dequantise it with transformers and save it again."
)
"""The fix where weights are quantised."""


def vocab_size_from_hf(hf: Mapping[str, Any]) -> int:
    """Return the number of rows of the embedding that a Hugging Face ``config.json`` describes.

    Raises:
        ConfigError: It does not say it, or says no number.
    """
    with refused("vocab_size of the checkpoint's config.json", "Download the checkpoint again."):
        text = text_part(hf)
        families = (family for family in FAMILIES.values() if family.model_type == text.get("model_type"))
        defaults = next((family.defaults for family in families), {})
        return int(required({**defaults, **text}, "vocab_size"))


_OF_WEIGHTS: Final = (
    *("quantization_config", "compression_config", "transformers_weights", "dtype", "torch_dtype"),
    "tie_word_embeddings",
)
"""Keys of a ``config.json`` that are of the whole model, also where the rest is in ``text_config``."""


def text_part(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """The ``config.json`` of the language model in one that reads images too (``text_config``); others as they are.

    Raises:
        ConfigError: There is no ``text_config``, or the two contradict each other.
    """
    names, kind = hf.get("architectures") or [], hf.get("model_type")
    inside = (hf.get("text_config") or {}).get("model_type")
    for family in sorted(FAMILIES.values(), key=lambda family: family.model_type != inside):
        whole, whole_kind = family.with_images or ("", "")
        if names not in ([whole], [family.architecture]):
            continue
        if kind == whole_kind or (kind is None and names == [whole]):
            text, key = required(hf, "text_config"), "tie_word_embeddings"
            if hf.get(key) is True:  # as transformers 5 writes it, beside another default; a head of its own unties
                text = {**text, key: True}
            if key in hf and text.get(key, hf[key]) != hf[key]:
                raise ConfigError(
                    f"the checkpoint's config.json has {key} {hf[key]!r}, and {text[key]!r} in text_config, which "
                    "contradict each other. Keep the one that its tensors have."
                )
            of_weights = {key: hf[key] for key in _OF_WEIGHTS if key in hf}
            return {**of_weights, **text, "architectures": [family.architecture]}
    return hf


def family_of_hf(hf: Mapping[str, Any]) -> Family:
    """The family of a checkpoint.

    Raises:
        ConfigError: It is of no family that lockstep computes, or its weights are quantised.
    """
    hf = text_part(hf)
    _check_weights(hf)
    names, kind = hf.get("architectures") or [], hf.get("model_type")
    own = next((family for family in FAMILIES.values() if family.model_type == kind), None)
    if own is not None and names in ([], [own.architecture.replace("ForCausalLM", "Model")]):
        return own  # as in transformers, which looks at model_type; the second is saved without an output layer
    if len(names) != 1 or names[0] not in FAMILIES:
        lacks = "".join(f", which needs {NOT_COMPUTED[name]}" for name in names if name in NOT_COMPUTED)
        raise ConfigError(
            f"the checkpoint has architectures {names} (model_type {hf.get('model_type')!r}){lacks}; lockstep computes "
            f"{', '.join(FAMILIES)}. Choose a checkpoint of one of these."
        )
    family = FAMILIES[names[0]]
    if kind not in (None, family.model_type):
        raise ConfigError(
            f"the checkpoint's config.json has architectures {names} and model_type {kind!r}, which contradict each "
            f"other: {names[0]} has {family.model_type!r}, and transformers looks at model_type. Correct the wrong one."
        )
    return family


def _check_weights(hf: Mapping[str, Any]) -> None:
    """Refuse quantised weights, but MXFP4 of gpt-oss and FP8 in blocks, and those of another file."""
    weights = hf.get("transformers_weights")
    if weights not in (None, "model.safetensors", "model.safetensors.index.json"):
        raise ConfigError(
            f"the checkpoint's config.json has transformers_weights {weights!r}, the file that transformers reads; "
            "lockstep reads model.safetensors or its index. Rename the file, and remove the key."
        )
    for key in ("quantization_config", "compression_config"):  # the second is older, of compressed-tensors
        stated = hf.get(key)
        if stated is None:
            continue
        parts = stated if isinstance(stated, Mapping) else {"quant_method": stated}
        method = parts.get("quant_method")
        in_blocks = method == "fp8" and parts.get("weight_block_size") == [128, 128]
        if not in_blocks and (method != "mxfp4" or hf.get("architectures") != ["GptOssForCausalLM"]):
            raise ConfigError(
                f"the checkpoint's config.json has {key} (quant_method {method!r}): its weights are quantised. "
                f"{DEQUANTISE}"
            )


def family_of(config: LlamaConfig) -> Family:
    """The family as which a model is stored: that of its class, Llama, or else the first that loses nothing of it.

    Raises:
        ConfigError: Each family's ``config.json`` would describe another model.
    """
    llama = FAMILIES["LlamaForCausalLM"]
    own = next((family for cls in type(config).__mro__ for family in FAMILIES.values() if family.config is cls), llama)
    for family in (own, llama, *FAMILIES.values()):
        try:
            if not family.changes(config):
                return family
        except ConfigError:
            continue
    try:
        lost = ", ".join(f"{name} {want} would be {have}" for name, (want, have) in own.changes(config).items())
    except ConfigError as error:  # what it would write cannot be read
        lost = str(error).partition(". ")[0]
    raise ConfigError(
        f"a model with {config.variant} cannot be saved as a Hugging Face checkpoint: as {own.architecture}, {lost}, "
        f"and none of {', '.join(FAMILIES)} computes it. Leave these settings at the family's, or do not save."
    )


def config_from_hf(hf: Mapping[str, Any], *, max_seq_len: int | None = None) -> LlamaConfig:
    """Return the configuration that a Hugging Face ``config.json`` describes.

    It reads both spellings of the rotary settings: ``rope_theta`` and ``rope_scaling``, and ``rope_parameters`` of
    transformers 5.

    Args:
        max_seq_len: The longest sequence in tokens, in place of ``max_position_embeddings``. None for the file's own.

    Raises:
        ConfigError: The architecture, or one of its settings, is not one that lockstep computes; or a key is missing.
    """
    with refused("the checkpoint's config.json", "Download the checkpoint again."):
        for key in ("num_hidden_layers", "num_experts", "num_local_experts"):
            if isinstance(count := hf.get(key), int) and count > LAYERS:  # before a list has an entry for each
                raise ConfigError(f"config.json has {key} {count}; at most {LAYERS} are possible. Correct it.")
        return family_of_hf(hf).config_from_hf(text_part(hf), max_seq_len)


def config_to_hf(config: LlamaConfig, vocab_size: int) -> dict[str, Any]:
    """Return the content of a ``config.json`` with which transformers (4 or 5) computes the same model.

    The architecture is that of the configuration's class, or the first that computes the same: with ``qkv_bias`` it is
    Qwen2, with ``qk_norm`` Qwen3.

    Args:
        vocab_size: The number of rows of the embedding.

    Raises:
        ConfigError: No architecture that lockstep writes computes the model.
    """
    return family_of(config).config_to_hf(config, vocab_size)


def find_preset(name: str) -> ModelPreset | None:
    """Return the preset of a checkpoint, by the last part of its path; None if there is none.

    Args:
        name: The path, such as ``gs://bucket/models/Meta-Llama-3-8B-Instruct``; case, ``Meta-`` and ``-Instruct`` do
            not count.
    """
    last = name.rstrip("/").rpartition("/")[2].lower().removeprefix("meta-")
    return PRESETS.get(re.sub(r"-(instruct|base|it)\b", "", last))
