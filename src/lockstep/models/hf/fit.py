"""Whether the tensors of a checkpoint are those of a model: what is missing, of another shape, or would be left out."""

import difflib
import math
import re
from collections import Counter
from collections.abc import Sequence

from lockstep.errors import ConfigError
from lockstep.models.families.registry import DEQUANTISE
from lockstep.models.hf.files import CheckpointFiles
from lockstep.models.hf.names import Parameter, stored_shapes
from lockstep.models.hf.stored_names import HEAD
from lockstep.printable import get_logger

log = get_logger(__name__)

# Buffers that older versions of transformers stored; they follow from the configuration.
_DERIVED = re.compile(r".*\.rotary_emb\.inv_freq|.*\.masked_bias")
_PREDICTS = "eh_proj.weight"  # a layer of multi-token prediction has it (DeepSeek V3, GLM-4.5)
_SEES = (  # the vision tower of Qwen3.5, and that of Gemma 3 as two versions of transformers write it
    "model.visual.",
    *("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."),
)
# What fp8, compressed-tensors, GPTQ, AWQ, bitsandbytes, quanto and ModelOpt store beside weights, or in their place.
_OF_QUANTISED = re.compile(
    r".*\.(W_q|qweight|qzeros|g_idx|scales|SCB|weight_format|absmax|quant_map|nested_\w+|quant_state\.\w+|[kv]_scale"
    r"|(weight|input|output|[qkv])_(scale|scale_inv|scale_2|zero_point|packed|shape|g_idx|global_scale)"
    r"|weight\._(data|scale|shift|\w*scale\w*)|activation_scale|(input|output)_scale|weight_scale_and_zero)"
)
_OF_ADAPTER = re.compile(r"\.(lora_[AB]|lora_embedding_[AB]|lora_magnitude_vector|base_layer|modules_to_save)\.")
_FLOATS = ("F64", "F32", "F16", "BF16", "MXFP4", "FP8")


def check_tensors(files: CheckpointFiles, expected: Sequence[Parameter], *, tied: bool) -> None:
    """Refuse a checkpoint that has other tensors than a model, or some that would not be read.

    Args:
        expected: The parameters of the model.
        tied: Whether the output layer is the embedding, which may then be stored a second time.

    Raises:
        ConfigError: Weights are quantised; or tensors are missing, of another shape, or not part of the model.
    """
    _check_count(files, expected)
    shapes = stored_shapes(expected)
    places = {name: files.place(name) for name in shapes}
    _check_floats(files, [name for name, place in places.items() if place is not None])
    read = Counter[str]()
    for name, place in places.items():
        if place is not None:
            read[place.name] += math.prod(files.shape(name))
    copy = files.place(HEAD) if tied else None
    unread = files.names - read.keys() - ({copy.name} if copy is not None else set())
    predicting = tuple(name.removesuffix(_PREDICTS) for name in unread if name.endswith(_PREDICTS))
    predicting += ("mtp.",) if any(name.startswith("mtp.") for name in unread) else ()  # Qwen3-Next
    if predicting:
        log.warning("not read of %s: layers of multi-token prediction, %s", files.directory, ", ".join(predicting))
    if seeing := tuple(prefix for prefix in _SEES if any(name.startswith(prefix) for name in unread)):
        log.warning("not read of %s: the vision tower, %s; prompts are text", files.directory, ", ".join(seeing))
    left_out = predicting + seeing
    unexpected = sorted(name for name in unread if not (_DERIVED.fullmatch(name) or name.startswith(left_out)))
    _check_wrapped(files, [name for name, place in places.items() if place is None], unexpected)
    problems = [
        f"tensor {name} of shape {shapes[name]} is missing{_nearest(name, unexpected)}"
        for name, place in places.items()
        if place is None
    ]
    problems += [
        f"tensor {place.name} in {files.file_of(name)} has shape {files.shape(name)}, expected {shapes[name]}"
        for name, place in places.items()
        if place is not None and files.shape(name) != shapes[name]
    ]
    problems += [
        f"tensor {name} in {files.file_of(name)} of shape {files.shape(name)} is not part of the model"
        for name in unexpected
    ]
    if not problems:
        problems = [
            f"tensor {name} in {files.file_of(name)} of shape {files.shape(name)} has more experts than the model"
            for name, count in read.items()
            if count < math.prod(files.shape(name))
        ]
    if [name for name, place in places.items() if place is None] == [HEAD] and len(problems) == 1:
        raise ConfigError(
            f"the checkpoint in {files.directory} has all tensors of the model but {HEAD}, the output layer: it was "
            "saved by AutoModel. Save it by AutoModelForCausalLM, or set tie_word_embeddings in config.json to true "
            "where the output layer is the embedding."
        )
    if problems:
        shown = problems[:10] + ([f"and {len(problems) - 10} more"] if len(problems) > 10 else [])
        raise ConfigError(
            f"the checkpoint in {files.directory} does not fit its configuration: {'; '.join(shown)}. Check "
            "config.json (architectures, sizes, tie_word_embeddings) against the tensors."
        )


def _check_count(files: CheckpointFiles, expected: Sequence[Parameter]) -> None:
    """Refuse a configuration with many more layers or experts than there are tensors, before each has a name."""
    tensors = len(files.names)
    longest = max((size for name in files.names for size in files.shape(name)), default=0)  # experts may share a tensor
    layers = max(len(parameter.layers) for parameter in expected)
    experts = max(parameter.sizes.get("expert", 1) for parameter in expected)
    for count, kind, most in ((layers, "layers", tensors), (experts, "experts", max(tensors, longest))):
        if count > most:
            raise ConfigError(
                f"the model that config.json describes has {count} {kind}, and the checkpoint in {files.directory} has "
                f"{tensors} tensors, fewer than one for each. Check the numbers of layers and experts in config.json."
            )


def _check_floats(files: CheckpointFiles, read: Sequence[str]) -> None:
    """Refuse quantised weights, whose tensors would otherwise not fit, or fit and be integers."""
    quantised = next((name for name in sorted(files.names) if _OF_QUANTISED.fullmatch(name)), None)
    quantised = quantised or next((name for name in read if files.stored_dtype(name) not in _FLOATS), None)
    if quantised is not None:
        raise ConfigError(
            f"the checkpoint in {files.directory} is quantised: {files.file_of(quantised)} has tensor {quantised} of "
            f"dtype {files.stored_dtype(quantised)}. {DEQUANTISE}"
        )


def _check_wrapped(files: CheckpointFiles, missing: Sequence[str], unexpected: Sequence[str]) -> None:
    """Refuse the tensors of a model inside another module by what to do: their shapes are right."""
    if adapter := next((name for name in unexpected if _OF_ADAPTER.search(name)), None):
        raise ConfigError(
            f"the checkpoint in {files.directory} has tensor {adapter} of an adapter that is not merged. Merge it "
            "(peft: merge_and_unload), and save that model."
        )
    ends = [name for name in unexpected if missing and name.endswith(missing[0])]
    for prefix in (name.removesuffix(missing[0]) for name in ends):
        if prefix and {prefix + name for name in missing} <= set(unexpected):
            raise ConfigError(
                f"the checkpoint in {files.directory} has the tensors of the model as {prefix}{missing[0]} and so on: "
                f"it was saved inside another module. Save the module {prefix.rstrip('.')} of that one, or rename them."
            )


def _nearest(name: str, candidates: Sequence[str]) -> str:
    match = difflib.get_close_matches(name, candidates, n=1, cutoff=0.95)
    return f" (there is {match[0]})" if match else ""
