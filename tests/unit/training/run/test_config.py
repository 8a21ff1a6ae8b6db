"""Values of a training command's configuration that cannot work together."""

import pytest

from lockstep.errors import ConfigError
from lockstep.models import LoraConfig
from lockstep.training import TrainConfig
from tests import tiny


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"hf_save_steps": 0, "hf_save_path": "a"}, "hf_save_steps is 0; it must be at least 1"),
        ({"hf_save_dtype": "int8", "hf_save_path": "a"}, "hf_save_dtype is 'int8'; it must be float32 or bfloat16"),
        ({"hf_save_steps": 5}, "hf_save_steps is set and hf_save_path is null"),
        ({"initialize_from_hf": "x"}, "exactly one of model and initialize_from_hf is needed, but both are given"),
        ({"model": None}, "exactly one of model and initialize_from_hf is needed, but neither is given"),
        ({"gradient_checkpointing": "full"}, "set model.gradient_checkpointing instead"),
        ({"lora": LoraConfig(r=4)}, "its random weights would stay as they are"),
    ],
)
def test_values_that_cannot_work(values, text):
    with pytest.raises(ConfigError, match=text):
        TrainConfig(**{"data": None, "model": tiny.CONFIG, "tokenizer": tiny.TOKENIZER, **values})
