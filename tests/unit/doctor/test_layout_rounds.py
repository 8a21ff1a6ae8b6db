"""The model, tokenizer and data of the self-test fit every mesh."""

import dataclasses

import numpy as np
import pytest

from lockstep.doctor.layout_rounds import LENGTH, PROMPTS, TEXT, make_rows, make_tokenizer, shape_for
from lockstep.engine.decode_model import _fits
from lockstep.placement import tensor_sizes


@dataclasses.dataclass
class Grid:
    shape: dict
    platform: str

    @property
    def size(self):
        return int(np.prod(list(self.shape.values())))

    @property
    def devices(self):
        device = type("Device", (), {"platform": self.platform})()
        return np.full(tuple(self.shape.values()), device)


def test_characters_are_tokens_and_come_back():
    tokenizer = make_tokenizer()
    tokens = tokenizer.encode(TEXT)
    assert len(tokens) == len(TEXT) and tokenizer.unk_token_id not in tokens
    assert tokenizer.decode(tokens) == TEXT
    assert all(prompt in TEXT for prompt in PROMPTS)


def test_rows_are_windows_of_the_text_the_same_every_time():
    tokenizer = make_tokenizer()
    rows = make_rows(tokenizer, 8)
    assert rows.columns["tokens"].shape == (8, LENGTH)
    assert rows.digest() == make_rows(make_tokenizer(), 8).digest()
    text = tokenizer.decode(rows.columns["tokens"][0])
    assert text in TEXT + TEXT


@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (1, 32, 1), (8, 4, 1), (1, 24, 1), (1, 3, 1), (1, 4, 8), (1, 3, 2), (1, 256, 1)]
)
@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_the_mesh_divides_all_axes(shape, platform):
    mesh = Grid(dict(zip(("dp", "fsdp", "tp"), shape, strict=True)), platform)
    config = shape_for(mesh)
    assert config.hidden_dim % mesh.shape["fsdp"] == 0
    assert config.num_kv_heads % mesh.shape["tp"] == 0 and config.intermediate_dim % mesh.shape["tp"] == 0
    assert all(_fits(config, {"tensor": size}) for size in tensor_sizes(mesh)), "every layout of decoding"
