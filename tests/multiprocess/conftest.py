"""What several test modules here share."""

from pathlib import Path

import pytest

from lockstep.models import save_hf
from tests import tiny


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkpoint with random weights and the demo's tokenizer."""
    path = tmp_path_factory.mktemp("model") / "checkpoint"
    save_hf(tiny.init_model(tiny.make_trainer("auto", 1)), path, tokenizer=tiny.tokenizer())
    return path
