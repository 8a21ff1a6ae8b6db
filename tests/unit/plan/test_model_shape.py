"""The shape of a model that is planned: of a block, a checkpoint, or a name."""

import pytest

from lockstep.errors import ConfigError
from lockstep.plan.model_shape import shape_of
from tests import tiny
from tests.adapters import save_base


def test_the_shape_of_a_block_a_checkpoint_and_a_name(tmp_path):
    block = shape_of(None, tiny.CONFIG, str(tiny.TOKENIZER), "model", None)
    save_base(str(tmp_path))
    checkpoint = shape_of(str(tmp_path), None, None, "teacher", None)
    assert block.config == tiny.CONFIG and block.vocab_size >= tiny.vocab_size() == checkpoint.vocab_size
    assert checkpoint.config.num_layers == tiny.CONFIG.num_layers
    assert shape_of("Llama-3.1-8B", None, None, "teacher", None).config.num_layers == 32


def test_one_that_is_nowhere_is_refused_by_its_key():
    with pytest.raises(ConfigError, match="teacher is 'no/model', which is neither a directory with a config.json nor"):
        shape_of("no/model", None, None, "teacher", None)
