"""Sequence classifiers with one label: which are read, and as what."""

from pathlib import Path

import pytest

from lockstep.errors import ConfigError
from lockstep.models import load_config
from lockstep.models.hf.load import read_hf_config
from lockstep.models.hf.scorer import scorer_config, with_score
from lockstep.models.trainable import skeleton

GOLDEN = Path(__file__).parents[3] / "golden" / "reward_model"


def test_a_classifier_is_a_language_model_with_a_score_for_its_output_layer():
    config = load_config(GOLDEN, scorer=True)
    assert config.num_layers == 2 and not config.tie_word_embeddings
    model, tensors = with_score(
        skeleton(512, config), {"embed": "model.embed_tokens.weight", "lm_head": "lm_head.weight"}
    )
    assert model.lm_head.array.shape == (16, 1) and model.embed.array.shape == (512, 16)
    assert tensors == {"embed": "model.embed_tokens.weight", "lm_head": "score.weight"}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"architectures": ["Qwen2ForCausalLM"]},
            "here has architectures .*Qwen2ForCausalLM.* is a model ForSequenceCl",
        ),
        ({"architectures": None}, "here has architectures None"),
        ({"id2label": {"0": "bad", "1": "good"}}, "and 2 labels"),
        ({"id2label": None}, "and 2 labels"),
    ],
)
def test_another_model_is_refused(change, text):
    with pytest.raises(ConfigError, match=text):
        scorer_config(read_hf_config(GOLDEN) | change, "here")
