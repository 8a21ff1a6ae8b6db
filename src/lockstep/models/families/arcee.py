"""Arcee (https://huggingface.co/arcee-ai/AFM-4.5B): a Llama whose MLP has no gate, and squares what ReLU leaves."""

import dataclasses
from typing import Final

from lockstep.models.config import LlamaConfig, ModelConfig
from lockstep.models.families import llama
from lockstep.models.families.family import Family
from lockstep.models.variant import Activation, Variant


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArceeVariant(Variant):
    """The switches of Arcee."""

    activation: Activation = "relu2"


@ModelConfig.register_subclass("arcee")
@dataclasses.dataclass(frozen=True, kw_only=True)
class ArceeConfig(LlamaConfig):
    """Arcee (https://huggingface.co/arcee-ai/AFM-4.5B): an MLP without a gate, of the square of ReLU."""

    variant: ArceeVariant = dataclasses.field(default_factory=ArceeVariant)


FAMILY: Final = Family(
    architecture="ArceeForCausalLM",
    model_type="arcee",
    config=ArceeConfig,
    tensors={name: tensor for name, tensor in llama.TENSORS.items() if name != "gate"},
    activations={"relu2": "relu2"},
    defaults={"rms_norm_eps": 1e-5},  # that of transformers
    write=lambda config: {"attention_bias": False, "mlp_bias": False},
)
