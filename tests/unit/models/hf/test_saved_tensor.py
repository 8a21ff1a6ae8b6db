"""Which tensors of a checkpoint are in which of its files."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from lockstep.models import load_config, skeleton
from lockstep.models.hf import saved_tensor
from lockstep.models.hf.saved_tensor import file_header, index_text, pieces_of, saved_tensors, split_into_files
from tests import tiny

GOLDEN = Path(__file__).parents[3] / "golden"
VOCAB = 40


def tensors(dtype=None, vocab_size=VOCAB):
    return saved_tensors(skeleton(VOCAB, tiny.CONFIG), dtype, vocab_size)


def named(name, **values):
    (found,) = [each for each in tensors(**values) if each.name == name]
    return found


def test_a_small_checkpoint_is_one_file():
    some = tensors()
    assert split_into_files(some, 10**9, 8) == {"model.safetensors": some}


@pytest.mark.parametrize("most", [10_000, 20_000, 50_000])
def test_no_file_is_larger_than_allowed_but_for_one_large_tensor(most):
    some = tensors()
    files = split_into_files(some, most, 1)
    assert [each for group in files.values() for each in group] == some
    sizes = [sum(each.nbytes for each in group) for group in files.values()]
    assert all(size <= most or len(group) == 1 for size, group in zip(sizes, files.values(), strict=True))
    assert len(sizes) > 1 and list(files) == [
        f"model-{i:05}-of-{len(sizes):05}.safetensors" for i in range(1, len(sizes) + 1)
    ]


@pytest.mark.parametrize("writers", [2, 3, 5])
def test_every_writer_has_about_as_much_as_any_other(writers, monkeypatch):
    monkeypatch.setattr(saved_tensor, "MIN_PART_BYTES", 1)
    sizes = [sum(each.nbytes for each in group) for group in split_into_files(tensors(), 10**9, writers).values()]
    assert len(sizes) == writers
    assert max(sizes) <= sum(sizes) / writers + max(each.nbytes for each in tensors())


def test_pieces_are_all_rows_once_and_no_larger_than_allowed():
    embed = named("model.embed_tokens.weight")
    row = 4 * tiny.CONFIG.hidden_dim
    assert list(embed.pieces(7 * row)) == [(i, min(i + 7, VOCAB)) for i in range(0, VOCAB, 7)]
    assert list(embed.pieces(1)) == [(i, i + 1) for i in range(VOCAB)]
    heads = named("model.layers.1.self_attn.q_proj.weight")
    assert list(heads.pieces(heads.nbytes // 2)) == [(0, 1), (1, 2)], "its rows come in groups, one for each K/V head"


def test_rows_that_only_pad_the_vocabulary_are_not_stored():
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert named(name, vocab_size=37).shape == (37, tiny.CONFIG.hidden_dim)
    assert named("model.norm.weight", vocab_size=37).shape == (tiny.CONFIG.hidden_dim,)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_the_header_is_what_safetensors_reads(dtype, tmp_path):
    some = tensors(dtype)[:4]
    values = [np.arange(np.prod(each.shape)).reshape(each.shape).astype(dtype) for each in some]
    header = file_header(some)
    (tmp_path / "file").write_bytes(header + b"".join(value.tobytes() for value in values))
    read = load_file(tmp_path / "file")
    assert len(header) % 8 == 0
    for each, value in zip(some, values, strict=True):
        assert read[each.name].dtype == dtype
        np.testing.assert_array_equal(read[each.name], value)


def test_experts_of_one_tensor_have_gate_above_up_each(tmp_path):
    """As Mistral 4 has them; test_families.py reads and writes its checkpoint."""
    every = saved_tensors(skeleton(VOCAB, load_config(str(GOLDEN / "mistral4"))), np.float32, VOCAB)
    own = [tensor for tensor in every if tensor.layer == 1 and tensor.parameter.name.startswith("expert_")]
    rng = np.random.default_rng(0)
    values = {
        tensor.parameter.name: rng.random((5, tensor.shape[0] // 5, tensor.shape[1]), np.float32) for tensor in own
    }
    pieces = [values[tensor.parameter.name][start:stop] for tensor, start, stop in pieces_of(own, 10**9)]
    (tmp_path / "file").write_bytes(file_header(own) + b"".join(piece.tobytes() for piece in pieces))
    read, experts = load_file(tmp_path / "file"), "model.layers.1.mlp.experts."
    both = np.concatenate([values["expert_gate"], values["expert_up"]], axis=1)
    np.testing.assert_array_equal(read[experts + "gate_up_proj"], both)
    np.testing.assert_array_equal(read[experts + "down_proj"], values["expert_down"])
    assert read.keys() == json.loads(index_text({"a": own}))["weight_map"].keys()


def test_the_index_names_the_file_of_each_tensor():
    files = split_into_files(tensors(), 20_000, 1)
    index = json.loads(index_text(files))
    assert index["metadata"]["total_size"] == sum(each.nbytes for group in files.values() for each in group)
    assert index["weight_map"] == {each.name: file for file, group in files.items() for each in group}
