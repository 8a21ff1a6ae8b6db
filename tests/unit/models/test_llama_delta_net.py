"""Layers with linear attention in a trainable model: packed documents are apart."""

from pathlib import Path

import haliax as hax
import numpy as np
import pytest

from lockstep.models import load_hf
from tests.unit.engine.models import mesh_of

GOLDEN = Path(__file__).parents[2] / "golden"


@pytest.mark.slow
def test_packed_documents_of_a_model_have_the_logits_that_they_have_alone() -> None:
    golden = np.load(GOLDEN / "qwen3_next" / "golden.npz")
    model = load_hf(str(GOLDEN / "qwen3_next"), mesh_of("1,1,1"))
    lengths = [7, 1, 16]
    ids, expected = golden["input_ids"], golden["logits"]
    packed = np.concatenate([ids[row % 2, :length] for row, length in enumerate(lengths)])[None]
    segments = np.repeat([1, 2, 3], lengths)[None].astype(np.int32)
    names = ("batch", "position")
    logits = hax.named_jit(lambda model, *parts: model(*parts))(
        model, hax.named(packed, names), hax.named(segments, names)
    )
    alone = np.concatenate([expected[row % 2, :length] for row, length in enumerate(lengths)])
    assert np.abs(np.asarray(logits.array)[0] - alone).max() < 1e-4
