"""Sequence classifiers with one label, such as reward models: a language model whose output layer has one column."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

import haliax as hax
import jax

from lockstep.errors import ConfigError
from lockstep.models.llama import LlamaLMHeadModel

_CLASSIFIER: Final = "ForSequenceClassification"
_SCORE: Final = "score.weight"


def scorer_config(hf: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return the ``config.json`` of a classifier with one label as that of the language model under its score.

    Args:
        place: Where it was read, for errors.

    Raises:
        ConfigError: It is of another kind of model, or has several labels.
    """
    (name, *further), labels = hf.get("architectures") or [""], hf.get("id2label") or {"0": "", "1": ""}
    if further or not str(name).endswith(_CLASSIFIER) or len(labels) != 1:
        raise ConfigError(
            f"{place} has architectures {hf.get('architectures')} and {len(labels)} labels (id2label); a reward model "
            f"is a model {_CLASSIFIER} with one. Use a checkpoint that was saved with num_labels=1."
        )
    causal = str(name).replace(_CLASSIFIER, "ForCausalLM")
    return {**hf, "architectures": [causal], "tie_word_embeddings": False}


def with_score(model: LlamaLMHeadModel, tensors: Mapping[str, str]) -> tuple[LlamaLMHeadModel, dict[str, str]]:
    """Return the skeleton of a classifier, from that of its language model, and the names of its tensors by weight."""
    embed = model.embed.resolve_axis("embed")
    score = jax.eval_shape(lambda: hax.zeros((embed, hax.Axis("vocab", 1))))
    return dataclasses.replace(model, lm_head=score), {**tensors, "lm_head": _SCORE}
