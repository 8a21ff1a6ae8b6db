"""Language models: their configurations, the trainable model, what the decoder reads, Hugging Face in and out."""

from lockstep.models.config import (
    Llama3Scaling,
    LlamaConfig,
    MistralConfig,
    ModelConfig,
    Qwen2Config,
    Qwen3Config,
    RotaryConfig,
    rotary_frequencies,
)
from lockstep.models.hf_config import config_from_hf, config_to_hf
from lockstep.models.huggingface import load_config, load_hf, read_hf_config
from lockstep.models.huggingface_save import save_hf
from lockstep.models.known import KnownModel, known_model
from lockstep.models.llama import LlamaLMHeadModel
from lockstep.models.reader import UnreadableModelError, read_decoder, register_reader
from lockstep.models.trainable import as_trainable
from lockstep.models.variant import Variant
from lockstep.models.weights import DecoderWeights, LayerWeights
from lockstep.placement.stored import StoredWeight, view

__all__ = [
    "DecoderWeights",
    "LayerWeights",
    "KnownModel",
    "Llama3Scaling",
    "LlamaConfig",
    "LlamaLMHeadModel",
    "MistralConfig",
    "ModelConfig",
    "Qwen2Config",
    "Qwen3Config",
    "RotaryConfig",
    "StoredWeight",
    "UnreadableModelError",
    "Variant",
    "as_trainable",
    "config_from_hf",
    "config_to_hf",
    "known_model",
    "load_config",
    "load_hf",
    "read_decoder",
    "read_hf_config",
    "register_reader",
    "rotary_frequencies",
    "save_hf",
    "view",
]
