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
from lockstep.models.llama import LlamaLMHeadModel
from lockstep.models.reader import UnreadableModelError, read_decoder, register_reader
from lockstep.models.weights import DecoderWeights, LayerWeights

__all__ = [
    "DecoderWeights",
    "LayerWeights",
    "Llama3Scaling",
    "LlamaConfig",
    "LlamaLMHeadModel",
    "MistralConfig",
    "ModelConfig",
    "Qwen2Config",
    "Qwen3Config",
    "RotaryConfig",
    "UnreadableModelError",
    "read_decoder",
    "register_reader",
    "rotary_frequencies",
]
