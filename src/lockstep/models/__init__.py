"""Language models: their configurations, the trainable model, what the decoder reads, Hugging Face in and out."""

from lockstep.models import block
from lockstep.models.check_reader import ReaderCheck, ReaderMismatchError, check_reader
from lockstep.models.config import (
    LayerKind,
    LlamaConfig,
    ModelConfig,
    Variant,
    distinct,
    layer_kinds,
    padded_vocab_size,
    rotary_frequencies,
)
from lockstep.models.families.family import ModelPreset
from lockstep.models.families.mistral import MistralConfig
from lockstep.models.families.qwen2 import Qwen2Config
from lockstep.models.families.qwen3 import Qwen3Config
from lockstep.models.families.registry import config_from_hf, config_to_hf, find_preset
from lockstep.models.from_names import LoraNames, NamesReader, from_names
from lockstep.models.hf.adapters import ReadPair, merged_rows, save_peft
from lockstep.models.hf.files import fingerprint
from lockstep.models.hf.load import load_config, load_hf, read_hf_config
from lockstep.models.hf.save import SavesTokenizer, export_hf, save_hf
from lockstep.models.hf.save_plan import SavedTensor
from lockstep.models.hf.save_writer import Read
from lockstep.models.llama import LlamaLMHeadModel
from lockstep.models.lora import LoraConfig, LoraModel, join_trained, split_trained
from lockstep.models.low_rank import RANK, MergeLora, merge_lora
from lockstep.models.reader import read_decoder
from lockstep.models.registry import (
    UnreadableModelError,
    UnreadParameterError,
    check_all_read,
    named_parameters,
    register_reader,
)
from lockstep.models.remat import POLICIES, RematPolicy, recomputes_layers
from lockstep.models.rope import Llama3Scaling, RotaryConfig
from lockstep.models.trainable import as_trainable, layer_products, skeleton
from lockstep.models.weights import STACKED, TENSOR_DIMS, WEIGHT_AXES, DecoderWeights, LayerWeights, input_dims
from lockstep.placement import LazyWeight, view

__all__ = [
    "POLICIES",
    "RANK",
    "STACKED",
    "TENSOR_DIMS",
    "WEIGHT_AXES",
    "DecoderWeights",
    "LayerWeights",
    "ModelPreset",
    "Llama3Scaling",
    "LlamaConfig",
    "LlamaLMHeadModel",
    "MistralConfig",
    "ModelConfig",
    "Qwen2Config",
    "Qwen3Config",
    "RematPolicy",
    "Read",
    "ReaderCheck",
    "ReaderMismatchError",
    "ReadPair",
    "RotaryConfig",
    "SavedTensor",
    "SavesTokenizer",
    "LayerKind",
    "LazyWeight",
    "LoraConfig",
    "LoraModel",
    "LoraNames",
    "MergeLora",
    "NamesReader",
    "UnreadParameterError",
    "UnreadableModelError",
    "Variant",
    "as_trainable",
    "block",
    "check_all_read",
    "check_reader",
    "config_from_hf",
    "config_to_hf",
    "distinct",
    "export_hf",
    "find_preset",
    "fingerprint",
    "load_config",
    "from_names",
    "input_dims",
    "join_trained",
    "layer_kinds",
    "layer_products",
    "load_hf",
    "merge_lora",
    "merged_rows",
    "named_parameters",
    "padded_vocab_size",
    "read_decoder",
    "read_hf_config",
    "recomputes_layers",
    "register_reader",
    "rotary_frequencies",
    "save_hf",
    "save_peft",
    "skeleton",
    "split_trained",
    "view",
]
